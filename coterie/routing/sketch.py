"""A text as the matcher sees it: its vector, its shape and its words and pairs of words.

Two sketches are alike by the sum of four parts; `alike` is that kernel. Knows no adapter.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from coterie.routing.embed import Embedder, Vector
from coterie.routing.shape import shape
from coterie.routing.words import bounded, words

# places for hashed words and pairs
PLACES = 1 << 14
# weight of the shape by itself beside meaning, words, and meaning times shape
SHAPE_WEIGHT = np.float32(0.3)
_STEM = 5
_LONGEST_NUMBER = 5


@dataclass(frozen=True, slots=True)
class Sketch:
    # unit length [dim]
    meaning: Vector
    # [shape.DIM]
    form: Vector
    # sorted, unique, each below PLACES
    grams: NDArray[np.int32]


def sketch(text: str, embedder: Embedder) -> Sketch:
    text = bounded(text)
    found = words(text)
    return Sketch(embedder.embed(text), shape(text, found), _grams(found))


def _grams(found: list[str]) -> NDArray[np.int32]:
    shown = [f"#{min(len(w), _LONGEST_NUMBER)}" if w.isdigit() else w for w in found]
    said = set(shown)
    said.update(f"~{word[:_STEM]}" for word in shown if len(word) > _STEM)
    said.update(map(" ".join, pairwise(["<s>", *shown, "</s>"])))
    places = {zlib.crc32(gram.encode()) % PLACES for gram in said}
    return np.array(sorted(places), np.int32)


class Rows:
    """Many sketches as arrays."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self.meaning = np.stack([item.meaning for item in sketches])
        self.form = np.stack([item.form for item in sketches])
        # [PLACES, rows]: a column marks the words of a text; `lengths` make it of unit length
        self.marks = np.zeros((PLACES, len(sketches)), np.uint8)
        self.lengths = np.array([word_scale(item) for item in sketches], np.float32)
        self.grams = np.concatenate([item.grams for item in sketches])
        self.counts = np.array([len(item.grams) for item in sketches])
        self.marks[self.grams, np.repeat(np.arange(len(sketches)), self.counts)] = 1

    def alike(self, others: Sequence[Sketch]) -> NDArray[np.float32]:
        """The kernel of every other sketch with every row: [len(others), rows]."""
        meaning = np.stack([item.meaning for item in others]) @ self.meaning.T
        form = np.stack([item.form for item in others]) @ self.form.T
        said = np.stack([self._said(item) for item in others]) * self.lengths
        total: NDArray[np.float32] = meaning + said + SHAPE_WEIGHT * form + meaning * form
        return total

    def _said(self, item: Sketch) -> NDArray[np.float32]:
        total: NDArray[np.float32] = self.marks[item.grams].sum(axis=0, dtype=np.float32)
        return total * word_scale(item)


def word_scale(item: Sketch) -> np.float32:
    """What makes the marks of a text's words a vector of unit length."""
    return np.float32(1.0 / np.sqrt(max(1, len(item.grams))))
