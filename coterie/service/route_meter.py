"""What routing and validation did, written into the metrics. Labels are bounded."""

from __future__ import annotations

from coterie.core.events import Finished
from coterie.core.plan import RoutePlan
from coterie.obs.metrics import Registry, Value

# names that get a series of their own
MAX_NAMED = 200


class RouteMeter:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._router = registry.histogram("coterie_router_seconds")
        self._validation = registry.histogram("coterie_validation_seconds")
        # the base alone has its own, however many others there are
        self._decisions = {"none": registry.value("coterie_route_decisions", "none")}

    def planned(self, plan: RoutePlan, router_s: float) -> None:
        self._router.observe(router_s)
        for adapter in plan.adapters:
            self._decision(adapter.name.partition("@")[0]).add()
        if not plan.adapters:
            self._decision("none").add()
        if plan.trace is not None and plan.trace.degraded:
            self.degraded(plan)

    def degraded(self, plan: RoutePlan) -> None:
        self._registry.value("coterie_degraded", plan.specialist).add()

    def finished(self, event: Finished) -> None:
        metrics, validation = event.metrics, event.validation
        if metrics is not None and metrics.num_experts:
            series = self._registry.histogram("coterie_expert_wait_seconds", metrics.specialist)
            series.observe(metrics.expert_load_latency_ms / 1000)
        if validation is not None:
            result = "valid" if validation.valid else "invalid"
            self._registry.value("coterie_validations", validation.validator, result).add()
            self._validation.observe(validation.duration_ms / 1000)

    def _decision(self, name: str) -> Value:
        found = self._decisions.get(name)
        if found is None:
            if len(self._decisions) >= MAX_NAMED:
                return self._registry.value("coterie_route_decisions", "other")
            found = self._registry.value("coterie_route_decisions", name)
            self._decisions[name] = found
        return found
