"""Everything that steers requests after the router: breakers, spikes, shadows, canaries and the
operator, in one object. No I/O, no waiting: a decision takes microseconds.

    control = EnsembleControl(specialists, settings, intents)
    steered = control.steer(plan, SteerRequest(...))         # after the router
    control.judged(plan, answer, SteerRequest(...))          # when a caller's answer has ended
    control.loaded(specialist, load, is_full=False)          # several times a second
    control.changes.take()                                   # for the audit log
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from coterie.core.ensemble import EnsembleSettings, IntentSettings
from coterie.core.errors import Conflict, InvalidRequest, NotFound, Overloaded
from coterie.core.plan import RoutePlan
from coterie.core.request import MAX_PRIORITY
from coterie.service.breaker.correctness import CLOSED, SHADOW_ONLY
from coterie.service.breaker.spike import NORMAL, STEPS, IntentThresholds
from coterie.service.breaker.steering import IntentRules, PlanSteering, SteeredPlan, SteerRequest
from coterie.service.breaker.watch import (
    AUTOMATIC,
    ChangeList,
    SpecialistWatch,
    WatchedSpecialist,
    steady_clock,
)
from coterie.service.canary import CanarySet, CanarySpec
from coterie.service.shadow.policy import draw
from coterie.service.slo.evidence import JudgedAnswer

_NO_RULES = IntentRules(IntentThresholds(0.0, 0.0))


class EnsembleControl:
    """The first specialist is the base: it answers if a fallback cannot."""

    def __init__(
        self,
        specialists: Sequence[WatchedSpecialist],
        settings: EnsembleSettings | None = None,
        intents: Iterable[IntentSettings] = (),
        *,
        clock: Callable[[], float] | None = None,
        outcomes: Callable[[str], tuple[int, int]] | None = None,
        let_in: Callable[[str, str, int], bool] | None = None,
    ) -> None:
        """`outcomes`: (valid, judged) answers of an adapter, by its digest. `let_in`: whether a
        place at this specialist is reserved now for this tenant and priority; each counts once."""
        self._clock = clock or steady_clock()
        self._outcomes, self._let_in = outcomes, let_in
        self.changes = ChangeList(self._clock)
        self.canaries = CanarySet(self._clock, self.changes.add)
        # by intent: values that an operator set
        self._overrides: dict[str, IntentThresholds] = {}
        self._watches: dict[str, SpecialistWatch] = {}
        # replicas that an operator drains, for every specialist that they serve
        self._drained: frozenset[str] = frozenset()
        self._configure(specialists, settings or EnsembleSettings(), intents)

    @property
    def now(self) -> float:
        """Seconds since 1970."""
        return self._clock()

    @property
    def watches(self) -> Mapping[str, SpecialistWatch]:
        return self._watches

    @property
    def base(self) -> str:
        """The specialist that answers if a fallback cannot."""
        return self._base

    def judged_answers(self, digest: str) -> int:
        """How many answers of an adapter were judged."""
        return 0 if self._outcomes is None else self._outcomes(digest)[1]

    def override(self, intent: str) -> IntentThresholds | None:
        """The thresholds that an operator set in place of the settings."""
        return self._overrides.get(intent)

    # requests

    def steer(self, plan: RoutePlan, request: SteerRequest) -> SteeredPlan:
        """Raises Overloaded for what exceeds the capacity in a spike, or is below a priority floor,
        and Saturated if nobody may answer."""
        now = self._clock()
        watch = self._watches.get(plan.specialist)
        if watch is not None:
            self._look(watch, now)
        steered = self._steering.steer(plan, request, self._rules(plan.intent), now)
        answering = self._watches.get(steered.specialist)
        if answering is not None and request.tenant:
            self._check_demand(answering, request, now)
        return steered

    def _check_demand(self, watch: SpecialistWatch, request: SteerRequest, now: float) -> None:
        spike, priority, tenant = watch.spike, request.priority, request.tenant
        if spike.level == NORMAL:
            # what was asked before a spike says nothing about it
            return
        spike.demand.add(priority, tenant, request.share, now)
        accepted = spike.accepted(priority, tenant)
        if accepted >= 1.0 or draw(request.request_id, "floor") < accepted:
            return
        if self._let_in is not None and self._let_in(watch.name, tenant, priority):
            # it was told to come now
            return
        which = f"{accepted:.0%} of your requests of priority {priority} are accepted now"
        if not accepted:
            which = f"requests of priority {priority} and below are not accepted now"
        raise Overloaded(
            f"{watch.name} has too much to do: {which}",
            param="priority",
            retry_after_s=max(spike.spike_s, 1.0),
        )

    def instead(self, plan: RoutePlan, request: SteerRequest) -> SteeredPlan | None:
        """Who answers in place of a specialist that failed before it began; None = nobody."""
        return self._steering.instead(plan, request, self._clock())

    def judged(
        self, plan: RoutePlan, answer: JudgedAnswer, asked: SteerRequest, *, alone: bool = False
    ) -> None:
        """An answer that a caller got has ended. A canary compares answers to requests that were
        drawn for one of its sides: no version and no specialist that the caller named. `alone`: it
        counts in canaries alone, as that of a version under test does."""
        adapters = () if asked.is_pinned else plan.adapters
        intent = "" if asked.is_named else plan.intent
        self.canaries.judged(plan.specialist, adapters, intent, answer, asked.request_id)
        if not alone:
            self.judged_alone(plan.specialist, answer)

    def judged_alone(self, specialist: str, answer: JudgedAnswer) -> None:
        """An answer counts for its specialist and for no canary: that of a shadow, or one that no
        check judged, but its caller."""
        watch, now = self._watches.get(specialist), self._clock()
        if watch is not None:
            watch.breaker.judge(now, answer)
            self._look(watch, now)

    def reachable(self, specialist: str, is_up: bool) -> None:
        """Whether any replica can take a request now; if not, the fallback answers at once."""
        watch = self._watches.get(specialist)
        if watch is not None:
            watch.is_down = not is_up

    def loaded(self, specialist: str, load: float, *, is_full: bool = False) -> None:
        """1 = as much as the specialist can bear."""
        watch, now = self._watches.get(specialist), self._clock()
        if watch is None:
            return
        watch.is_full = is_full
        change = watch.spike.loaded(load, now)
        if change:
            kind = "spike_raised" if change > 0 else "spike_lowered"
            details = {"step": STEPS[watch.spike.level], "load": round(load, 3)}
            self.changes.add(AUTOMATIC, kind, specialist, details)
        self._look(watch, now)

    def replica_succeeded(self, specialist: str, replica: str) -> None:
        watch = self._watches.get(specialist)
        if watch is not None:
            watch.replicas.succeeded(replica, self._clock())

    def replica_failed(self, specialist: str, replica: str) -> None:
        """A request ended because the replica crashed or did not answer in time."""
        watch, now = self._watches.get(specialist), self._clock()
        if watch is not None and watch.replicas.failed(replica, now):
            seconds = round(watch.replicas.back_in_s(now), 1)
            details = {"specialist": specialist, "first_back_in_s": seconds}
            self.changes.add(AUTOMATIC, "replica_ejected", replica, details)

    def ejected(self, specialist: str) -> frozenset[str]:
        """Replicas that get no requests now. If all are out and a request comes nevertheless, it
        may use any."""
        watch, now = self._watches.get(specialist), self._clock()
        if watch is None or watch.replicas.all_ejected(now):
            return frozenset()
        return watch.replicas.ejected(now)

    def look(self) -> None:
        """To be called every second or so: a breaker may change without a new answer, and a canary
        end without one."""
        now = self._clock()
        self.canaries.look()
        for watch in self._watches.values():
            self._look(watch, now)

    @property
    def drained(self) -> frozenset[str]:
        """Replicas that get nothing new, whatever else fails."""
        return self._drained

    # the operator

    def drain(self, specialist: str, actor: str, reason: str = "") -> None:
        """Nothing new begins there until `undrain`, not even shadows; what runs or waits ends."""
        watch = self._find(specialist)
        if watch.is_draining:
            raise Conflict(f"{specialist} is draining already")
        watch.is_draining = True
        self.changes.add(actor, "drained", specialist, _with_reason({}, reason))

    def undrain(self, specialist: str, actor: str, reason: str = "") -> None:
        watch = self._find(specialist)
        if not watch.is_draining:
            raise Conflict(f"{specialist} is not draining")
        watch.is_draining = False
        self.changes.add(actor, "undrained", specialist, _with_reason({}, reason))

    def drain_replica(self, replica: str, actor: str, reason: str = "") -> None:
        """The same for one replica of several: the others take what comes."""
        if replica in self._drained:
            raise Conflict(f"{replica} is draining already")
        self._drained = self._may_drain(replica)
        self.changes.add(actor, "replica_drained", replica, _with_reason({}, reason))

    def undrain_replica(self, replica: str, actor: str, reason: str = "") -> None:
        if replica not in self._drained:
            raise Conflict(f"{replica} is not draining")
        self._drained -= {replica}
        self.changes.add(actor, "replica_undrained", replica, _with_reason({}, reason))

    def demote(self, specialist: str, actor: str, reason: str = "") -> None:
        """Only its shadows run until `restore`."""
        watch = self._find(specialist)
        if specialist == self.base and not watch.settings.fallback:
            raise Conflict(f"{specialist} has no fallback: nobody would answer in its place")
        if watch.is_held:
            raise Conflict(f"{specialist} is demoted already")
        watch.is_held = True
        self.changes.add(actor, "demoted", specialist, _with_reason({}, reason))

    def restore(self, specialist: str, actor: str, reason: str = "") -> None:
        """Undo a demotion, by the operator or by the breaker; a spike and ejections too."""
        watch, now = self._find(specialist), self._clock()
        before = watch.breaker_state(now)
        if before == CLOSED and watch.spike.level == NORMAL and not watch.replicas.ejected(now):
            raise Conflict(f"{specialist} is not demoted, ejected or under a spike")
        watch.is_held = False
        watch.breaker.force(CLOSED, now)
        watch.spike.reset()
        watch.replicas.restore_all()
        self.changes.add(actor, "restored", specialist, _with_reason({"before": before}, reason))

    def set_thresholds(
        self,
        intent: str,
        actor: str,
        *,
        shadow_below: float | None = None,
        spill_below: float | None = None,
        priority_floor: int | None = None,
    ) -> IntentThresholds:
        """Change the thresholds of an intent until `clear_thresholds`; None = as it is."""
        self._check_intent(intent)
        before = self.thresholds(intent)
        after = IntentThresholds(
            before.shadow_below if shadow_below is None else shadow_below,
            before.spill_below if spill_below is None else spill_below,
            before.priority_floor if priority_floor is None else priority_floor,
        )
        if not (0 <= after.shadow_below <= 1 and 0 <= after.spill_below <= 1):
            raise InvalidRequest("thresholds are from 0 to 1", param="shadow_below")
        if not 0 <= after.priority_floor <= MAX_PRIORITY:
            raise InvalidRequest(
                f"a priority floor is from 0 to {MAX_PRIORITY}", param="priority_floor"
            )
        self._overrides[intent] = after
        details = plain(after) | {"before": plain(before)}
        self.changes.add(actor, "thresholds_set", intent, details)
        return after

    def clear_thresholds(self, intent: str, actor: str) -> IntentThresholds:
        """Back to the configuration."""
        self._check_intent(intent)
        if intent not in self._overrides:
            raise Conflict(f"the thresholds of {intent!r} are those of the configuration")
        del self._overrides[intent]
        after = self.thresholds(intent)
        self.changes.add(actor, "thresholds_cleared", intent, plain(after))
        return after

    def thresholds(self, intent: str) -> IntentThresholds:
        """Before spikes change them. A request without a configured intent has none."""
        return self._rules(intent).thresholds

    def start_canary(self, spec: CanarySpec, actor: str) -> dict[str, Any]:
        if spec.kind == "specialist":
            self._find(spec.candidate)
            self._find(spec.current)
            self._check_intent(spec.subject)
        return self.canaries.start(spec, actor)

    def intents(self) -> dict[str, dict[str, Any]]:
        """The thresholds of every configured intent, and whether an operator set them."""
        return {
            name: plain(self.thresholds(name))
            | {
                "high_stakes": settings.high_stakes,
                "overridden": name in self._overrides,
                "owner": self.canaries.owner(name),
            }
            for name, settings in self._intents.items()
        }

    # state

    def reconfigure(
        self,
        specialists: Sequence[WatchedSpecialist],
        settings: EnsembleSettings,
        intents: Iterable[IntentSettings],
    ) -> None:
        """Take over changed settings; what is known about a specialist stays."""
        saved, before = self.saved(), self._watches
        self._configure(specialists, settings, intents)
        self.restore_saved(saved)
        for name, watch in self._watches.items():
            old = before.get(name)
            if old is None:
                continue
            watch.spike, watch.is_full, watch.is_down = old.spike, old.is_full, old.is_down
            watch.spike.spike_s = settings.spike_s
            if watch.settings.replicas == old.settings.replicas:
                watch.replicas = old.replicas

    def saved(self) -> dict[str, Any]:
        """Everything that survives a restart. Spikes and ejections do not: they are short."""
        return {
            "specialists": {
                name: watch.breaker.saved() | {"held": watch.is_held, "draining": watch.is_draining}
                for name, watch in self._watches.items()
            },
            "drained": sorted(self._drained),
            "overrides": {name: plain(values) for name, values in self._overrides.items()},
            "canaries": self.canaries.saved(),
        }

    def restore_saved(self, saved: Mapping[str, Any]) -> None:
        """State of specialists and intents that no longer exist is left out."""
        for name, state in saved.get("specialists", {}).items():
            watch = self._watches.get(name)
            if watch is not None:
                watch.breaker.restore(state, self._clock())
                watch.is_held = bool(state.get("held"))
                watch.is_draining = bool(state.get("draining"))
        self._drained = frozenset()
        for replica in saved.get("drained", ()):
            with suppress(NotFound, Conflict):
                self._drained = self._may_drain(replica)
        self._overrides = {
            name: IntentThresholds(**values)
            for name, values in saved.get("overrides", {}).items()
            if name in self._intents
        }
        self.canaries.restore_saved(saved.get("canaries", {}), self._watches)

    def _configure(
        self,
        specialists: Sequence[WatchedSpecialist],
        settings: EnsembleSettings,
        intents: Iterable[IntentSettings],
    ) -> None:
        self._watches = {item.name: SpecialistWatch(item, settings) for item in specialists}
        self._base = specialists[0].name if specialists else ""
        self._intents = {item.name: item for item in intents}
        self.canaries.longest_s = settings.canary_s
        self._steering = PlanSteering(
            self._watches, self._base, settings, self.canaries, self._outcomes
        )

    def _rules(self, intent: str) -> IntentRules:
        settings = self._intents.get(intent)
        if settings is None:
            return _NO_RULES
        values = self._overrides.get(intent)
        if values is None:
            values = IntentThresholds(settings.shadow_below, settings.spill_below)
        return IntentRules(values, settings.high_stakes)

    def _look(self, watch: SpecialistWatch, now: float) -> None:
        if watch.is_held or not watch.settings.slo.correctness:
            return
        change = watch.breaker.look(now)
        if change is None:
            return
        rate = change.rate
        kind = "breaker_tripped" if change.state == SHADOW_ONLY else "breaker_reset"
        details: dict[str, Any] = {
            "floor": change.floor,
            "rate": rate.rate,
            "low": rate.low,
            "high": rate.high,
            "judged": rate.judged,
        }
        if change.why:
            details["why"] = change.why
        self.changes.add(AUTOMATIC, kind, watch.name, details)

    def _check_intent(self, intent: str) -> None:
        if intent not in self._intents:
            known = ", ".join(self._intents) or "none"
            raise NotFound(
                f"no intent {intent!r} is configured; there are: {known}", param="intent"
            )

    def _may_drain(self, replica: str) -> frozenset[str]:
        """All that drain when this replica does too; refused if a specialist had no other left."""
        served = [item for item in self._watches.values() if replica in item.settings.replicas]
        if not served:
            known = {name for item in self._watches.values() for name in item.settings.replicas}
            listed = ", ".join(sorted(known)) or "none"
            raise NotFound(f"no replica {replica!r}; there are: {listed}", param="replica")
        after = self._drained | {replica}
        for watch in served:
            if after.issuperset(watch.settings.replicas):
                raise Conflict(
                    f"{watch.name} has no other replica: drain the specialist {watch.name} instead"
                )
        return after

    def _find(self, specialist: str) -> SpecialistWatch:
        watch = self._watches.get(specialist)
        if watch is None:
            known = ", ".join(self._watches)
            raise NotFound(
                f"no specialist {specialist!r} writes text here; there are: {known}",
                param="specialist",
            )
        return watch


def plain(values: IntentThresholds) -> dict[str, Any]:
    return {
        "shadow_below": values.shadow_below,
        "spill_below": values.spill_below,
        "priority_floor": values.priority_floor,
    }


def _with_reason(details: dict[str, Any], reason: str) -> dict[str, Any]:
    return details | {"reason": reason} if reason else details
