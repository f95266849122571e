"""Which adapters a text is for: a probe of each, learnt from what its package says.

Built off the event loop from a catalog's profiles and immutable from then on. Of many adapters an
index finds those that can be meant, and only their probes are asked. Decides nothing: the router
weighs, permits and composes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.routing.calibrate import Calibration, calibration_of
from coterie.routing.embed import Embedder
from coterie.routing.index import AdapterIndex
from coterie.routing.lessons import probes
from coterie.routing.probe import Probe
from coterie.routing.sketch import PLACES, Sketch, sketch, word_scale

if TYPE_CHECKING:
    from coterie.routing.features import Features

CANDIDATES = 30
# columns of the index for words, beside those for the meaning
_FOLDED = 128
_COLUMN = np.arange(PLACES) % _FOLDED
_SIGN = np.where(np.arange(PLACES) // _FOLDED % 2, 1.0, -1.0).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Match:
    """One adapter that a text may be for; both figures 0 to 1, the probability calibrated."""

    profile: AdapterProfile
    similarity: float
    probability: float


class Matcher:
    def __init__(
        self, profiles: Sequence[AdapterProfile], learnt: Sequence[Probe], embedder: Embedder
    ) -> None:
        self._profiles, self._embedder = tuple(profiles), embedder
        self._calibration: Calibration = calibration_of(embedder.name)
        # [adapters, (1 + shape.DIM) * (1 + dim)] and [adapters, PLACES]
        self._joint = np.stack([probe.joint.ravel() for probe in learnt])
        self._words = np.stack([probe.words for probe in learnt])
        self._scales = np.array([probe.scale for probe in learnt], np.float32)
        self._index = AdapterIndex(np.stack([_row(probe) for probe in learnt]))

    @classmethod
    def build(cls, profiles: Sequence[AdapterProfile], embedder: Embedder) -> Matcher:
        """Takes milliseconds per adapter that was not seen before. There is at least one."""
        return cls(profiles, probes(profiles, embedder), embedder)

    @property
    def threshold(self) -> float:
        """The least probability at which an adapter should be chosen."""
        return self._calibration.threshold

    def match(
        self, text: str, features: Features | None = None, k: int = CANDIDATES
    ) -> list[Match]:
        """At most `k` adapters, the likeliest first."""
        asked = sketch(text, self._embedder)
        rows = self._candidates(asked, k)
        scores = self._scores(asked, rows)
        order = np.lexsort((rows, -scores))
        return [self._match(int(rows[i]), float(scores[i])) for i in order]

    def _match(self, row: int, score: float) -> Match:
        similarity = min(1.0, max(0.0, (score + 1.0) / 2.0))
        return Match(self._profiles[row], similarity, self._calibration.probability(score))

    def _candidates(self, asked: Sketch, k: int) -> NDArray[np.int64]:
        if len(self._profiles) <= k:
            return np.arange(len(self._profiles))
        found = self._index.search(_column(asked), k)
        return np.array([row for row, _ in found], np.int64)

    def _scores(self, asked: Sketch, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        pairs = np.outer(np.append(1.0, asked.form), np.append(1.0, asked.meaning)).ravel()
        said = self._words[np.ix_(rows, asked.grams)].sum(axis=1, dtype=np.float32)
        joint = self._joint[rows].astype(np.float32) @ pairs.astype(np.float32)
        total: NDArray[np.float32] = joint + said * self._scales[rows] * word_scale(asked)
        return total


def _row(probe: Probe) -> NDArray[np.float32]:
    """A probe without the shape, its words folded into few columns: what an index compares."""
    folded = np.bincount(_COLUMN, probe.words * _SIGN, _FOLDED) * probe.scale
    return np.concatenate([probe.joint[0, 1:], folded]).astype(np.float32)


def _column(asked: Sketch) -> NDArray[np.float32]:
    signs = _SIGN[asked.grams] * word_scale(asked)
    folded = np.bincount(_COLUMN[asked.grams], signs, _FOLDED)
    return np.concatenate([asked.meaning, folded]).astype(np.float32)
