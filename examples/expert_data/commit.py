"""Training data: descriptions of changes and their conventional commit headers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.expert_data.base import Example, made_up, pick, words

TYPES = ("feat", "fix", "docs", "test", "refactor", "perf")
_SCOPES = words(
    """
    parser auth cache router editor billing search mailer queue config logger importer session theme
    export scheduler gateway upload
    compiler sidebar login payments tracker installer archive graph widgets sync permissions sitemap
    feed storage camera printer bot dialogs shop analytics composer crawler ledger alerts tables
    templates tokens audio video media deploy runtime plugin index menu footer keyboard
    """
)
_DONE = {
    "feat": (
        ("Users can now {do} in the {s}.", "let users {do}"),
        ("Added a way to {do} to the {s}.", "add a way to {do}"),
        ("The {s} supports a new option to {do}.", "add option to {do}"),
        ("It is now possible to {do} with the {s}.", "allow to {do}"),
        ("We introduced {n} in the {s}.", "introduce {n}"),
        ("New in the {s}: {n}.", "add {n}"),
        ("Implemented {n} for the {s}.", "implement {n}"),
        ("Customers can {do} right from the {s}.", "let customers {do}"),
        ("The {s} shows {n} now, which nobody had before.", "show {n}"),
        ("{n2} may be chosen in the {s} by every editor.", "let editors choose {n}"),
        ("A new switch of the {s} turns {n} on.", "add switch for {n}"),
        ("From today the {s} is able to {do}.", "be able to {do}"),
        ("Support for {n} landed in the {s}.", "support {n}"),
    ),
    "fix": (
        ("The {s} crashed when {w}; that is solved.", "prevent crash when {w}"),
        ("Repaired a bug in the {s} where {n} was lost.", "keep {n}"),
        ("The {s} no longer fails when {w}.", "do not fail when {w}"),
        ("Corrected the wrong {n} in the {s}.", "correct {n}"),
        ("A null pointer in the {s} when {w} is gone.", "handle null when {w}"),
        ("The {s} returned an error if {w}. Now it works.", "return no error if {w}"),
        ("Resolved a race in the {s} about {n}.", "resolve race about {n}"),
        ("{n2} came out wrong in the {s} after a restart. That bug is dead.", "correct {n}"),
        ("Whenever {w}, the {s} hung. Not any more.", "do not hang when {w}"),
        ("The {s} mixed up {n}; mended.", "do not mix up {n}"),
        ("Wrong {n} were shown by the {s} by mistake, right ones appear now.", "show right {n}"),
        ("Closed a security hole in the {s} around {n}.", "close hole around {n}"),
        ("A leak of {n} in the {s} was stopped.", "stop leak of {n}"),
    ),
    "docs": (
        ("Wrote a page on how to {do} with the {s}.", "explain how to {do}"),
        ("The README now describes {n} of the {s}.", "describe {n}"),
        ("Corrected typos in the guide for the {s}.", "correct typos in guide"),
        ("Added comments and examples to the {s} manual.", "add examples"),
        ("Documented {n} in the {s}.", "document {n}"),
        ("The help text of the {s} explains {n}.", "explain {n} in help text"),
        ("A tutorial for the {s} shows how to {do}.", "show how to {do}"),
        ("Pictures of {n} were put into the handbook of the {s}.", "add pictures of {n}"),
        ("Mended dead links on the page about the {s}.", "mend dead links"),
        ("The wiki has an article on {n} in the {s}.", "write article on {n}"),
        ("Wording about {n} in the manual of the {s} is clearer.", "clarify {n}"),
        ("The reference now lists {n} for the {s}.", "list {n}"),
    ),
    "test": (
        ("Added unit tests for {n} in the {s}.", "cover {n}"),
        ("The {s} has a test for the case that {w}.", "cover case that {w}"),
        ("Raised the coverage of the {s} by checking {n}.", "check {n}"),
        ("New integration tests check that the {s} can {do}.", "check that it can {do}"),
        ("Made the flaky test of the {s} about {n} stable.", "make {n} test stable"),
        ("A test suite now tries {n} of the {s}.", "try {n}"),
        ("{n2} of the {s} are asserted in a new test.", "assert {n}"),
        ("More cases in the tests of the {s}, such as that {w}.", "add case that {w}"),
        ("Random input tests were written against the {s}.", "add random input"),
        ("The tests for the {s} no longer need a network.", "need no network"),
    ),
    "refactor": (
        ("Moved {n} of the {s} to its own module, users see no change.", "move {n} to module"),
        ("Renamed variables around {n} in the {s} for clarity.", "rename variables of {n}"),
        ("Split the big class of the {s} that held {n}.", "split class of {n}"),
        ("Simplified the code for {n} in the {s} without new behaviour.", "simplify {n}"),
        ("Removed duplicate code about {n} from the {s}.", "remove duplicate code of {n}"),
        ("Tidied up how the {s} treats {n}; it does the same as before.", "tidy up {n}"),
        ("Gave functions in the {s} better names.", "rename functions"),
        ("The {s} was cut into smaller files, behaviour unchanged.", "cut into smaller files"),
        ("Deleted code for {n} that nobody calls in the {s}.", "delete unused {n} code"),
        ("Put a common base class under {n} in the {s}.", "share base class of {n}"),
        ("Internal cleanup of {n} within the {s}.", "clean up {n}"),
    ),
    "perf": (
        ("The {s} handles {n} twice as fast.", "speed up {n}"),
        ("Cut the memory that the {s} needs for {n}.", "use less memory for {n}"),
        ("Made {n} in the {s} quicker with an index.", "index {n}"),
        ("The {s} now reuses buffers, so {n} takes half the time.", "reuse buffers for {n}"),
        ("Loading {n} in the {s} went from 3 seconds to 1.", "load {n} faster"),
        ("{n2} take less time in the {s} because they are cached.", "cache {n}"),
        ("The {s} starts in half the time.", "start faster"),
        ("Less CPU is burnt by the {s} for {n}.", "use less CPU for {n}"),
        ("Parallel work on {n} makes the {s} faster.", "work on {n} in parallel"),
        ("The {s} asks the database once for {n}, not ten times.", "query {n} once"),
        ("Latency of the {s} went down with a pool for {n}.", "pool {n}"),
    ),
}  # fmt: skip
_ACTS = (
         "sort by date", "undo changes", "share a link", "filter results", "log out everywhere",
         "pick a language", "print a page", "merge entries", "pin a note", "skip a step",
)  # fmt: skip
_NOUNS = ("empty lines", "time zones", "large files", "user names", "the retry count", "old keys",
          "page numbers", "nested lists", "the start menu", "long titles", "default values",
          "error codes", "row limits", "saved drafts")  # fmt: skip
_WHENS = ("the file is empty", "the network is down", "two users write at once", "the name is long",
          "no item is selected", "the disk is full", "the date is missing")  # fmt: skip
_ASKS = (
    "Conventional commit header, type(scope): summary.\n{text}",
    "{text}\nCommit header as type(scope): summary. Types: {types}.",
    "Types {types}. Write the commit header: {text}",
    "Please describe this change in one line of the form type(scope): summary, with a type out of "
    "{types}:\n{text}",
    "Change: {text}\nThe git subject line, conventional style ({types}):",
    "{text} What is the commit message type(scope): summary for it? Choose from {types}.",
    'Give a commit header like "type(scope): summary" for: {text}',
)


def examples(seed: int = 17) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        kind = pick(draw, TYPES)
        text, summary = pick(draw, _DONE[kind])
        scope = pick(draw, _SCOPES) if draw.random() < 0.6 else made_up(draw)
        parts = {"s": scope, "do": pick(draw, _ACTS), "n": pick(draw, _NOUNS),
                 "w": pick(draw, _WHENS)}  # fmt: skip
        if draw.random() < 0.4:
            text = text.replace("the {s}", "{s}").replace("The {s}", "{S}")
        parts |= {"S": scope.capitalize(), "n2": parts["n"].capitalize()}
        types = ", ".join(draw.sample(TYPES, len(TYPES)))
        asked = pick(draw, _ASKS).format(text=text.format(**parts), types=types)
        yield Example(asked, f"{kind}({scope}): {summary.format(**parts)}")
