"""A text as the matcher sees it: its vector, its shape, its words and those of its instruction.

The similarity of two sketches is the sum of five parts; `alike` computes this kernel.
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

# hash buckets for words and pairs: one half for the whole text, one half for its instruction
NUM_BUCKETS = 1 << 15
_HALF = NUM_BUCKETS // 2
# weights relative to the meaning: words of each half, shape, and meaning times shape
WORD_WEIGHT = np.float32(0.7)
SHAPE_WEIGHT = np.float32(0.3)
JOINT_WEIGHT = np.float32(2.5)
# numbers of words after the opening word that are combined with its kind, and with the word itself
_OPENED_WORDS, _NEXT_WORDS = 12, 7
_STEM = 5
_LONGEST_NUMBER = 5


@dataclass(frozen=True, slots=True)
class TextSketch:
    # unit length [dim]
    meaning: Vector
    # [shape.DIM]
    form: Vector
    # unique, each below NUM_BUCKETS: of the text, then of the instruction
    grams: NDArray[np.int32]
    # one for each of the grams: the weights of each half have a norm of sqrt(WORD_WEIGHT)
    weights: Vector


def sketch(text: str, embedder: Embedder) -> TextSketch:
    text = bounded(text)
    tokens, request = words(text), instruction(text)
    halves = _buckets(_grams(tokens), 0), _buckets(_instruction_grams(request), _HALF)
    weights = [np.full(len(half), _word_scale(len(half)), np.float32) for half in halves]
    grams = np.array([*halves[0], *halves[1]], np.int32)
    form = shape(text, tokens, request)
    return TextSketch(embedder.embed(text), form, grams, np.concatenate(weights))


def _grams(tokens: list[str]) -> set[str]:
    tokens_seen = _with_number_classes(tokens)
    grams = set(tokens_seen)
    grams.update(f"~{word[:_STEM]}" for word in tokens_seen if len(word) > _STEM)
    grams.update(map(" ".join, pairwise(["<s>", *tokens_seen, "</s>"])))
    return grams


def _instruction_grams(request: PromptInstruction) -> set[str]:
    """The words in order, and combinations of the opening word or its kind with the words after
    it."""
    tokens, start = _with_number_classes(request.words), request.opening_index
    grams = _grams(request.words)
    first = tokens[start] if tokens else ""
    following = [word for word in tokens[start + 1 : start + _OPENED_WORDS] if len(word) > 2]
    grams.update(f"{request.opening}>{word}" for word in following)
    near = [word for word in tokens[start + 1 : start + _NEXT_WORDS] if len(word) > 2]
    grams.update(f"{first}>>{word}" for word in near)
    return grams


def _with_number_classes(tokens: list[str]) -> list[str]:
    return [f"#{min(len(w), _LONGEST_NUMBER)}" if w.isdigit() else w for w in tokens]


def _buckets(grams: set[str], first: int) -> list[int]:
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
        self._row_of_bucket = np.full(NUM_BUCKETS, -1, np.int32)
        self._row_of_bucket[used] = np.arange(len(used))
        # [used buckets, rows]: a column holds the weights of a text's words
        self._word_weights = np.zeros((len(used), len(sketches)), np.float32)
        columns = np.repeat(np.arange(len(sketches)), self.counts)
        self._word_weights[self._row_of_bucket[self.grams], columns] = self.weights

    def alike(self, others: Sequence[TextSketch]) -> NDArray[np.float32]:
        """The kernel of every other sketch with every row: [len(others), rows]."""
        meaning = np.stack([item.meaning for item in others]) @ self.meaning.T
        form = np.stack([item.form for item in others]) @ self.form.T
        word_similarity = np.stack([self._words_alike(item) for item in others])
        total: NDArray[np.float32] = (
            meaning + word_similarity + SHAPE_WEIGHT * form + JOINT_WEIGHT * meaning * form
        )
        return total

    def _words_alike(self, item: TextSketch) -> NDArray[np.float32]:
        rows = self._row_of_bucket[item.grams]
        used = rows >= 0
        total: NDArray[np.float32] = item.weights[used] @ self._word_weights[rows[used]]
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
        # more than one sentence
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
# the squares of the entries sum to about one for a typical text
_SCALE = np.float32(math.sqrt(0.1))
# number of entries that do not describe the opening of the instruction
_NUM_GENERAL = 18 + NUM_KINDS + len(_PATTERNS)
DIM = _NUM_GENERAL + len(OPENINGS)


def shape(
    text: str, tokens: list[str] | None = None, request: PromptInstruction | None = None
) -> NDArray[np.float32]:
    """`DIM` numbers; `text` has a limited length, `tokens` are its words, `request` is its
    instruction."""
    tokens = words(text) if tokens is None else tokens
    request = instruction(text) if request is None else request
    count, first = len(tokens), tokens[0] if tokens else ""
    values = np.zeros(DIM, np.float32)
    values[:_NUM_GENERAL] = (
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
        request.material > 0,
        request.material > 3,
        request.material > 8,
        "?" in request.words,
        len(request.words) < 6,
        len(request.words) < 10,
        *request.kinds(),
        *(pattern.search(text) is not None for pattern in _PATTERNS),
    )
    values[_NUM_GENERAL + OPENINGS.index(request.opening)] = 1.0
    return values * _SCALE
