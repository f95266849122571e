"""The engine's side of a model's experts: what they cost in all, and when they may move.

Stats are flat names with `expert_` in front, for metrics. What is counted here is true after every
step; the runtime's report is asked for rarely, as an engine is asked for its stats after every one,
and once more when nothing is left to do: what a reader sees then stays. Knows no strategy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from coterie.core.dispatch import USAGE_FIELDS, MoeUsage
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from coterie.engine.step import StepPlan, StepResult
    from coterie.models.build.moe import MoeExperts

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0


class MoeMaintenance:
    def __init__(self, runtime: MoeExperts, clock: Callable[[], float] = time.monotonic) -> None:
        self._runtime, self._now = runtime, clock
        self._total = MoeUsage()
        self._reported_at = -REPORT_EVERY_S
        self._standing: dict[str, float] = {}
        # updates that could not be made
        self._failed = 0

    def after_step(self, plan: StepPlan, result: StepResult) -> MoeUsage | None:
        """What was done for those who go on, if anything."""
        if result.dispatch is not None:
            self._total += result.dispatch.total
        return self.update(1) if plan.num_tokens > plan.num_prefill_tokens else None

    def update(self, rounds: int) -> MoeUsage | None:
        """A move that fails costs a log line: whoever needs that expert meets the error."""
        updates = swaps = 0
        try:
            for _ in range(rounds):
                made, moved = self._runtime.update()
                updates, swaps = updates + made, swaps + moved
        except WeightsError as error:
            self._failed += 1
            log.warning("expert_update_failed", extra={"reason": error.message})
        if not updates and not swaps:
            return None
        done = MoeUsage(updates=updates, swaps=swaps)
        self._total += done
        return done

    def stats(self, idle: bool) -> dict[str, float]:
        now = self._now()
        if idle or now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self._standing = report_stats(self._runtime.report())
        total = self._total
        counts = {f"expert_{name}": float(getattr(total, name)) for name in USAGE_FIELDS}
        rates = sorted(hits / max(1, demands) for _, demands, hits in total.layers) or [0.0]
        return (
            counts
            | self._standing
            | {
                "expert_updates_failed": self._failed,
                "expert_fallback_rate": total.fallback_rate,
                "expert_lowest_hit_rate": rates[0],
                "expert_median_hit_rate": rates[len(rates) // 2],
                "expert_highest_hit_rate": rates[-1],
            }
        )


def report_stats(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a runtime's report that metrics show and no step counts."""
    tiers = report["tiers"]
    return {
        "expert_device_evictions": tiers["device"]["evictions"],
        "expert_host_evictions": tiers["host"]["evictions"],
        "expert_device_bytes": tiers["device"]["budget_bytes"],
        "expert_host_bytes": tiers["host"]["budget_bytes"],
        "expert_saved_bytes": report["memory_saved_bytes"],
        "expert_shortages": report["shortages"],
        "expert_fallbacks": int(report["fallback"] != ""),
    }
