"""A text as the matcher sees it: its vector, its shape, its words and those of its instruction.

Two sketches are alike by the sum of five parts; `alike` is that kernel.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from coterie.routing.features.instruction import (
    NUM_KINDS,
    OPENINGS,
    PromptInstruction,
    bounded,
    instruction,
    words,
)
from coterie.routing.match.embed import Embedder, Vector

# places for hashed words and pairs: one half of the whole text's, one half of its instruction's
PLACES = 1 << 15
_HALF = PLACES // 2
# weights beside the meaning's: of either half's words, the shape, and meaning times shape
WORD_WEIGHT = np.float32(0.7)
SHAPE_WEIGHT = np.float32(0.3)
JOINT_WEIGHT = np.float32(2.5)
# words behind the one that opens an instruction: of its kind and of itself
_OPENED_WORDS, _NEXT_WORDS = 12, 7
_STEM = 5
_LONGEST_NUMBER = 5


@dataclass(frozen=True, slots=True)
class TextSketch:
    # unit length [dim]
    meaning: Vector
    # [shape.DIM]
    form: Vector
    # unique, each below PLACES: of the text, then of the instruction
    grams: NDArray[np.int32]
    # one for each of the grams: those of either half have a length of sqrt(WORD_WEIGHT)
    weights: Vector


def sketch(text: str, embedder: Embedder) -> TextSketch:
    text = bounded(text)
    found, asked = words(text), instruction(text)
    halves = _places(_grams(found), 0), _places(_asked_grams(asked), _HALF)
    weights = [np.full(len(half), _word_scale(len(half)), np.float32) for half in halves]
    grams = np.array([*halves[0], *halves[1]], np.int32)
    form = shape(text, found, asked)
    return TextSketch(embedder.embed(text), form, grams, np.concatenate(weights))


def _grams(found: list[str]) -> set[str]:
    shown = _shown(found)
    said = set(shown)
    said.update(f"~{word[:_STEM]}" for word in shown if len(word) > _STEM)
    said.update(map(" ".join, pairwise(["<s>", *shown, "</s>"])))
    return said


def _asked_grams(asked: PromptInstruction) -> set[str]:
    """Words in order, and what the instruction's first word or its kind goes with."""
    shown, place = _shown(asked.words), asked.place
    said = _grams(asked.words)
    first = shown[place] if shown else ""
    behind = [word for word in shown[place + 1 : place + _OPENED_WORDS] if len(word) > 2]
    said.update(f"{asked.opening}>{word}" for word in behind)
    near = [word for word in shown[place + 1 : place + _NEXT_WORDS] if len(word) > 2]
    said.update(f"{first}>>{word}" for word in near)
    return said


def _shown(found: list[str]) -> list[str]:
    return [f"#{min(len(w), _LONGEST_NUMBER)}" if w.isdigit() else w for w in found]


def _places(grams: set[str], first: int) -> list[int]:
    return sorted({first + zlib.crc32(gram.encode()) % _HALF for gram in grams})


def _word_scale(count: int) -> float:
    return float(np.sqrt(WORD_WEIGHT / max(1, count)))


class SketchRows:
    """Many sketches as arrays."""

    def __init__(self, sketches: Sequence[TextSketch]) -> None:
        self.meaning = np.stack([item.meaning for item in sketches])
        self.form = np.stack([item.form for item in sketches])
        self.grams = np.concatenate([item.grams for item in sketches])
        self.weights = np.concatenate([item.weights for item in sketches])
        self.counts = np.array([len(item.grams) for item in sketches])
        used = np.unique(self.grams)
        self._line = np.full(PLACES, -1, np.int32)
        self._line[used] = np.arange(len(used))
        # [places that are used, rows]: a column holds the weights of a text's words
        self._marks = np.zeros((len(used), len(sketches)), np.float32)
        columns = np.repeat(np.arange(len(sketches)), self.counts)
        self._marks[self._line[self.grams], columns] = self.weights

    def alike(self, others: Sequence[TextSketch]) -> NDArray[np.float32]:
        """The kernel of every other sketch with every row: [len(others), rows]."""
        meaning = np.stack([item.meaning for item in others]) @ self.meaning.T
        form = np.stack([item.form for item in others]) @ self.form.T
        said = np.stack([self._said(item) for item in others])
        total: NDArray[np.float32] = (
            meaning + said + SHAPE_WEIGHT * form + JOINT_WEIGHT * meaning * form
        )
        return total

    def _said(self, item: TextSketch) -> NDArray[np.float32]:
        lines = self._line[item.grams]
        known = lines >= 0
        total: NDArray[np.float32] = item.weights[known] @ self._marks[lines[known]]
        return total


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
    text: str, found: list[str] | None = None, asked: PromptInstruction | None = None
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
