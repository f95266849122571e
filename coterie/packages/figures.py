"""The `evaluation` section of a manifest: how the base and the expert answered the held-out items.

Keeps one verdict per item, so that a part of the items can be run again and compared with the same
part. Knows no model and no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import WeightsError
from coterie.packages.evaluate import METRICS, Score, score

ITEMS = "tests/eval.jsonl"
# items that state the language they are written in, and where their figures stand in a manifest
LANGUAGE_ITEMS = "tests/languages.jsonl"
LANGUAGES = "languages"
# share of items whose verdict may be another on another machine: kernels round differently
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Figures:
    """`base` and `expert`: whether the answer to each item was right, in the items' order."""

    metric: str
    base: tuple[bool, ...]
    expert: tuple[bool, ...]
    tolerance: float = TOLERANCE

    def first(self, n: int) -> Figures:
        return Figures(self.metric, self.base[:n], self.expert[:n], self.tolerance)

    @property
    def is_better(self) -> bool:
        """Whether the lower 95% bound of the expert is above what the base scored."""
        return score(self.expert).low > score(self.base).share

    def section(self, items: str = ITEMS) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "items": items,
            "n": len(self.base),
            "tolerance": self.tolerance,
            "base": _side(self.base),
            "expert": _side(self.expert),
        }

    def reproduces(self, stated: Figures) -> bool:
        """Whether both scores are those of `stated`, but for its tolerance of the items."""
        allowed = math.ceil(stated.tolerance * len(stated.base))
        return all(
            len(own) == len(said) and abs(sum(own) - sum(said)) <= allowed
            for own, said in ((self.base, stated.base), (self.expert, stated.expert))
        )


def _side(verdicts: Sequence[bool]) -> dict[str, Any]:
    found = score(verdicts)
    return {
        "right": found.right,
        "score": round(found.share, 4),
        "low_95": round(found.low, 4),
        "high_95": round(found.high, 4),
        "verdicts": "".join("1" if right else "0" for right in verdicts),
    }


def read_figures(section: Mapping[str, Any], where: str) -> Figures:
    """Raises WeightsError when the manifest states none, or none that make sense."""
    metric, tolerance = section.get("metric"), section.get("tolerance", TOLERANCE)
    if not isinstance(metric, str) or metric not in METRICS:
        raise WeightsError(
            f"{where}: its manifest states no evaluation by a metric that is known "
            f"({', '.join(sorted(METRICS))}), so there is nothing to test."
        )
    if not isinstance(tolerance, int | float) or not 0 <= tolerance <= 0.2:
        raise WeightsError(f"{where}: evaluation.tolerance is no share from 0 to 0.2.")
    base, expert = (_verdicts(section.get(side), where) for side in ("base", "expert"))
    if len(base) != len(expert) or section.get("n") != len(base):
        raise WeightsError(f"{where}: evaluation.n is not the number of its verdicts.")
    return Figures(metric, base, expert, float(tolerance))


def read_languages(section: Mapping[str, Any], where: str) -> dict[str, Figures]:
    """By language, of those that the `evaluation` section has figures of."""
    stated = section.get(LANGUAGES, {})
    if not isinstance(stated, dict):
        raise WeightsError(f"{where}: evaluation.{LANGUAGES} is no map of figures by language.")
    return {
        code: read_figures(figures, f"{where} ({code})")
        for code, figures in stated.items()
        if isinstance(figures, dict)
    }


def _verdicts(side: Any, where: str) -> tuple[bool, ...]:
    marks = side.get("verdicts") if isinstance(side, dict) else None
    if not isinstance(marks, str) or not marks or set(marks) - {"0", "1"}:
        raise WeightsError(f"{where}: evaluation has no verdicts (a text of 0 and 1 per item).")
    verdicts = tuple(mark == "1" for mark in marks)
    if side.get("right") != sum(verdicts):
        raise WeightsError(f"{where}: evaluation.right is not the number of its verdicts.")
    return verdicts


def shown(found: Score) -> str:
    """`0.93 [0.88, 0.96]`."""
    return f"{found.share:.3f} [{found.low:.3f}, {found.high:.3f}]"
