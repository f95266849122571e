"""One decision: who answers a planned request, and who is its shadow. Reads state, changes none.

In this order: the specialist that took over the intent, a canary, the priority floor, the breaker
and its fallback, the alternate under load, the shadow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coterie.core.ensemble import EnsembleSettings
from coterie.core.errors import Drained, Overloaded, Saturated
from coterie.core.plan import AdapterChoice, AlternateSpecialist, RoutePlan
from coterie.core.quick_init import quick_init
from coterie.service.breaker.correctness import CLOSED
from coterie.service.breaker.spike import NORMAL, IntentThresholds
from coterie.service.breaker.watch import DRAINING, SpecialistWatch
from coterie.service.canary import CanarySet
from coterie.service.shadow.policy import SAMPLE, ShadowFacts, ShadowPolicy, draw

# a request that no specialist may answer now should come again after this time at the earliest
RETRY_S = 5.0


@quick_init
@dataclass(frozen=True, slots=True)
class SteerRequest:
    """What must be known about a request beside its plan."""

    request_id: str
    priority: int
    # the caller named the specialist: nobody else answers
    is_named: bool = False
    # the caller named a version of an adapter: no canary answers
    is_pinned: bool = False
    # specialists that the tenant may use; None = all
    allowed: frozenset[str] | None = None
    # in whose share of a crowded specialist it is; empty = it was accepted before
    tenant: str = ""
    share: float = 1.0

    def may_use(self, specialist: str) -> bool:
        return self.allowed is None or specialist in self.allowed


@quick_init
@dataclass(frozen=True, slots=True)
class SteeredPlan:
    """Who answers."""

    specialist: str
    # the breaker of the first choice: closed, shadow_only, ejected or draining
    breaker: str = CLOSED
    shadow: str = ""
    # unsure, fresh or sample
    shadow_why: str = ""
    # the canary that answers, as the operator named it
    canary: str = ""
    # in place of the plan's adapters; None = those of the plan
    adapters: tuple[AdapterChoice, ...] | None = None
    # those of the plan; one that is demoted, ejected or not allowed is not viable
    alternates: tuple[AlternateSpecialist, ...] = ()
    reasons: tuple[str, ...] = ()
    # when it was decided: what it was decided from is read at the same moment
    at: float = 0.0


@quick_init
@dataclass(frozen=True, slots=True)
class IntentRules:
    """The thresholds of a request's intent, before a spike changes them."""

    thresholds: IntentThresholds
    high_stakes: bool = False


