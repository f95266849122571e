"""What each specialist delivered in the window: quantiles by specialist, never over all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from coterie.service.slo.quantiles import LOWEST, RollingSketch

SHARES = (0.5, 0.95, 0.99)
# add it to a time.monotonic() value to get seconds since 1970; taken once, so that time never jumps
EPOCH = time.time() - time.monotonic()


@dataclass(frozen=True, slots=True)
class LatencyQuantiles:
    """Seconds; None if nothing was measured."""

    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    count: int


@dataclass(frozen=True, slots=True)
class DeliveredService:
    """What one specialist delivered."""

    ttft: LatencyQuantiles
    itl: LatencyQuantiles
    # from the moment a request was accepted to its first token
    admission_to_first_token_p95_s: float | None
    requests: int
    # share of finished requests that lost their KV once or more; None if none finished
    preempted_share: float | None


class SpecialistSlo:
    """Measures one specialist. Cheap enough for every token."""

    def __init__(self, window_s: float) -> None:
        self.ttft, self.itl, self.admitted = (RollingSketch(window_s) for _ in range(3))
        # requests that ended, at two places: never preempted, and preempted
        self._ends = RollingSketch(window_s)

    def first_token(self, now: float, since_arrival_s: float, since_admission_s: float) -> None:
        self.ttft.add(now, since_arrival_s)
        self.admitted.add(now, since_admission_s)

    def tokens(self, now: float, gap_s: float, count: int) -> None:
        self.itl.add(now, gap_s, count)

    def ended(self, now: float, num_preemptions: int) -> None:
        self._ends.add(now, 1.0 if num_preemptions else 0.0)

    def delivered(self, now: float) -> DeliveredService:
        ends = self._ends.merged(now)
        never = ends.buckets.get(LOWEST, 0)
        return DeliveredService(
            ttft=_quantiles(self.ttft, now),
            itl=_quantiles(self.itl, now),
            admission_to_first_token_p95_s=_p95(self.admitted, now),
            requests=ends.count,
            preempted_share=(ends.count - never) / ends.count if ends.count else None,
        )

    def newest(self) -> int:
        """The number of the newest part of the window; -1 if there is none."""
        return max(sketch.newest() for sketch in self._sketches().values())

    def part(self, index: int) -> dict[str, dict[int, int]]:
        """One part of the window, for the store."""
        return {name: sketch.part(index) for name, sketch in self._sketches().items()}

    def restore(self, parts: Mapping[int, Mapping[str, Mapping[str, int]]], now: float) -> None:
        """The parts that the store held. Parts of the future are of a window of another length."""
        newest = self.ttft.number(now)
        for index, part in sorted((key, part) for key, part in parts.items() if key <= newest):
            for name, sketch in self._sketches().items():
                buckets = part.get(name, {})
                sketch.restore(index, {int(key): int(times) for key, times in buckets.items()})

    def _sketches(self) -> dict[str, RollingSketch]:
        return {
            "ttft": self.ttft,
            "itl": self.itl,
            "admitted": self.admitted,
            "ends": self._ends,
        }


def _quantiles(sketch: RollingSketch, now: float) -> LatencyQuantiles:
    merged = sketch.merged(now)
    if not merged.count:
        return LatencyQuantiles(None, None, None, 0)
    p50_s, p95_s, p99_s = merged.quantiles(*SHARES)
    return LatencyQuantiles(p50_s, p95_s, p99_s, merged.count)


def _p95(sketch: RollingSketch, now: float) -> float | None:
    merged = sketch.merged(now)
    return merged.quantiles(0.95)[0] if merged.count else None
