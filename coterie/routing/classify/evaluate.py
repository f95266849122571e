"""Quality of a router on labelled prompts: right decisions with bounds, by label, and the error of
its confidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.packages.evaluate import wilson
from coterie.routing.classify.traffic import LabelledPrompt
from coterie.routing.classify.trained import REJECT, TrainedRouter

_BINS = 10
_MAX_CONFUSED = 20


def evaluate(router: TrainedRouter, items: Sequence[LabelledPrompt]) -> dict[str, Any]:
    """A label that the router does not know is never right."""
    labels = (*router.labels, *sorted({item.label for item in items} - set(router.labels)))
    chances = np.zeros((len(items), len(labels)))
    for row, item in enumerate(items):
        chances[row, : len(router.labels)] = router.probabilities(item.given)
    truth = np.array([labels.index(item.label) for item in items], np.int64)
    return quality(labels, chances, truth) | {"version": router.version}


def quality(
    labels: Sequence[str], chances: NDArray[np.float64], truth: NDArray[np.int64]
) -> dict[str, Any]:
    """`chances` is [prompts, labels]."""
    chosen = chances.argmax(axis=1) if len(chances) else np.zeros(0, np.int64)
    right = chosen == truth
    confused = Counter(
        (labels[wanted], labels[got])
        for wanted, got in zip(truth.tolist(), chosen.tolist(), strict=True)
        if wanted != got
    )
    by_label = {}
    for index, label in enumerate(labels):
        own = truth == index
        if own.any():
            by_label[label] = share(int(right[own].sum()), int(own.sum()))
    related = np.array([labels[index] != REJECT for index in truth.tolist()], bool)
    sure = chances.max(axis=1) if len(chances) else np.zeros(0)
    return {
        "right": share(int(right.sum()), len(right)),
        "related": share(int(right[related].sum()), int(related.sum())),
        "rejected": share(int(right[~related].sum()), int((~related).sum())),
        "calibration_error": round(calibration_error(sure, right), 6),
        "by_label": by_label,
        "confused": [
            {"label": wanted, "chosen": got, "count": count}
            for (wanted, got), count in sorted(
                confused.items(), key=lambda entry: (-entry[1], entry[0])
            )[:_MAX_CONFUSED]
        ],
    }


def share(right: int, n: int) -> dict[str, Any]:
    low, high = wilson(right, n)
    return {
        "n": n,
        "count": right,
        "share": round(right / n, 6) if n else 0.0,
        "low_95": round(low, 6),
        "high_95": round(high, 6),
    }


def calibration_error(sure: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Expected calibration error of the confidence, in ten bins of equal width."""
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    gaps = [
        abs(float(sure[bins == b].mean()) - float(right[bins == b].mean())) * (bins == b).mean()
        for b in range(_BINS)
        if (bins == b).any()
    ]
    return float(sum(gaps))
