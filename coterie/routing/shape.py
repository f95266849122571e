"""The outward form of a text as numbers: a question or an order, material beside it, lists, code.

What a text is about and what it asks for are two things: "What is JSON?" and "Give name and age as
JSON: ..." share their words but not their shape. Knows no topic and no adapter.
"""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from coterie.routing.words import words

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


def shape(text: str, found: list[str] | None = None) -> NDArray[np.float32]:
    """`DIM` numbers; `text` is bounded, `found` are its words."""
    found = words(text) if found is None else found
    count, first = len(found), found[0] if found else ""
    values = (
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
        *(pattern.search(text) is not None for pattern in _PATTERNS),
    )
    return np.array(values, np.float32) * _SCALE


DIM = len(shape(""))