class PlanSteering:
    """`base` answers if a fallback cannot. `outcomes`: (valid, judged) of an adapter's digest."""

    def __init__(
        self,
        watches: Mapping[str, SpecialistWatch],
        base: str,
        settings: EnsembleSettings,
        canaries: CanarySet,
        outcomes: Callable[[str], tuple[int, int]] | None,
    ) -> None:
        self._watches, self._base, self._settings = watches, base, settings
        self._canaries, self._outcomes = canaries, outcomes
        self._policy = ShadowPolicy(settings.fresh_shadow, settings.shadow_sample)

    def steer(
        self, plan: RoutePlan, request: SteerRequest, rules: IntentRules, now: float
    ) -> SteeredPlan:
        """Raises Overloaded below a priority floor, and Saturated if nobody may answer."""
        first = self._watches.get(plan.specialist)
        if first is None:
            return SteeredPlan(plan.specialist, alternates=plan.alternates, at=now)
        canary, reasons = "", list[str]()
        if not request.is_named:
            first, canary = self._by_intent(plan, request, first, now, reasons)
        limits = first.spike.thresholds(rules.thresholds)
        self._check_floor(first, request.priority, limits)
        chosen = first
        if not request.is_named:
            chosen = self._who_answers(plan, request, first, limits, now, reasons)
        elif first.state(now) == DRAINING:
            raise _nobody(first, now)
        adapters, label = None, ""
        if not request.is_pinned and chosen.name == plan.specialist:
            adapters, label = self._canaries.adapters(plan.adapters, request.request_id)
            for old, new in zip(plan.adapters, adapters or (), strict=False):
                if old.digest != new.digest:
                    reasons.append(f"{new.name} is a canary, in place of {old.name}")
        shadow, why = self._shadow(plan, request, (first, chosen), rules, limits, now)
        return SteeredPlan(
            specialist=chosen.name,
            breaker=first.state(now),
            shadow=shadow,
            shadow_why=why,
            canary=canary if canary and chosen is first else label,
            adapters=adapters,
            alternates=tuple(
                [
                    self._alternate(item, request, now) if item.viable else item
                    for item in plan.alternates
                ]
            ),
            reasons=tuple(reasons),
            at=now,
        )

    def instead(self, plan: RoutePlan, request: SteerRequest, now: float) -> SteeredPlan | None:
        """Who answers in place of a specialist that failed; None if nobody may."""
        first = self._watches.get(plan.specialist)
        if first is None or request.is_named:
            return None
        try:
            other = self._stand_in(first, request, now)
        except Saturated:
            return None
        if other is first:
            return None
        reason = f"{other.name} in place of {first.name}, which failed"
        return SteeredPlan(other.name, first.state(now), reasons=(reason,))

    def _alternate(
        self, item: AlternateSpecialist, request: SteerRequest, now: float
    ) -> AlternateSpecialist:
        """A viable alternate, as breakers and the tenant's rights change it."""
        watch = self._watches.get(item.specialist)
        if watch is None:
            return item
        able = watch.state(now) == CLOSED and request.may_use(item.specialist)
        return item if able else replace(item, viable=False)

    def _check_floor(self, first: SpecialistWatch, priority: int, limits: IntentThresholds) -> None:
        if priority < limits.priority_floor:
            raise Overloaded(
                f"{first.name} has too much to do: only requests of priority "
                f"{limits.priority_floor} and above are accepted now",
                param="priority",
                retry_after_s=max(self._settings.spike_s, 1.0),
            )

    def _by_intent(
        self,
        plan: RoutePlan,
        request: SteerRequest,
        first: SpecialistWatch,
        now: float,
        reasons: list[str],
    ) -> tuple[SpecialistWatch, str]:
        """The specialist that took over the intent, or its canary."""
        taken_by = self._canaries.owner(plan.intent)
        if taken_by and taken_by != first.name and request.may_use(taken_by):
            reasons.append(f"{taken_by} took over {plan.intent} after a canary")
            first = self._watches[taken_by]
        candidate = self._canaries.specialist(plan.intent, first.name, request.request_id)
        watch = self._watches.get(candidate)
        if watch is None or not request.may_use(candidate):
            return first, ""
        if watch.is_full or watch.state(now) != CLOSED:
            return first, ""
        reasons.append(f"{candidate} is a canary for {plan.intent}")
        return watch, candidate

    def _who_answers(
        self,
        plan: RoutePlan,
        request: SteerRequest,
        first: SpecialistWatch,
        limits: IntentThresholds,
        now: float,
        reasons: list[str],
    ) -> SpecialistWatch:
        state = first.state(now)
        if state != CLOSED:
            other = self._stand_in(first, request, now)
            if other is first:
                reasons.append(f"{first.name} is {state} and has no fallback")
            else:
                reasons.append(f"{other.name} in place of {first.name}, which is {state}")
            return other
        share = first.spike.spill_share
        is_unsure = plan.confidence < limits.spill_below
        if not is_unsure and draw(request.request_id, "spill") >= share:
            return first
        for alternate in plan.alternates:
            watch = self._watches.get(alternate.specialist)
            if watch is None or watch is first or not alternate.viable:
                continue
            has_room = watch.spike.load < first.spike.load and not watch.is_full
            if has_room and request.may_use(watch.name) and watch.state(now) == CLOSED:
                why = f"confidence {plan.confidence:.2f}, needed {limits.spill_below:.2f}"
                if not is_unsure:
                    why = f"{share:.0%} of its requests go to an alternate"
                reasons.append(
                    f"{watch.name} in place of {first.name}, which has too much to do: {why}"
                )
                return watch
        return first

    def _stand_in(
        self, first: SpecialistWatch, request: SteerRequest, now: float
    ) -> SpecialistWatch:
        """The fallback; if that cannot, its fallback and so on; at the end the base. If that cannot
        either, an error."""
        is_last = first.name == self._base and not first.settings.fallback
        if is_last and first.state(now) != DRAINING:
            return first
        for watch in self._fallbacks(first):
            if request.may_use(watch.name) and self._may_stand_in(watch, now):
                return watch
        raise _nobody(first, now)

    def _fallbacks(self, first: SpecialistWatch) -> list[SpecialistWatch]:
        found, watch = [first], self._watches.get(first.settings.fallback)
        while watch is not None and watch not in found:
            found.append(watch)
            watch = self._watches.get(watch.settings.fallback)
        base = self._watches[self._base]
        return [*found[1:], *([] if base in found else [base])]

    def _may_stand_in(self, watch: SpecialistWatch, now: float) -> bool:
        """A specialist of which too little is known is no fallback; but the base is the last."""
        if watch.is_full or watch.state(now) != CLOSED:
            return False
        return watch.name == self._base or watch.is_known(now)

    def _shadow(
        self,
        plan: RoutePlan,
        request: SteerRequest,
        pair: tuple[SpecialistWatch, SpecialistWatch],
        rules: IntentRules,
        limits: IntentThresholds,
        now: float,
    ) -> tuple[str, str]:
        """(specialist, why). `pair`: who was to answer, and who does."""
        if not self._settings.max_shadows:
            return "", ""
        first, chosen = pair
        unknown = self._unknown_fallback(chosen, now)
        facts = ShadowFacts(
            request.request_id,
            plan.confidence,
            limits.shadow_below,
            high_stakes=rules.high_stakes,
            is_fresh=bool(unknown) or self._is_fresh(chosen, plan.adapters, now),
            under_spike=chosen.spike.level > NORMAL,
            is_demoted=chosen is not first and first.is_demoted,
        )
        why = self._policy.why(facts)
        if not why:
            return "", ""
        names: list[str] = [first.name]
        if why != SAMPLE:
            others = [item.specialist for item in plan.alternates]
            names = [*unknown, *others, chosen.settings.fallback, self._base]
        for name in names:
            watch = self._watches.get(name)
            if watch is None or watch is chosen or not request.may_use(name):
                continue
            is_out = watch.is_down or watch.replicas.all_ejected(now)
            is_out = is_out or watch.state(now) == DRAINING
            if watch.settings.may_shadow and not is_out:
                return name, why
        return "", ""

    def _unknown_fallback(self, chosen: SpecialistWatch, now: float) -> Sequence[str]:
        """The fallback, if it could never stand in because too little is known about it."""
        watch = self._watches.get(chosen.settings.fallback)
        if watch is None or watch is chosen or watch.name == self._base:
            return ()
        return () if not watch.settings.is_watched or watch.is_known(now) else (watch.name,)

    def _is_fresh(
        self, watch: SpecialistWatch, adapters: Sequence[AdapterChoice], now: float
    ) -> bool:
        """Whether too few answers of the specialist or of an adapter were judged."""
        if not watch.settings.is_watched:
            return False
        if not watch.is_known(now):
            return True
        least, outcomes = self._settings.min_judged, self._outcomes
        return outcomes is not None and any(outcomes(a.digest)[1] < least for a in adapters)


def _nobody(first: SpecialistWatch, now: float) -> Saturated:
    kind = Drained if first.state(now) == DRAINING else Saturated
    return kind(
        f"{first.name} is {first.state(now)}, and no other specialist may answer now",
        retry_after_s=max(first.replicas.back_in_s(now), RETRY_S),
    )
