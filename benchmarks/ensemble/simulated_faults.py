"""Faults for the simulation: answers that become wrong, and replicas that fail, for a while.

The breakers are the server's own `EnsembleControl`; it sees judged answers and failed requests, and
decides who answers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from coterie.core.ensemble import EnsembleSettings, SloSettings
from coterie.core.plan import RoutePlan
from coterie.core.request import DEFAULT_PRIORITY, Sampling
from coterie.service.breaker.control import EnsembleControl
from coterie.service.breaker.steering import SteeredPlan, SteerRequest
from coterie.service.breaker.watch import WatchedSpecialist
from coterie.service.slo.evidence import whole
from coterie.service.submit.replicas import ReplicaSet

# share of valid answers: usual, while wrong, and the least that is promised
GOOD, WRONG, FLOOR = 0.95, 0.5, 0.85
# of so many specialists one becomes wrong, and of so many one has a replica that fails
EVERY = 16
# when the faults begin and end, as shares of the run
BEGIN, END = 0.35, 0.6


class FaultDrill:
    def __init__(
        self,
        sets: Sequence[ReplicaSet],
        clock: Callable[[], float],
        rng: random.Random,
        total_s: float,
    ) -> None:
        self._sets, self._clock, self._rng = sets, clock, rng
        self._begin_s, self._end_s = BEGIN * total_s, END * total_s
        names = [item.specialist for item in sets]
        self._index = {name: index for index, name in enumerate(names)}
        self._wrong = set(names[EVERY // 2 :: EVERY]) if len(names) > EVERY // 2 else set()
        self._failing = {item.members[0].name for item in sets[::EVERY] if len(item.members) > 1}
        settings = EnsembleSettings(
            window_s=max(total_s / 8, 1.0),
            breach_s=total_s / 60,
            recovery_s=total_s / 40,
            fresh_shadow=0.0,
            shadow_sample=0.1,
        )
        watched = [
            WatchedSpecialist(
                name,
                names[(index + 1) % len(names)] if name in self._wrong else "",
                SloSettings(correctness=FLOOR),
                has_checks=True,
                replicas=sets[index].names,
            )
            for index, name in enumerate(names)
        ]
        self.control = EnsembleControl(watched, settings, clock=clock)
        for item in sets:
            item.ejected = partial(self.control.ejected, item.specialist)
        self._counts: Counter[str] = Counter()

    def steer(self, request_id: str, specialist: str) -> SteeredPlan:
        plan = RoutePlan(request_id, specialist, (), Sampling(), 0.9, ())
        return self.control.steer(plan, SteerRequest(request_id, DEFAULT_PRIORITY))

    def index_of(self, specialist: str) -> int:
        return self._index[specialist]

    def fails(self, replica: str) -> bool:
        return replica in self._failing and self._is_on()

    def failed(self, specialist: str, replica: str) -> None:
        self._counts["failed"] += 1
        self.control.replica_failed(specialist, replica)

    def answered(self, asked: str, answered_by: str, replica: str, shadow: str) -> None:
        """The primary's answer is judged, and that of its shadow, which costs nothing here."""
        self.control.replica_succeeded(answered_by, replica)
        for name in (answered_by, shadow):
            if name:
                is_wrong = name in self._wrong and self._is_on()
                valid = self._rng.random() < (WRONG if is_wrong else GOOD)
                self.control.judged_alone(name, whole(valid))
        if asked in self._wrong and self._is_on():
            self._counts["asked of wrong"] += 1
            self._counts["answered by others"] += answered_by != asked

    def report(self) -> dict[str, Any]:
        changes = self.control.changes.take()
        trips = [c.at - self._begin_s for c in changes if c.kind == "breaker_tripped"]
        resets = [c.at - self._end_s for c in changes if c.kind == "breaker_reset"]
        kinds = Counter(change.kind for change in changes)
        asked = max(self._counts["asked of wrong"], 1)
        return {
            "fault_s": round(self._end_s - self._begin_s, 1),
            "wrong_specialists": len(self._wrong),
            "breaker_trips": len(trips),
            "breaker_resets": len(resets),
            "trip_after_s": [round(s, 1) for s in trips],
            "reset_after_s": [round(s, 1) for s in resets],
            "answered_by_fallback": round(self._counts["answered by others"] / asked, 3),
            "failing_replicas": len(self._failing),
            "replica_ejections": kinds["replica_ejected"],
            "failed_requests": self._counts["failed"],
        }

    def _is_on(self) -> bool:
        return self._begin_s <= self._clock() < self._end_s
