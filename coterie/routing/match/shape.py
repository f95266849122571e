"""The outward form of a text as numbers: a question or an order, material beside it, lists, code.

What a text is about and what it asks for are two things: "What is JSON?" and "Give name and age as
JSON: ..." share their words but not their shape. Knows no topic and no adapter.
"""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from coterie.routing.features.instruction import NUM_KINDS, OPENINGS, Instruction, instruction
from coterie.routing.features.words import words

_ASKING = frozenset({"what", "who", "when", "where", "why", "how"})
_OPENING = _ASKING | frozenset(
    "which is are do does can could should will would did".split()  # noqa: SIM905
)
_QUOTED = re.compile(r"\"[^\"]{12,}\"|“[^”]+”|(?<!\w)'[^'\n]{12,}'(?!\w)")
_PATTERNS = tuple(
    re.compile(text)
    for text in (
        r"\d",
        r"\d{4}",
        # a table with its columns, a list of three
        r"\w+ ?\(\w+(, ?\w+)+\)",
        r"\w+, \w+(, \w+)+",
        r"\{",
        r"<",
        r"[;={}]",
        # a second sentence
        r"[.?!]\s+\S",
        r"\b[A-Z]{2,}\b",
        r"/",
        r"->|→",
        r"\?",
        r":",
        r"\n",
        r"\n(?:.*\n){2}",
        r"\?\s*$",
    )
)
_CAPITALISED = re.compile(r"\b[A-Z][a-z]+")
_FOREIGN = re.compile(r"[^\u0000-\u0250]")
# squares of the entries add up to about one for a usual text
_SCALE = np.float32(math.sqrt(0.1))
# numbers that do not say how the instruction opens
_PLAIN = 18 + NUM_KINDS + len(_PATTERNS)
DIM = _PLAIN + len(OPENINGS)


def shape(
    text: str, found: list[str] | None = None, asked: Instruction | None = None
) -> NDArray[np.float32]:
    """`DIM` numbers; `text` is bounded, `found` are its words, `asked` is its instruction."""
    found = words(text) if found is None else found
    asked = instruction(text) if asked is None else asked
    count, first = len(found), found[0] if found else ""
    values = np.zeros(DIM, np.float32)
    values[:_PLAIN] = (
        1.0,
        first in _OPENING,
        first in _ASKING,
        first.endswith("ing"),
        _QUOTED.search(text) is not None,
        len(_FOREIGN.findall(text)) > 3,
        math.log1p(count) / 4,
        count < 5,
        count < 9,
        count > 15,
        count > 40,
        len(_CAPITALISED.findall(text)) / max(1, count),
        asked.material > 0,
        asked.material > 3,
        asked.material > 8,
        "?" in asked.words,
        len(asked.words) < 6,
        len(asked.words) < 10,
        *asked.kinds(),
        *(pattern.search(text) is not None for pattern in _PATTERNS),
    )
    values[_PLAIN + OPENINGS.index(asked.opening)] = 1.0
    return values * _SCALE
