"""Texts as vectors of unit length. One family, `EMBEDDERS`: name -> what makes one.

No download, no torch, bounded work per text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.routing.features.instruction import bounded, words

Vector = NDArray[np.float32]
_DATA = Path(__file__).parent / "data"
_MAX_KNOWN_WORDS = 50_000
_MAX_WORD_CHARS = 40


class Embedder(Protocol):
    name: str
    dim: int

    def embed(self, text: str) -> Vector:
        """Of unit length, or zero for a text without words."""


class StaticEmbedder:
    """The sum of one vector per word, distilled from a sentence encoder; see data/README.md.

    A word that the table does not have is cut into the longest pieces that it has (WordPiece).
    """

    def __init__(self, path: Path = _DATA / "words.npz") -> None:
        with np.load(path, allow_pickle=False) as found:
            texts = found["vocabulary"].tobytes().decode().split("\n")
            vectors = found["vectors"].astype(np.float32) * found["scales"].astype(np.float32)
        self._vectors: Vector = vectors
        self._rows = {text: row for row, text in enumerate(texts)}
        self._known: dict[str, tuple[int, ...]] = {}
        self.name, self.dim = "static", int(vectors.shape[1])

    def embed(self, text: str) -> Vector:
        rows: list[int] = []
        for word in words(bounded(text)):
            found = self._known.get(word)
            rows += self._learn(word) if found is None else found
        if not rows:
            return np.zeros(self.dim, np.float32)
        return unit(self._vectors[rows].sum(axis=0))

    def _learn(self, word: str) -> tuple[int, ...]:
        if len(self._known) >= _MAX_KNOWN_WORDS:
            self._known.clear()
        self._known[word] = rows = self._pieces(word[:_MAX_WORD_CHARS])
        return rows

    def _pieces(self, word: str) -> tuple[int, ...]:
        rows: list[int] = []
        start = 0
        while start < len(word):
            mark = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in self._rows), None)
            if end is not None:
                rows.append(self._rows[mark + word[start:end]])
            start = end or start + 1
        return tuple(rows)


class HashedEmbedder:
    """Words and pairs of words, each added to one of `dim` places with a sign."""

    def __init__(self, dim: int = 512) -> None:
        self.name, self.dim = f"hashed-{dim}", dim

    def embed(self, text: str) -> Vector:
        found = words(bounded(text))
        total = np.zeros(self.dim, np.float32)
        for gram in [*found, *map(" ".join, pairwise(found))]:
            code = zlib.crc32(gram.encode())
            total[code % self.dim] += 1.0 if code & 0x8000_0000 else -1.0
        return unit(total)


def unit(vector: Vector) -> Vector:
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


@cache
def static() -> StaticEmbedder:
    """One for all: it is read from disk once."""
    return StaticEmbedder()


EMBEDDERS: dict[str, Callable[[], Embedder]] = {"static": static, "hashed": HashedEmbedder}
DEFAULT = "static"
