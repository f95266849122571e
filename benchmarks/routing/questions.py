"""The routing set, and the quality of a router on it: shares with bounds, calibration error.

Reads routing_set/*.jsonl; see the README there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.packages.evaluate import wilson

FOLDER = Path(__file__).parents[2] / "routing_set"
_BINS = 10


@dataclass(frozen=True, slots=True)
class Item:
    prompt: str
    body: str
    # None = for no expert
    expert: str | None


@dataclass(frozen=True, slots=True)
class TwoTasks:
    """A prompt with the experts that its tasks are for: two, or at most one for a prompt that only
    looks as if it had two tasks."""

    prompt: str
    body: str
    experts: frozenset[str]
    # how the tasks are joined
    kind: str


@dataclass(frozen=True, slots=True)
class Decided:
    """A router's decision for an item."""

    item: Item
    chosen: str | None
    confidence: float
    # number of experts after the first
    extra: int = 0

    @property
    def is_right(self) -> bool:
        return self.chosen == self.item.expert


def read(path: Path) -> list[Item]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [Item(r["prompt"], r.get("body") or "", r.get("expert")) for r in records]


def read_two_tasks(path: Path) -> list[TwoTasks]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [
        TwoTasks(r["prompt"], r.get("body") or "", frozenset(r["experts"]), r["kind"])
        for r in records
    ]


def two_tasks_quality(
    items: Sequence[TwoTasks], chosen: Sequence[frozenset[str]]
) -> dict[str, Any]:
    """`chosen`: the experts that a router chose for each item."""
    decided = list(zip(items, chosen, strict=True))
    pairs = [(item, got) for item, got in decided if len(item.experts) == 2]
    others = [(item, got) for item, got in decided if len(item.experts) < 2]
    return {
        "both": share(sum(got == item.experts for item, got in pairs), len(pairs)),
        "one_of_them": sum(len(got & item.experts) == 1 for item, got in pairs),
        "another": sum(bool(got - item.experts) for item, got in pairs),
        "two_for_one_task": share(sum(len(got) > 1 for _, got in others), len(others)),
        "right_for_one_task": share(sum(got == item.experts for item, got in others), len(others)),
    }


def share(right: int, n: int) -> dict[str, Any]:
    low, high = wilson(right, n)
    return {
        "n": n,
        "count": right,
        "share": right / n if n else 0.0,
        "low_95": low,
        "high_95": high,
    }


def calibration_error(decided: Sequence[Decided]) -> float:
    """Expected calibration error of the decision's confidence, in ten bins of equal width."""
    sure = np.array([item.confidence for item in decided])
    right = np.array([item.is_right for item in decided], float)
    bins = np.minimum((sure * _BINS).astype(int), _BINS - 1)
    gaps = [
        abs(sure[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean()
        for b in range(_BINS)
        if (bins == b).any()
    ]
    return float(sum(gaps))


def quality_of(decided: Sequence[Decided]) -> dict[str, Any]:
    related = [item for item in decided if item.item.expert is not None]
    unrelated = [item for item in decided if item.item.expert is None]
    names = sorted({str(item.item.expert) for item in related})
    wrong = [item.confidence for item in decided if item.chosen and not item.is_right]
    return {
        "right": share(sum(item.is_right for item in decided), len(decided)),
        "wrong_route_confidence": float(np.mean(wrong)) if wrong else 0.0,
        "with_further_experts": sum(item.extra > 0 for item in decided),
        "related": share(sum(item.is_right for item in related), len(related)),
        "false_activation": share(
            sum(item.chosen is not None for item in unrelated), len(unrelated)
        ),
        "wrong_expert": sum(item.chosen not in (None, item.item.expert) for item in related),
        "calibration_error": calibration_error(decided),
        "by_expert": {
            name: share(
                sum(item.is_right for item in related if item.item.expert == name),
                sum(item.item.expert == name for item in related),
            )
            for name in names
        },
        "activated_falsely": {
            name: sum(item.chosen == name for item in unrelated) for name in names
        },
    }


def shown(entry: dict[str, Any]) -> str:
    return (
        f"{entry['share']:7.2%} [{entry['low_95']:.2%}, {entry['high_95']:.2%}]"
        f"  ({entry['count']} of {entry['n']})"
    )


def two_tasks_lines(title: str, quality: dict[str, Any]) -> list[str]:
    return [
        title,
        f"  both experts, two tasks    {shown(quality['both'])}",
        f"  one of them alone          {quality['one_of_them']:7}",
        f"  another one                {quality['another']:7}",
        f"  two experts, one task      {shown(quality['two_for_one_task'])}",
        f"  right, at most one task    {shown(quality['right_for_one_task'])}",
    ]


def lines(title: str, quality: dict[str, Any]) -> list[str]:
    text = [
        f"{title}",
        f"  right                      {shown(quality['right'])}",
        f"  right expert, related      {shown(quality['related'])}",
        f"  an expert, unrelated       {shown(quality['false_activation'])}",
        f"  expected calibration error {quality['calibration_error']:7.3f}",
        f"  confidence of wrong routes {quality['wrong_route_confidence']:7.3f}",
        f"  with further experts       {quality['with_further_experts']:7}",
    ]
    for name, entry in quality["by_expert"].items():
        text.append(f"    {name:22} {shown(entry)}  false {quality['activated_falsely'][name]}")
    return text
