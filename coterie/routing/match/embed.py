"""Texts as vectors of unit length. `EMBEDDERS`: name -> a function that makes an embedder.

No download, no torch, limited work per text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.routing.features.instruction import bounded, each_word, words

Vector = NDArray[np.float32]
_DATA = Path(__file__).parent / "data"
_MAX_CACHED_WORDS = 50_000
_MAX_WORD_CHARS = 40


class Embedder(Protocol):
    name: str
    dim: int

    def __hash__(self) -> int: ...

    def embed(self, text: str) -> Vector:
        """A vector of unit length, or zero for a text without words."""


# one request asks for its feature, its specialist and its adapters
@lru_cache(maxsize=4)
def embedding(text: str, embedder: Embedder) -> Vector:
    """The vector of a text of limited length. It is shared: it must not be changed."""
    return embedder.embed(text)


class StaticEmbedder:
    """The sum of one vector per word, distilled from a sentence encoder; see data/README.md.

    A word that is not in the table is cut into the longest pieces that are in it (WordPiece).
    """

    def __init__(self, path: Path = _DATA / "words.npz") -> None:
        with np.load(path, allow_pickle=False) as data:
            texts = data["vocabulary"].tobytes().decode().split("\n")
            vectors = data["vectors"].astype(np.float32) * data["scales"].astype(np.float32)
        self._vectors: Vector = vectors
        self._word_rows = _WordRows({text: row for row, text in enumerate(texts)})
        self.name, self.dim = "static", int(vectors.shape[1])

    @property
    def num_rows(self) -> int:
        return len(self._vectors)

    def embed(self, text: str) -> Vector:
        known = self._word_rows.__getitem__
        return self.embed_rows(list(chain.from_iterable(map(known, words(bounded(text))))))

    def rows(self, text: str, most: int) -> list[int]:
        """The rows of the whole text's pieces, at most `most + 1` of them."""
        pieces = chain.from_iterable(map(self._word_rows.__getitem__, each_word(text)))
        return list(islice(pieces, most + 1))

    def embed_rows(self, rows: Sequence[int] | NDArray[np.int32]) -> Vector:
        if not len(rows):
            return np.zeros(self.dim, np.float32)
        return unit(np.add.reduce(self._vectors.take(rows, axis=0), axis=0))


class _WordRows(dict[str, tuple[int, ...]]):
    """Word -> the rows of its pieces. Most words of a text were seen before."""

    def __init__(self, rows: dict[str, int]) -> None:
        super().__init__()
        self._rows = rows

    def __missing__(self, word: str) -> tuple[int, ...]:
        rows = self._pieces(word[:_MAX_WORD_CHARS])
        # a caller may send words of any length: they are not to fill the memory
        if len(word) <= _MAX_WORD_CHARS:
            if len(self) >= _MAX_CACHED_WORDS:
                self.clear()
            self[word] = rows
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
    """Words and pairs of words, each added to one of `dim` elements with a sign."""

    def __init__(self, dim: int = 512) -> None:
        self.name, self.dim = f"hashed-{dim}", dim

    def embed(self, text: str) -> Vector:
        tokens = words(bounded(text))
        total = np.zeros(self.dim, np.float32)
        for gram in [*tokens, *map(" ".join, pairwise(tokens))]:
            code = zlib.crc32(gram.encode())
            total[code % self.dim] += 1.0 if code & 0x8000_0000 else -1.0
        return unit(total)


def unit(vector: Vector) -> Vector:
    # as np.linalg.norm, which spends more time on its arguments
    length = float(np.sqrt(vector.dot(vector)))
    return vector / np.float32(length) if length else vector


@cache
def static() -> StaticEmbedder:
    """One instance for all: it is read from disk once."""
    return StaticEmbedder()


EMBEDDERS: dict[str, Callable[[], Embedder]] = {"static": static, "hashed": HashedEmbedder}
DEFAULT = "static"
