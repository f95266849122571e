"""Who answers a request, with what there is room for: the router's plan, made to fit.

Runs on the event loop before anything else of a request; nothing here waits.
"""

from __future__ import annotations

import time

from coterie.core.adapters import AdapterProfile
from coterie.core.plan import RoutePlan
from coterie.core.request import InferenceRequest, Sampling
from coterie.service.adapters.degrade import (
    AdapterLimits,
    LeftOutAdapter,
    base_alone,
    left_out,
    with_left_out,
    without,
)
from coterie.service.meter import RouteMeter
from coterie.service.roster import Fleet
from coterie.service.run import RequestRun

# times that a plan is made anew without what does not fit, before the base answers alone
MAX_TRIES = 3


class RequestPlanner:
    def __init__(self, roster: Fleet, meter: RouteMeter) -> None:
        self._roster, self._meter = roster, meter

    def plan(self, request: InferenceRequest, vendor: Sampling) -> RequestRun:
        began = time.monotonic()
        plan = self._roster.router.plan(request, vendor)
        # a caller of a vendor's dialect gets exactly what it named, or a refusal
        if plan.adapters and plan.trace is not None:
            plan = self._fitted(request, vendor, plan)
        routed_at = time.monotonic()
        self._meter.planned(plan, routed_at - began)
        served = self._roster.find(plan.specialist)
        wanted = request.response_format or plan.tuned.response_format
        return RequestRun(request, plan, served, routed_at, routed_at - began, wanted)

    def again(self, run: RequestRun, vendor: Sampling, left: list[LeftOutAdapter]) -> RequestRun:
        """The plan without what could not be loaded: other experts, or the base."""
        request = without(run.request, run.plan, left)
        planned = self.plan(request, vendor)
        if {item.digest for item in planned.plan.adapters} & {i.adapter.digest for i in left}:
            planned = self.plan(base_alone(run.request, run.plan), vendor)
        planned.plan = with_left_out(planned.plan, left)
        self._meter.degraded(planned.plan)
        return planned

    def _fitted(self, request: InferenceRequest, vendor: Sampling, plan: RoutePlan) -> RoutePlan:
        gone: list[LeftOutAdapter] = []
        tries = 0
        while left := left_out(plan, self._room(request, plan), self._profile):
            gone += left
            tries += 1
            make = base_alone(request, plan) if tries > MAX_TRIES else without(request, plan, left)
            request, plan = make, self._roster.router.plan(make, vendor)
        return with_left_out(plan, gone)

    def _room(self, request: InferenceRequest, plan: RoutePlan) -> AdapterLimits:
        served = self._roster.find(plan.specialist)
        info = served.info.adapters
        context = min(served.context, request.limits.context_size or served.context)
        if info is None:
            return AdapterLimits(0, context)
        return AdapterLimits(info.device_bytes, context, info.modules.has_bias)

    def _profile(self, digest: str) -> AdapterProfile | None:
        catalog = self._roster.catalog
        card = catalog.by_digest(digest)
        return None if card is None else catalog.profile(card)
