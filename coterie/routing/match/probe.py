"""A linear probe per adapter: texts that are for it against ordinary prompts, in closed form.

Ridge regression in its dual form. What every probe has in common, a background of ordinary prompts,
is inverted once; an adapter adds its own few rows, which takes milliseconds. Knows no catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.routing.match.embed import Embedder
from coterie.routing.match.sketch import (
    JOINT_WEIGHT,
    PLACES,
    SHAPE_WEIGHT,
    SketchRows,
    TextSketch,
    sketch,
)

_PROMPTS = Path(__file__).parent / "data" / "background.txt"
_RIDGE = 0.1
# how much one row counts, beside one ordinary prompt
FOR, AGAINST, MADE_UP, OTHERS = 2.0, 1.0, 0.3, 1.0


@dataclass(frozen=True, slots=True)
class ProbeExamples:
    """What one adapter's probe learns from, beside the background."""

    examples: Sequence[TextSketch]
    counterexamples: Sequence[TextSketch]
    # near misses that nobody wrote
    made_up: Sequence[TextSketch] = ()
    # what other adapters are for, and near misses of theirs
    others: Sequence[TextSketch] = ()
    others_misses: Sequence[TextSketch] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """score = [1, form] @ joint @ [1, meaning] + words @ weights; about 1 for, -1 against."""

    # [1 + shape.DIM, 1 + dim]
    joint: NDArray[np.float16]
    # [PLACES], times `scale`: one byte a place, so that thousands of probes fit
    words: NDArray[np.int8]
    scale: float


class BackgroundPrompts:
    """Ordinary prompts, which are for no adapter, and the inverse of their kernel."""

    def __init__(self, texts: Sequence[str], embedder: Embedder) -> None:
        self._sketches = [sketch(text, embedder) for text in texts]
        self._rows = SketchRows(self._sketches)
        kernel = self._rows.alike(self._sketches).astype(np.float64) + 1.0
        inverse = np.linalg.inv(kernel + _RIDGE * np.eye(len(texts)))
        self._inverse = inverse.astype(np.float32)

    def fit(self, lesson: ProbeExamples) -> Probe:
        parts = (
            (lesson.examples, FOR), (lesson.counterexamples, AGAINST), (lesson.made_up, MADE_UP),
            (lesson.others, OTHERS), (lesson.others_misses, OTHERS),
        )  # fmt: skip
        own = [item for part, _ in parts for item in part]
        worth = np.concatenate([np.full(len(part), each) for part, each in parts])
        wanted = np.where(np.arange(len(own)) < len(lesson.examples), 1.0, -1.0)
        rows = SketchRows(own)
        inside = rows.alike(own).astype(np.float64) + 1.0 + np.diag(_RIDGE / worth)
        across = self._rows.alike(own) + np.float32(1.0)
        # block elimination: the background's answers are all -1
        reduced = across @ self._inverse
        left = np.linalg.solve(inside - reduced @ across.T, wanted + reduced.sum(axis=1))
        rest = -self._inverse.sum(axis=1) - left @ reduced
        joint = _joint(rows, left) + _joint(self._rows, rest)
        words = _words(rows, left) + _words(self._rows, rest)
        scale = max(float(np.abs(words).max()), 1e-9) / 127
        return Probe(joint.astype(np.float16), np.rint(words / scale).astype(np.int8), scale)


def _joint(rows: SketchRows, share: NDArray[np.float64]) -> NDArray[np.float64]:
    meaning = np.insert(rows.meaning, 0, 1.0, axis=1)
    form = np.insert(rows.form, 0, 1.0, axis=1)
    joint: NDArray[np.float64] = form.T @ (meaning * share[:, None])
    joint[1:, 0] *= SHAPE_WEIGHT
    joint[1:, 1:] *= JOINT_WEIGHT
    return joint


def _words(rows: SketchRows, share: NDArray[np.float64]) -> NDArray[np.float64]:
    amounts = np.repeat(share, rows.counts) * rows.weights
    words: NDArray[np.float64] = np.bincount(rows.grams, amounts, PLACES).astype(np.float64)
    return words


@cache
def ordinary_prompts() -> tuple[str, ...]:
    lines = _PROMPTS.read_text(encoding="utf-8").splitlines()
    return tuple(line.replace("\\n", "\n") for line in lines if line)
