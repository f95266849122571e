"""Finds the adapters that a text is for: each has a probe, learnt from what its package says.

Built outside the event loop from a catalog's profiles; immutable. With many adapters, a short form
of their probes selects candidates (above 50,000 adapters an index does), and only the candidates
are scored with the full probe. Makes no decision: that is the router's work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.core.errors import MissingDependency
from coterie.routing.features.instruction import bounded, parts_of
from coterie.routing.match.embed import Embedder
from coterie.routing.match.probe_store import LearntProbes
from coterie.routing.match.probes import Invert, Probe, inverted, probes
from coterie.routing.match.sketch import NUM_BUCKETS, TextSketch, shape, sketch

if TYPE_CHECKING:
    from coterie.routing.features.features import PromptFeatures

CANDIDATES = 30
# most adapters that are added because of the prompt's words
MAX_HINTED = 8
# lowest probability, for the whole text, of an adapter that may be for a part of it, and how many
# of them are tried
PART_GATE, MAX_PART_ADAPTERS = 0.03, 4
MAX_PARTS = 8
# factor for the number of rows taken from the graph, because it compares less than the probes do
_GRAPH_FACTOR = 8
# columns of a graph's row for words, in addition to those for meaning and shape
_FOLDED = 512
# rows are read one by one if there are at most this many times as many
FEW_ROWS = 32
_ONE = np.ones(1, np.float32)
_COLUMN = np.arange(NUM_BUCKETS) % _FOLDED
_SIGN = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), NUM_BUCKETS)
# a typical prompt with material: its shape is assumed until the full probe is computed
_TYPICAL_SHAPE = shape(
    "Write this down as a list, please: the first is Red, the second one is Blue."
)


class AdapterMatch(NamedTuple):
    """One adapter that a text may be for; all numbers are 0 to 1, probabilities are calibrated."""

    profile: AdapterProfile
    similarity: float
    probability: float
    # for a part of the text, if another adapter is for another part; 0 = there is no such part
    part: float = 0.0


class Matcher:
    def __init__(
        self, profiles: Sequence[AdapterProfile], learnt: LearntProbes, embedder: Embedder
    ) -> None:
        self.profiles, self._embedder = tuple(profiles), embedder
        self.calibration: ScoreCalibration = calibration_of(embedder.name)
        self._joint, self._short = learnt.joint, learnt.short
        # a text uses few of its rows
        self._words, self._scales = learnt.words, learnt.scales
        self._rows_by_word = _rows_by_word(self.profiles)
        self._graph: AdapterIndex | None = None
        if len(self.profiles) > MAX_EXACT_ROWS:
            rows = [_row(learnt, row) for row in range(len(self.profiles))]
            self._graph = AdapterIndex(np.stack(rows), MAX_EXACT_ROWS)

    @classmethod
    def build(cls, profiles: Sequence[AdapterProfile], embedder: Embedder) -> Matcher:
        """Takes milliseconds per new adapter. `profiles` must not be empty."""
        return cls(profiles, learn_probes(profiles, embedder), embedder)

    @property
    def threshold(self) -> float:
        """The lowest probability at which an adapter should be chosen."""
        return self.calibration.threshold

    def match(
        self,
        text: str,
        features: PromptFeatures | None = None,
        k: int = CANDIDATES,
        among: NDArray[np.bool_] | None = None,
    ) -> list[AdapterMatch]:
        """At most `k` adapters, the most likely first, and those that the prompt's words name.
        `among`: of which rows of `profiles`; None = of all."""
        usable = None if among is None else np.flatnonzero(among)
        if usable is not None and not len(usable):
            return []
        query = sketch(text, self._embedder)
        rows, scores = self._scored(query, k, usable)
        best = np.lexsort((rows, -scores))[:k]
        rows, scores = rows[best], scores[best]
        is_all = len(self.profiles if usable is None else usable) <= k
        hinted = None if is_all else self._hinted(features, rows, among)
        if hinted is not None and len(hinted):
            rows = np.concatenate((rows, hinted))
            scores = np.concatenate((scores, self._full_scores(query, hinted)))
            order = np.lexsort((rows, -scores))
            rows, scores = rows[order], scores[order]
        exact = scores.astype(np.float64)
        similar = np.minimum(np.maximum((exact + 1.0) / 2.0, 0.0), 1.0)
        likely = self.calibration.probability(exact).tolist()
        found = rows.tolist()
        parts = self._part_probabilities(bounded(text), found, likely)
        return [
            AdapterMatch(self.profiles[row], similarity, probability, parts.get(row, 0.0))
            for row, similarity, probability in zip(found, similar.tolist(), likely, strict=True)
        ]

    def _hinted(
        self,
        features: PromptFeatures | None,
        known: NDArray[np.int64],
        among: NDArray[np.bool_] | None,
    ) -> NDArray[np.int64]:
        """Adapters with a keyword or a capability that the prompt names, those with the rarest ones
        first."""
        if features is None:
            return np.empty(0, np.int64)
        named = {*features.words, features.code_language, "json" if features.has_json else ""}
        by_word = [(self._rows_by_word[word], word) for word in named if word in self._rows_by_word]
        seen, hinted = set(known.tolist()), []
        for rows, _ in sorted(by_word, key=lambda item: (len(item[0]), item[1])):
            for row in rows:
                if row not in seen and (among is None or among[row]):
                    seen.add(row)
                    hinted.append(row)
                if len(hinted) == MAX_HINTED:
                    return np.array(hinted, np.int64)
        return np.array(hinted, np.int64)

    def _part_probabilities(
        self, text: str, rows: Sequence[int], likely: Sequence[float]
    ) -> dict[int, float]:
        """By row, for the likeliest adapter and another one: the probability for a part of the text
        that is not the other's. Empty if nothing suggests that the text has two tasks."""
        count = 0
        while count < min(len(likely), MAX_PART_ADAPTERS) and likely[count] >= PART_GATE:
            count += 1
        if count < 2:
            return {}
        parts = parts_of(text, MAX_PARTS)
        if len(parts) < 2:
            return {}
        tried = np.array(rows[:count], np.int64)
        # [parts, adapters]
        each = np.stack([self._probabilities(text[begin:end], tried) for begin, end in parts])
        where = each.argmax(axis=0).tolist()
        found: dict[int, float] = {}
        for other in range(1, count):
            one_at, other_at = where[0], where[other]
            if one_at == other_at:
                continue
            one, second = each[one_at, 0], each[other_at, other]
            if min(one, second) < self.threshold:
                # a task may have several parts: all up to the later one's begin, or all from there
                cut = parts[max(one_at, other_at)][0]
                halves = [self._probabilities(half, tried) for half in (text[:cut], text[cut:])]
                one = max(one, halves[one_at > other_at][0])
                second = max(second, halves[other_at > one_at][other])
            if min(one, second) > min(found.values(), default=0.0):
                found = {rows[0]: float(one), rows[other]: float(second)}
        return found

    def _probabilities(self, text: str, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        scores = self._full_scores(sketch(text, self._embedder), rows)
        return self.calibration.probability(scores.astype(np.float64))

    def _scored(
        self, query: TextSketch, k: int, usable: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """At least `k` rows with their scores, if there are that many."""
        rows = np.arange(len(self.profiles)) if usable is None else usable
        is_near = self._graph is not None and len(rows) > MAX_EXACT_ROWS
        if is_near:
            rows = self._nearest(query, k, usable)
        is_all = not is_near and len(rows) == len(self.profiles)
        # to read a few rows of a table is faster than to read all of it, many rows are slower
        is_few = is_near or len(rows) * FEW_ROWS <= len(self.profiles)
        word_scores = self._word_scores(query, rows if is_few else None)
        if not (is_few or is_all):
            word_scores = word_scores[rows]
        if len(rows) > k:
            short = self._short[rows] if is_few else self._short
            rough = short @ _short_query(query)
            if not (is_few or is_all):
                rough = rough[rows]
            best = np.argpartition(rough + word_scores, -k)[-k:]
            rows, word_scores = rows[best], word_scores[best]
            is_all = False
        # without a copy if these are all rows, in order
        joint = self._joint if is_all else self._joint[rows]
        scores: NDArray[np.float32] = joint @ _pairs(query) + word_scores
        return rows, scores

    def _nearest(
        self, query: TextSketch, k: int, usable: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        assert self._graph is not None
        wanted, total = _GRAPH_FACTOR * k, len(self.profiles)
        if usable is not None:
            wanted = math.ceil(wanted * total / len(usable))
        rows = np.array([row for row, _ in self._graph.search(_column(query), wanted)], np.int64)
        return rows if usable is None else rows[np.isin(rows, usable)]

    def _full_scores(self, query: TextSketch, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of a few rows."""
        words = query.weights @ self._words[np.ix_(query.grams, rows)]
        scores: NDArray[np.float32] = self._joint[rows] @ _pairs(query) + words * self._scales[rows]
        return scores

    def _word_scores(
        self, query: TextSketch, rows: NDArray[np.int64] | None
    ) -> NDArray[np.float32]:
        """Of a few rows; of all if `rows` is None."""
        if rows is None:
            all_scores: NDArray[np.float32] = query.weights @ self._words[query.grams]
            return all_scores * self._scales
        few_scores: NDArray[np.float32] = query.weights @ self._words[np.ix_(query.grams, rows)]
        return few_scores * self._scales[rows]


def _pairs(query: TextSketch) -> NDArray[np.float32]:
    """Each number of the shape times each of the meaning."""
    form = np.concatenate((_ONE, query.form))
    pairs: NDArray[np.float32] = (form[:, None] * np.concatenate((_ONE, query.meaning))).ravel()
    return pairs


# capabilities whose value is a word of prompts: `tech:sql`, `format:json`
_WORD_CAPABILITIES = ("tech:", "format:")


def _rows_by_word(profiles: Sequence[AdapterProfile]) -> dict[str, list[int]]:
    """Keyword or capability -> the adapters that state it."""
    found: dict[str, list[int]] = {}
    for row, profile in enumerate(profiles):
        stated = [
            c.partition(":")[2] for c in profile.capabilities if c.startswith(_WORD_CAPABILITIES)
        ]
        for word in dict.fromkeys(word.lower() for word in (*profile.keywords, *stated)):
            found.setdefault(word, []).append(row)
    return found


def _short(probe: Probe) -> NDArray[np.float32]:
    joint = probe.joint.astype(np.float32)
    meaning = joint[0, 1:] + _TYPICAL_SHAPE @ joint[1:, 1:]
    return np.concatenate([meaning, joint[1:, 0], joint[:1, 0]])


def _short_query(query: TextSketch) -> NDArray[np.float32]:
    return np.concatenate([query.meaning, query.form, _ONE])


def learn_probes(
    profiles: Sequence[AdapterProfile], embedder: Embedder, invert: Invert = inverted
) -> LearntProbes:
    learnt = probes(profiles, embedder, invert)
    return LearntProbes(
        np.stack([probe.joint.ravel() for probe in learnt]).astype(np.float32),
        np.stack([_short(probe) for probe in learnt]).astype(np.float32),
        np.stack([probe.words for probe in learnt], axis=1),
        np.array([probe.scale for probe in learnt], np.float32),
    )


def _row(learnt: LearntProbes, row: int) -> NDArray[np.float32]:
    """The vector that a graph compares: the short form, and the words folded into few columns."""
    folded = np.bincount(_COLUMN, learnt.words[:, row] * _SIGN, _FOLDED) * learnt.scales[row]
    return np.concatenate([learnt.short[row], folded]).astype(np.float32)


def _column(query: TextSketch) -> NDArray[np.float32]:
    signs = _SIGN[query.grams] * query.weights
    folded = np.bincount(_COLUMN[query.grams], signs, _FOLDED)
    return np.concatenate([_short_query(query), folded]).astype(np.float32)


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
            nearest = self._graph.search(vector, k)
            pairs = zip(nearest.keys.tolist(), nearest.distances.tolist(), strict=True)
            return [(int(row), 1.0 - distance) for row, distance in pairs]
        # BLAS may sum a row in another order at another position: equal rows would differ
        similarity = np.einsum("ij,j->i", self._rows, vector)
        least = np.partition(similarity, -k)[-k]
        best = np.flatnonzero(similarity >= least)
        # equal similarities keep the order of rows: the same request gives the same plan
        best = best[np.argsort(-similarity[best], kind="stable")][:k]
        return [(int(row), float(similarity[row])) for row in best]


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


# Texts of another author are harder to separate than those the curve was fitted on. TEMPER scales
# the fitted slope around the middle; SHIFT is how much higher near misses of other authors score.
# Both were found by leaving out one author at a time.
TEMPER, SHIFT = 0.4, 0.05
PATH = Path(__file__).parent / "data" / "calibration.json"
_STEPS = 50


@dataclass(frozen=True, slots=True)
class ScoreCalibration:
    slope: float = 5.0
    offset: float = 0.0
    # factor of the score cubed
    bend: float = 0.0
    # the lowest probability at which an adapter should be chosen
    threshold: float = 0.5

    def probability(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        logits = self.slope * scores + self.offset + self.bend * scores**3
        bounded = np.minimum(np.maximum(logits, -30.0), 30.0)
        probability: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-bounded))
        return probability


@cache
def calibration_of(embedder: str) -> ScoreCalibration:
    """The fitted curve; a default curve for an embedder without one."""
    curves = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    return ScoreCalibration(**curves[embedder]) if embedder in curves else ScoreCalibration()


def fit_calibration(
    scores: Sequence[float], right: Sequence[bool], weights: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """Slope, offset and bend by Newton's method (with Platt's targets, so that neither end is
    certain); `worth` is the weight of each score."""
    x, y = np.asarray(scores, float), np.asarray(right, bool)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, float)
    slope, offset, bend = _fitted(np.stack([x, np.ones_like(x), x**3], axis=1), y, w)
    if min(slope, bend) < 0:
        # the curve would not rise everywhere
        (slope, offset), bend = _fitted(np.stack([x, np.ones_like(x)], axis=1), y, w), 0.0
    return slope, offset, bend


def tempered(slope: float, offset: float, bend: float) -> tuple[float, float, float]:
    """Flatter around the middle, and nearly unchanged at scores of one and minus one."""
    return slope * TEMPER, (offset - SHIFT * slope) * TEMPER, bend + (1 - TEMPER) * slope


def _fitted(
    columns: NDArray[np.float64], right: NDArray[np.bool_], weights: NDArray[np.float64]
) -> list[float]:
    high, low = (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2)
    targets, size = np.where(right, high, low), columns.shape[1]
    parameters = np.zeros(size)
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(columns @ parameters, -30, 30)))
        slope = columns.T @ (weights * (targets - chance)) - 1e-3 * parameters
        spread = weights * chance * (1 - chance)
        curve = (columns * spread[:, None]).T @ columns + 1e-3 * np.eye(size)
        step = np.linalg.solve(curve, slope)
        parameters += step
        if np.abs(step).max() < 1e-9:
            break
    return [float(value) for value in parameters]
