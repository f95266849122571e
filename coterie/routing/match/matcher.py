"""Which adapters a text is for: a probe of each, learnt from what its package says.

Built off the event loop from a catalog's profiles and immutable from then on. Of many adapters a
short form of their probes says who can be meant, beyond 50,000 an index does, and only those probes
are asked in full. Decides nothing: the router weighs, permits and composes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.core.errors import MissingDependency
from coterie.routing.match.embed import Embedder
from coterie.routing.match.probe_store import LearntProbes
from coterie.routing.match.probes import Probe, probes
from coterie.routing.match.sketch import PLACES, TextSketch, shape, sketch

if TYPE_CHECKING:
    from coterie.routing.features.features import PromptFeatures

CANDIDATES = 16
# more of a graph's rows are scored, since it compares less than the probes do
_SPARE = 8
# columns of a graph's rows for words, beside those for meaning and shape
_FOLDED = 512
_ONE = np.ones(1, np.float32)
_COLUMN = np.arange(PLACES) % _FOLDED
_SIGN = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), PLACES)
# of a wish with its material: what the shape is taken for until a probe is asked in full
_USUAL = shape("Write this down as a list, please: the first is Red, the second one is Blue.")


class AdapterMatch(NamedTuple):
    """One adapter that a text may be for; both figures 0 to 1, the probability calibrated."""

    profile: AdapterProfile
    similarity: float
    probability: float


class Matcher:
    def __init__(
        self, profiles: Sequence[AdapterProfile], learnt: LearntProbes, embedder: Embedder
    ) -> None:
        self._profiles, self._embedder = tuple(profiles), embedder
        self._calibration: ScoreCalibration = calibration_of(embedder.name)
        self._joint, self._short = learnt.joint, learnt.short
        # a text looks at few of its rows
        self._words, self._scales = learnt.words, learnt.scales
        self._graph: AdapterIndex | None = None
        if len(self._profiles) > MAX_EXACT_ROWS:
            rows = [_row(learnt, row) for row in range(len(self._profiles))]
            self._graph = AdapterIndex(np.stack(rows), MAX_EXACT_ROWS)

    @classmethod
    def build(cls, profiles: Sequence[AdapterProfile], embedder: Embedder) -> Matcher:
        """Takes milliseconds per adapter that was not seen before. There is at least one."""
        return cls(profiles, learn_probes(profiles, embedder), embedder)

    @property
    def threshold(self) -> float:
        """The least probability at which an adapter should be chosen."""
        return self._calibration.threshold

    def match(
        self, text: str, features: PromptFeatures | None = None, k: int = CANDIDATES
    ) -> list[AdapterMatch]:
        """At most `k` adapters, the likeliest first."""
        asked = sketch(text, self._embedder)
        rows, scores = self._scored(asked, k)
        order = np.lexsort((rows, -scores))[:k]
        best = scores[order].astype(np.float64)
        similar, likely = np.clip((best + 1.0) / 2.0, 0.0, 1.0), self._calibration.probability(best)
        found = zip(rows[order].tolist(), similar.tolist(), likely.tolist(), strict=True)
        return [AdapterMatch(self._profiles[row], *figures) for row, *figures in found]

    def _scored(self, asked: TextSketch, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """At least `k` rows, where there are so many, with their scores."""
        rows = np.arange(len(self._profiles))
        if self._graph is not None:
            found = self._graph.search(_column(asked), _SPARE * k)
            rows = np.array([row for row, _ in found], np.int64)
        said = self._said(asked, rows)
        if len(rows) > k:
            rough = self._short[rows] if self._graph is not None else self._short
            best = np.argpartition(rough @ _brief(asked) + said, -k)[-k:]
            rows, said = rows[best], said[best]
        sides = np.append(_ONE, asked.form), np.append(_ONE, asked.meaning)
        pairs = np.outer(*sides).ravel()
        scores: NDArray[np.float32] = self._joint[rows] @ pairs + said
        return rows, scores

    def _said(self, asked: TextSketch, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        marks = (
            self._words[asked.grams]
            if self._graph is None
            else self._words[np.ix_(asked.grams, rows)]
        )
        said: NDArray[np.float32] = (asked.weights @ marks) * self._scales[rows]
        return said


def _short(probe: Probe) -> NDArray[np.float32]:
    joint = probe.joint.astype(np.float32)
    meaning = joint[0, 1:] + _USUAL @ joint[1:, 1:]
    return np.concatenate([meaning, joint[1:, 0], joint[:1, 0]])


def _brief(asked: TextSketch) -> NDArray[np.float32]:
    return np.concatenate([asked.meaning, asked.form, _ONE])


def learn_probes(profiles: Sequence[AdapterProfile], embedder: Embedder) -> LearntProbes:
    made = probes(profiles, embedder)
    return LearntProbes(
        np.stack([probe.joint.ravel() for probe in made]).astype(np.float32),
        np.stack([_short(probe) for probe in made]).astype(np.float32),
        np.stack([probe.words for probe in made], axis=1),
        np.array([probe.scale for probe in made], np.float32),
    )


def _row(learnt: LearntProbes, row: int) -> NDArray[np.float32]:
    """What a graph compares: the short form, and the words folded into few columns."""
    folded = np.bincount(_COLUMN, learnt.words[:, row] * _SIGN, _FOLDED) * learnt.scales[row]
    return np.concatenate([learnt.short[row], folded]).astype(np.float32)


def _column(asked: TextSketch) -> NDArray[np.float32]:
    signs = _SIGN[asked.grams] * asked.weights
    folded = np.bincount(_COLUMN[asked.grams], signs, _FOLDED)
    return np.concatenate([_brief(asked), folded]).astype(np.float32)


MAX_EXACT_ROWS = 50_000


class AdapterIndex:
    def __init__(self, rows: NDArray[np.float32], max_exact: int = MAX_EXACT_ROWS) -> None:
        self._rows = np.ascontiguousarray(rows, np.float32)
        self._graph = _graph(self._rows) if len(rows) > max_exact else None

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, vector: NDArray[np.float32], k: int) -> list[tuple[int, float]]:
        """The `k` rows nearest to `vector` with their similarities, nearest first."""
        k = min(k, len(self._rows))
        if k <= 0:
            return []
        if self._graph is not None:
            found = self._graph.search(vector, k)
            pairs = zip(found.keys.tolist(), found.distances.tolist(), strict=True)
            return [(int(row), 1.0 - distance) for row, distance in pairs]
        # a BLAS may add up a row in another order in another place: equal rows would differ
        alike = np.einsum("ij,j->i", self._rows, vector)
        least = np.partition(alike, -k)[-k]
        best = np.flatnonzero(alike >= least)
        # equal similarities in order of rows: the same request gives the same plan
        best = best[np.argsort(-alike[best], kind="stable")][:k]
        return [(int(row), float(alike[row])) for row in best]


def _graph(rows: NDArray[np.float32]) -> Any:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise MissingDependency(
            f"an index of {len(rows)} rows needs usearch: pip install usearch"
        ) from error
    graph = Index(ndim=rows.shape[1], metric="ip", dtype="f32")
    graph.add(np.arange(len(rows)), rows)
    return graph


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
