"""Separates the instruction of a text from its material, and finds the opening word.

"Translate 'positive or negative' into French" and "Is this positive or negative? Too slow." have
words of a task in common, but in the first text they are material to work on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from coterie.core.quick_init import quick_init

_QUOTED = re.compile(
    r"\"[^\"\n]{1,600}\"|“[^”]{1,600}”|«[^»]{1,600}»|`[^`]{1,600}`|(?<![\w'])'[^'\n]{2,300}'(?!\w)"
)
_QUOTES = ('"', "“", "«", "`", "'")
# text after "Translate this into French: " is material, text after "Text: " may be the instruction
_AFTER_COLON = re.compile(r"^(\S+(?:[^\S\n]+\S+){2,}?):[^\S\n]+(\S.*)$", re.M)
_MIN_INSTRUCTION_CHARS = 12
# replaces material; a word that nobody writes
_MATERIAL = " qqq "
_MAX_OPENING = 8
_SKIPPED = frozenset(
    "please can you could would i want need like hi hey hello there now then kindly just to the a".split()  # noqa: E501, SIM905
)
_OPENINGS = {
    "what": "what what's who who's whose when where",
    "why": "why",
    "how": "how",
    "which": "which",
    "is": "is are was were do does did can could should will would has have am may must isn't "
    "doesn't",
    "translate": "translate",
    "explain": "explain describe define discuss compare outline illustrate teach",
    "fix": "fix debug repair correct proofread improve optimise optimize refactor review check "
    "test validate verify edit polish",
    "make": "write create make generate compose draft build design develop implement produce "
    "invent imagine prepare code program train",
    "convert": "convert turn transform change rewrite reformat express put standardise normalise "
    "normalize rephrase shorten capitalise slugify",
    "label": "classify categorise categorize label tag sort rate judge decide determine detect "
    "assign choose pick select identify",
    "get": "extract pull parse get find read take return output fill give show list name tell "
    "provide state",
    "count": "count add calculate compute sum round solve subtract multiply divide",
    "act": "delete drop remove insert update alter open close install run send book set remind "
    "schedule redirect merge grant draw play order buy",
    "summarise": "summarise summarize condense recap",
    "self": "i my we our i'm i've me",
}
OPENINGS = (*_OPENINGS, "other")
_OPENING = {word: name for name, word_list in _OPENINGS.items() for word in word_list.split()}
# what an instruction is about, in general: stories, programs, tools that fail, ...
_KINDS = {
    "story": "poem poems haiku story stories joke jokes song sonnet limerick tale novel essay "
    "lyrics verse rhyme slogan riddle pun play dialogue letter speech article post paragraph "
    "tutorial guide book",
    "program": "function script program code class regex regexp library module api app application "
    "python javascript java rust ruby typescript django react hook unit test tests package "
    "algorithm method bash macro plugin webpage page html css component",
    "tool": "generator classifier parser linter tool bot chatbot model extractor converter helper "
    "validator checker analyser analyzer system bug bugs error errors crash crashes fails broken "
    "wrong returns",
    "tongue": "french german spanish italian japanese polish portuguese english dutch chinese "
    "russian swedish latin welsh turkish korean arabic",
    "meaning": "mean means meaning difference history invented example examples better best good "
    "important valid reasons tips works work called stand stands definition kind kinds type types "
    "opposite synonym plural word words rule rules standard why explain",
    "comparison": "than heavier longer bigger larger shorter lighter more less between versus vs "
    "common compare worse better taller older faster",
    "refusal": "not don't without never no nobody",
}
_KIND_SETS = tuple(frozenset(word_list.split()) for word_list in _KINDS.values())


@quick_init
@dataclass(frozen=True, slots=True)
class PromptInstruction:
    # of the text, with a mark in place of material
    words: list[str]
    # number of words of the material
    material: int
    # one of OPENINGS
    opening: str
    # index of the word that decides the opening
    opening_index: int

    def kinds(self) -> list[bool]:
        """Which general subjects it contains."""
        present = set(self.words)
        return [not present.isdisjoint(kind) for kind in _KIND_SETS]


NUM_KINDS = len(_KIND_SETS)


# the matcher and the choice of a specialist read the same text
@lru_cache(maxsize=4)
def instruction(text: str) -> PromptInstruction:
    """`text` has a limited length."""
    rest, material = split_material(text)
    tokens = words(rest)
    opening, opening_index = _find_opening(tokens)
    return PromptInstruction(tokens, len(words(material)), opening, opening_index)


def split_material(text: str) -> tuple[str, str]:
    """(the instruction, its material). Material is quoted text, and text after an instruction and a
    colon."""
    material: list[str] = []

    def quoted(match: re.Match[str]) -> str:
        material.append(match.group(0)[1:-1])
        return _MATERIAL

    def after_colon(match: re.Match[str]) -> str:
        if len(match.group(1)) < _MIN_INSTRUCTION_CHARS:
            return match.group(0)
        material.append(match.group(2))
        return f"{match.group(1)} :{_MATERIAL}"

    rest = text
    if any(mark in rest for mark in _QUOTES):
        rest = _QUOTED.sub(quoted, rest)
    if ":" in rest:
        rest = _AFTER_COLON.sub(after_colon, rest)
    return rest, " ".join(material)


# where a task may end and another begin: a line, a sentence, an item of a list, "and", "then".
# Possessive, and never begun inside white space: a text of spaces takes no time
_PART_END = re.compile(
    r"\n++"
    r"|(?<=[.?!;])(?<!\b\d\.)[\"”')]*+\s++(?=\S)"
    r"|(?<!\s)\s++(?=(?:[-*]|\(?[1-9a-d][.):]|\[[1-9]\])\s)"
    r"|(?<![\s,]),?\s++"
    r"(?:(?:and|then|also|plus|additionally|afterwards|after that|as well as)\s++)++(?=\S)"
    r"|,\s++(?=(?:then|plus|also|with)\b)",
    re.I,
)
_BRACKETS = re.compile(r"\([^()\n]{3,200}\)")
_HIDDEN = "\x00"


def parts_of(text: str, most: int) -> list[tuple[int, int]]:
    """Begin and end of each part of a text that may be a task of its own, at most `most`. Nothing
    ends within a quotation or brackets."""
    hidden = text
    for pattern in (_QUOTED, _BRACKETS):
        hidden = pattern.sub(_hide, hidden)
    parts: list[tuple[int, int]] = []
    begin = 0
    for end in _PART_END.finditer(hidden):
        if text[begin : end.start()].strip():
            parts.append((begin, end.start()))
        begin = end.end()
    if text[begin:].strip():
        parts.append((begin, len(text)))
    return parts[:most]


def _hide(match: re.Match[str]) -> str:
    found = match[0]
    return f"{found[0]}{_HIDDEN * (len(found) - 2)}{found[-1]}"


def _find_opening(tokens: list[str]) -> tuple[str, int]:
    for index, word in enumerate(tokens[:_MAX_OPENING]):
        opening = _OPENING.get(word)
        asks_you = word in _SKIPPED and tokens[index + 1 : index + 2] == ["you"]
        if opening is not None and not asks_you:
            return opening, index
        if word not in _SKIPPED:
            return "other", index
    return "other", 0


HEAD_CHARS = 900
TAIL_CHARS = 300
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")


def bounded(text: str) -> str:
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"


# a text is read for its sketch, its instruction and its vector
@lru_cache(maxsize=8)
def words(text: str) -> list[str]:
    """The words of a text of limited length. The list is shared: it must not be changed."""
    return split_words(text)


def split_words(text: str) -> list[str]:
    """Runs of letters, runs of digits and single marks."""
    return _WORD.findall(_folded(text))


def each_word(text: str) -> Iterator[str]:
    """The same one by one: for a long text of which only the first words may be needed. Splitting
    it as a whole would hold the interpreter for a long time."""
    return (match[0] for match in _WORD.finditer(_folded(text)))


def _folded(text: str) -> str:
    """In small letters without accents."""
    text = text.lower()
    if text.isascii():
        return text
    parts = unicodedata.normalize("NFKD", text)
    return "".join(char for char in parts if not unicodedata.combining(char))
