"""The engine's side of a model's experts: what they cost in all, and when they may move.

Stats are flat names with `expert_` in front, for metrics. Asks the runtime for its report rarely:
an engine is asked for its stats after every step. Knows no strategy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from coterie.core.dispatch import USAGE_FIELDS, ExpertUsage
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from coterie.engine.step import StepPlan, StepResult
    from coterie.models.moe import Experts

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0


class ExpertTier:
    def __init__(self, runtime: Experts, clock: Callable[[], float] = time.monotonic) -> None:
        self._runtime, self._now = runtime, clock
        self._total = ExpertUsage()
        self._reported_at = -REPORT_EVERY_S
        self._standing: dict[str, float] = {}

    def after_step(self, plan: StepPlan, result: StepResult) -> None:
        if result.dispatch is not None:
            self._total += result.dispatch.total
        if plan.num_tokens > plan.num_prefill_tokens:
            self.update(1)

    def update(self, rounds: int) -> None:
        """A move that fails costs a log line: whoever needs that expert meets the error."""
        try:
            for _ in range(rounds):
                self._runtime.update()
        except WeightsError as error:
            log.warning("expert_update_failed", extra={"reason": error.message})

    def stats(self) -> dict[str, float]:
        now = self._now()
        if now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self._standing = standing(self._runtime.report())
        counts = {f"expert_{name}": float(getattr(self._total, name)) for name in USAGE_FIELDS}
        return counts | self._standing


def standing(report: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a runtime's report that metrics show; layers only as a summary."""
    rates = sorted(_hit_rate(layer) for layer in report["layers"].values())
    tiers = report["tiers"]
    return {
        "expert_device_evictions": tiers["device"]["evictions"],
        "expert_host_evictions": tiers["host"]["evictions"],
        "expert_device_bytes": tiers["device"]["budget_bytes"],
        "expert_host_bytes": tiers["host"]["budget_bytes"],
        "expert_saved_bytes": report["memory_saved_bytes"],
        "expert_updates": report["dcu_calls"],
        "expert_swaps": report["swaps"],
        "expert_shortages": report["shortages"],
        "expert_fallbacks": int(report["fallback"] != ""),
        "expert_fallback_rate": report["fallback_rate"],
        "expert_lowest_hit_rate": rates[0],
        "expert_median_hit_rate": rates[len(rates) // 2],
        "expert_highest_hit_rate": rates[-1],
    }


def _hit_rate(layer: Mapping[str, float]) -> float:
    met = layer["device_hits"] + layer["prefetch_hits"]
    return met / max(1.0, met + layer["device_misses"] + layer["host_runs"])
