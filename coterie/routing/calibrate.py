"""Scores as probabilities: one logistic curve for all adapters, learnt on the routing set.

The curve and the threshold of an embedder are kept in data/calibration.json, which
`python -m benchmarks.routing --calibrate` writes. Knows no text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

# of the learnt slope, about the score of one half: what another hand writes is harder to tell than
# what the curve was learnt on, so that no score is as sure as it looks there
TEMPER = 0.5
PATH = Path(__file__).parent / "data" / "calibration.json"
_STEPS = 50


@dataclass(frozen=True, slots=True)
class Calibration:
    slope: float = 5.0
    offset: float = 0.0
    # the least probability at which an adapter should be chosen
    threshold: float = 0.5

    def probability(self, score: float) -> float:
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, self.slope * score + self.offset))))


def tempered(slope: float, offset: float) -> tuple[float, float]:
    return slope * TEMPER, offset * TEMPER


@cache
def calibration_of(embedder: str) -> Calibration:
    """As it was learnt; a plain curve for an embedder that nothing was learnt for."""
    found = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    return Calibration(**found[embedder]) if embedder in found else Calibration()


def learn(
    scores: Sequence[float], right: Sequence[bool], worth: Sequence[float] | None = None
) -> tuple[float, float]:
    """Slope and offset by Newton's method (Platt's targets, so that neither end is certain);
    `worth` is how much each one counts."""
    x, y = np.asarray(scores, float), np.asarray(right, bool)
    w = np.ones(len(x)) if worth is None else np.asarray(worth, float)
    high, low = (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2)
    wanted = np.where(y, high, low)
    columns = np.stack([x, np.ones_like(x)], axis=1)
    found = np.zeros(2)
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(columns @ found, -30, 30)))
        slope = columns.T @ (w * (wanted - chance)) - 1e-3 * found
        curve = (columns * (w * chance * (1 - chance))[:, None]).T @ columns + 1e-3 * np.eye(2)
        step = np.linalg.solve(curve, slope)
        found += step
        if np.abs(step).max() < 1e-9:
            break
    return float(found[0]), float(found[1])
