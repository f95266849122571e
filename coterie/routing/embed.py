"""Texts as vectors of unit length. One family, `EMBEDDERS`: name -> what makes one.

No download, no torch, bounded work per text. Knows no adapter and no decision.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.routing.words import tokens

Vector = NDArray[np.float32]


class Embedder(Protocol):
    name: str
    dim: int

    def embed(self, text: str) -> Vector:
        """Of unit length, or zero for a text without words."""


class HashedEmbedder:
    """Words and pairs of words, each added to one of `dim` places with a sign."""

    def __init__(self, dim: int = 512) -> None:
        self.name, self.dim = f"hashed-{dim}", dim

    def embed(self, text: str) -> Vector:
        found = tokens(text)
        total = np.zeros(self.dim, np.float32)
        for gram in [*found, *map(" ".join, pairwise(found))]:
            code = zlib.crc32(gram.encode())
            total[code % self.dim] += 1.0 if code & 0x8000_0000 else -1.0
        return unit(total)


def unit(vector: Vector) -> Vector:
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector


EMBEDDERS: dict[str, Callable[[], Embedder]] = {"hashed": HashedEmbedder}
DEFAULT = "hashed"
