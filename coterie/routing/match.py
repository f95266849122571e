"""Which adapters a text is for: nearest by what their packages say, each with a probability.

Built off the event loop from a catalog's profiles and immutable from then on. Decides nothing: the
router weighs, permits and composes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.core.adapters import AdapterProfile
from coterie.routing.embed import Embedder, Vector
from coterie.routing.index import AdapterIndex

CANDIDATES = 30
# rows of one adapter in the index
MAX_PROTOTYPES = 64
_SLOPE, _MIDDLE = 14.0, 0.45


@dataclass(frozen=True, slots=True)
class Match:
    """One adapter that a text may be for; both figures 0 to 1, the probability calibrated."""

    profile: AdapterProfile
    similarity: float
    probability: float


class Matcher:
    # the least probability at which an adapter should be chosen
    threshold = 0.5

    def __init__(
        self,
        profiles: Sequence[AdapterProfile],
        index: AdapterIndex,
        owners: list[int],
        by: Embedder,
    ) -> None:
        self._profiles, self._index, self._owners, self._embedder = profiles, index, owners, by

    @classmethod
    def build(cls, profiles: Sequence[AdapterProfile], embedder: Embedder) -> Matcher:
        rows: list[Vector] = []
        owners: list[int] = []
        for number, profile in enumerate(profiles):
            for text in _texts(profile):
                rows.append(embedder.embed(text))
                owners.append(number)
        table = np.stack(rows) if rows else np.zeros((0, embedder.dim), np.float32)
        return cls(tuple(profiles), AdapterIndex(table), owners, embedder)

    def match(self, text: str, features: object = None, k: int = CANDIDATES) -> list[Match]:
        """At most `k` adapters, the likeliest first."""
        vector = self._embedder.embed(text)
        best: dict[int, float] = {}
        for row, alike in self._index.search(vector, 8 * k):
            best.setdefault(self._owners[row], alike)
        return [
            Match(self._profiles[owner], min(1.0, max(0.0, alike)), _probability(alike))
            for owner, alike in list(best.items())[:k]
        ]


def _texts(profile: AdapterProfile) -> list[str]:
    said = [profile.card.description, " ".join(profile.keywords), *profile.examples]
    return [text for text in said if text][:MAX_PROTOTYPES]


def _probability(alike: float) -> float:
    return 1.0 / (1.0 + math.exp(-_SLOPE * (alike - _MIDDLE)))
