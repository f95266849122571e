"""Descriptions of changes and their conventional commit headers, to learn from."""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.expert_data.base import Example, made_up, pick, words

TYPES = ("feat", "fix", "docs", "test", "refactor", "perf")
_SCOPES = words(
    """
    parser auth cache router editor billing search mailer queue config logger importer session theme
    export scheduler gateway upload
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
    ),
    "fix": (
        ("The {s} crashed when {w}; that is solved.", "prevent crash when {w}"),
        ("Repaired a bug in the {s} where {n} was lost.", "keep {n}"),
        ("The {s} no longer fails when {w}.", "do not fail when {w}"),
        ("Corrected the wrong {n} in the {s}.", "correct {n}"),
        ("A null pointer in the {s} when {w} is gone.", "handle null when {w}"),
        ("The {s} returned an error if {w}. Now it works.", "return no error if {w}"),
        ("Resolved a race in the {s} about {n}.", "resolve race about {n}"),
    ),
    "docs": (
        ("Wrote a page on how to {do} with the {s}.", "explain how to {do}"),
        ("The README now describes {n} of the {s}.", "describe {n}"),
        ("Corrected typos in the guide for the {s}.", "correct typos in guide"),
        ("Added comments and examples to the {s} manual.", "add examples"),
        ("Documented {n} in the {s}.", "document {n}"),
        ("The help text of the {s} explains {n}.", "explain {n} in help text"),
    ),
    "test": (
        ("Added unit tests for {n} in the {s}.", "cover {n}"),
        ("The {s} has a test for the case that {w}.", "cover case that {w}"),
        ("Raised the coverage of the {s} by checking {n}.", "check {n}"),
        ("New integration tests check that the {s} can {do}.", "check that it can {do}"),
        ("Made the flaky test of the {s} about {n} stable.", "make {n} test stable"),
    ),
    "refactor": (
        ("Moved {n} of the {s} to its own module, users see no change.", "move {n} to module"),
        ("Renamed variables around {n} in the {s} for clarity.", "rename variables of {n}"),
        ("Split the big class of the {s} that held {n}.", "split class of {n}"),
        ("Simplified the code for {n} in the {s} without new behaviour.", "simplify {n}"),
        ("Removed duplicate code about {n} from the {s}.", "remove duplicate code of {n}"),
    ),
    "perf": (
        ("The {s} handles {n} twice as fast.", "speed up {n}"),
        ("Cut the memory that the {s} needs for {n}.", "use less memory for {n}"),
        ("Made {n} in the {s} quicker with an index.", "index {n}"),
        ("The {s} now reuses buffers, so {n} takes half the time.", "reuse buffers for {n}"),
        ("Loading {n} in the {s} went from 3 seconds to 1.", "load {n} faster"),
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
        parts["S"] = scope.capitalize()
        types = ", ".join(draw.sample(TYPES, len(TYPES)))
        asked = pick(draw, _ASKS).format(text=text.format(**parts), types=types)
        yield Example(asked, f"{kind}({scope}): {summary.format(**parts)}")
