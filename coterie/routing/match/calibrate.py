"""Scores as probabilities: one curve for all adapters, learnt on the routing set.

Logistic, flat about the middle, where near misses lie, and steep at both ends, where plain prompts
do: the logit has a term of the third degree.

The curve and the threshold of an embedder are kept in data/calibration.json, which
`python -m benchmarks.routing --calibrate` writes. Knows no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# What another hand writes is harder to tell than what the curve was learnt on: of the learnt slope
# about the middle, and how much higher its near misses score. Both by leaving out hand by hand.
TEMPER, SHIFT = 0.4, 0.05
PATH = Path(__file__).parent / "data" / "calibration.json"
_STEPS = 50


@dataclass(frozen=True, slots=True)
class ScoreCalibration:
    slope: float = 5.0
    offset: float = 0.0
    # of the score's third power
    bend: float = 0.0
    # the least probability at which an adapter should be chosen
    threshold: float = 0.5

    def probability(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        logits = self.slope * scores + self.offset + self.bend * scores**3
        found: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
        return found


@cache
def calibration_of(embedder: str) -> ScoreCalibration:
    """As it was learnt; a plain curve for an embedder that nothing was learnt for."""
    found = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    return ScoreCalibration(**found[embedder]) if embedder in found else ScoreCalibration()


def fit_calibration(
    scores: Sequence[float], right: Sequence[bool], worth: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """Slope, offset and bend by Newton's method (Platt's targets, so that neither end is certain);
    `worth` is how much each one counts."""
    x, y = np.asarray(scores, float), np.asarray(right, bool)
    w = np.ones(len(x)) if worth is None else np.asarray(worth, float)
    slope, offset, bend = _fitted(np.stack([x, np.ones_like(x), x**3], axis=1), y, w)
    if min(slope, bend) < 0:
        # it would not rise everywhere
        (slope, offset), bend = _fitted(np.stack([x, np.ones_like(x)], axis=1), y, w), 0.0
    return slope, offset, bend


def tempered(slope: float, offset: float, bend: float) -> tuple[float, float, float]:
    """Flatter about the middle, and about as it was at scores of one and minus one."""
    return slope * TEMPER, (offset - SHIFT * slope) * TEMPER, bend + (1 - TEMPER) * slope


def _fitted(
    columns: NDArray[np.float64], right: NDArray[np.bool_], worth: NDArray[np.float64]
) -> list[float]:
    high, low = (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2)
    wanted, size = np.where(right, high, low), columns.shape[1]
    found = np.zeros(size)
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(columns @ found, -30, 30)))
        slope = columns.T @ (worth * (wanted - chance)) - 1e-3 * found
        spread = worth * chance * (1 - chance)
        curve = (columns * spread[:, None]).T @ columns + 1e-3 * np.eye(size)
        step = np.linalg.solve(curve, slope)
        found += step
        if np.abs(step).max() < 1e-9:
            break
    return [float(value) for value in found]
