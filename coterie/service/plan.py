"""Decides who answers a request: the router's plan, reduced to what fits into memory.

Runs on the event loop as the first step of a request; nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coterie.core.adapters import AdapterProfile
from coterie.core.ensemble import TenantSettings
from coterie.core.events import Delta
from coterie.core.plan import (
    AdapterChoice,
    AlternateSpecialist,
    Candidate,
    RoutePlan,
    RouteTrace,
)
from coterie.core.quick_init import quick_init
from coterie.core.receipt import CLOSED
from coterie.core.request import AdapterHint, InferenceRequest, ResponseFormat, Sampling
from coterie.packages.adapter_kinds import is_exact
from coterie.routing.router import NAMED
from coterie.service.breaker.steering import SteeredPlan
from coterie.service.fleet import Fleet
from coterie.service.meter import RouteMeter
from coterie.service.snapshot import ServingSnapshot

if TYPE_CHECKING:
    from coterie.service.fleet import ServedSpecialist
    from coterie.service.slo.evidence import JudgedAnswer

# how often a plan is made again without the adapters that do not fit, before the base model answers
MAX_TRIES = 3


class RequestPlanner:
    def __init__(self, fleet: Fleet, meter: RouteMeter) -> None:
        self._fleet, self._meter = fleet, meter

    def plan(
        self, request: InferenceRequest, vendor: Sampling, snapshot: ServingSnapshot
    ) -> RequestRun:
        began = time.monotonic()
        plan = first = snapshot.router.plan(request, vendor)
        # a caller of a vendor's dialect gets exactly the adapters it named, or an error
        if plan.adapters and plan.trace is not None:
            plan = self._fitted(request, vendor, plan, snapshot)
        routed_at = time.monotonic()
        self._meter.planned(plan, routed_at - began)
        served = self._fleet.find(plan.specialist)
        was_reduced = plan is not first
        if served.is_remote:
            plan = replace(plan, sampling=remote_sampling(request, plan))
        answer_format = request.response_format or plan.tuned.response_format
        router_s = routed_at - began
        run = RequestRun(request, plan, served, routed_at, router_s, snapshot, answer_format)
        run.was_reduced = was_reduced
        return run

    def plan_without(
        self, run: RequestRun, vendor: Sampling, left: list[LeftOutAdapter]
    ) -> RequestRun:
        """The plan without the adapters that could not be loaded."""
        request = request_without(run.request, run.plan, left)
        planned = self.plan(request, vendor, run.snapshot)
        if {item.digest for item in planned.plan.adapters} & {i.adapter.digest for i in left}:
            planned = self.plan(base_alone(run.request, run.plan), vendor, run.snapshot)
        planned.plan = with_left_out(planned.plan, left)
        self._meter.degraded(planned.plan)
        return planned

    def plan_alternate(
        self, run: RequestRun, vendor: Sampling, alternate: AlternateSpecialist
    ) -> RequestRun:
        """The plan with another specialist than the first choice, which cannot take the request."""
        first = run.plan
        tune = run.request.hints.tune or first.trace is not None
        hints = replace(run.request.hints, model=alternate.specialist, adapters=(), tune=tune)
        planned = self.plan(replace(run.request, hints=hints), vendor, run.snapshot)
        planned.request, planned.routed = run.request, run.routed or first
        reason = f"rerouted: {first.specialist} cannot take it now"
        planned.plan = replace(
            planned.plan,
            confidence=alternate.probability,
            reasons=(*_reasons(first, planned.plan), reason),
            trace=_routed_trace(first, planned.plan),
            lowered_priority=first.lowered_priority,
            intent=first.intent,
            alternates=(),
        )
        planned.admission, planned.breaker = "rerouted", run.breaker
        return planned

    def plan_steered(self, run: RequestRun, vendor: Sampling, steered: SteeredPlan) -> RequestRun:
        """The plan as the ensemble's state changes it: another specialist, or a canary's adapters;
        and the shadow."""
        routed, request, planned = run.plan, run.request, run
        adapters, is_canary = steered.adapters, steered.adapters is not None
        fixed = run.snapshot.fixed_digests(routed.specialist)
        if adapters is not None and any(item.digest in fixed for item in routed.adapters):
            # the router would add the version that the settings name
            planned.plan, adapters = replace(routed, adapters=adapters), None
        if steered.specialist != routed.specialist or adapters is not None:
            named = tuple(AdapterHint(item.name, item.weight) for item in adapters or ())
            tune = request.hints.tune or routed.trace is not None
            hints = replace(request.hints, model=steered.specialist, adapters=named, tune=tune)
            planned = self.plan(replace(request, hints=hints), vendor, run.snapshot)
            planned.request, planned.routed = request, routed
            planned.plan = replace(
                planned.plan,
                confidence=routed.confidence,
                reasons=_reasons(routed, planned.plan),
                trace=_routed_trace(routed, planned.plan),
                intent=routed.intent,
            )
        planned.breaker, planned.shadow_why = steered.breaker, steered.shadow_why
        planned.is_canary = is_canary
        changed = (steered.shadow, steered.reasons, steered.alternates)
        if changed != (planned.plan.shadow, (), planned.plan.alternates):
            plan = planned.plan
            # as `replace`, in less time
            planned.plan = RoutePlan(
                plan.request_id,
                plan.specialist,
                plan.adapters,
                plan.sampling,
                plan.confidence,
                (*plan.reasons, *steered.reasons),
                plan.tuned,
                plan.trace,
                plan.lowered_priority,
                plan.intent,
                steered.alternates,
                steered.shadow,
            )
        return planned

    def _fitted(
        self,
        request: InferenceRequest,
        vendor: Sampling,
        plan: RoutePlan,
        snapshot: ServingSnapshot,
    ) -> RoutePlan:
        gone: list[LeftOutAdapter] = []
        tries = 0
        fixed = snapshot.fixed_digests(plan.specialist)
        while left := left_out(plan, self._room(request, plan), self._profile, fixed):
            gone += left
            tries += 1
            reduced = (
                base_alone(request, plan)
                if tries > MAX_TRIES
                else request_without(request, plan, left)
            )
            first, request, plan = plan, reduced, snapshot.router.plan(reduced, vendor)
            if NAMED not in first.reasons:
                plan = replace(plan, reasons=_reasons(first, plan))
            fixed = snapshot.fixed_digests(plan.specialist)
        return with_left_out(plan, gone)

    def _room(self, request: InferenceRequest, plan: RoutePlan) -> AdapterLimits:
        served = self._fleet.find(plan.specialist)
        info = served.info.adapters
        context = min(served.context, request.limits.context_size or served.context)
        if info is None:
            return AdapterLimits(0, context)
        return AdapterLimits(info.device_bytes, context, info.modules.has_bias)

    def _profile(self, digest: str) -> AdapterProfile | None:
        catalog = self._fleet.catalog
        card = catalog.by_digest(digest)
        return None if card is None else catalog.profile(card)


@dataclass(slots=True)
class RequestRun:
    request: InferenceRequest
    plan: RoutePlan
    served: ServedSpecialist
    # time.monotonic() when the plan was ready, and the seconds it took
    routed_at: float
    router_s: float
    # the settings that it reads until its end
    snapshot: ServingSnapshot
    # the format of the answer: the caller's, or that of the adapter if it is the only one
    response_format: ResponseFormat | None = None
    # seconds that checking the format took
    grammar_s: float = 0.0
    # token limit of a choice; known when the prompt has been tokenised
    max_tokens: int | None = None
    # the tokens of the prompt
    prompt_ids: tuple[int, ...] = ()
    # "rerouted" if its first choice had no room; otherwise admission says
    admission: str = ""
    # the replica that runs it; known when it was admitted
    replica: str = ""
    # a place was free there: its deadline ends an answer, which may be empty, not a wait
    has_place: bool = False
    # of the specialist that was chosen first: closed, shadow_only, ejected or draining
    breaker: str = CLOSED
    # why `plan.shadow` answers too: unsure, fresh or sample
    shadow_why: str = ""
    # the router's plan, if someone else answers in its place
    routed: RoutePlan | None = None
    # whether its answer was valid; None = not judged
    outcome: bool | None = None
    # what its answer says about who wrote it; None if it did not end
    judged: JudgedAnswer | None = None
    # adapters that the router chose were left out, because they do not fit into memory
    was_reduced: bool = False
    # a version under test answers in place of the current one
    is_canary: bool = False
    # text of the first choice, in pieces; only if it may be validated
    texts: list[str] = field(default_factory=list)
    # a stop string or token of its caller ended the first choice
    was_stopped: bool = False

    def read(self, delta: Delta) -> None:
        """Keep what is needed to validate the answer."""
        if delta.choice == 0:
            self.texts.append(delta.text)
            self.was_stopped = delta.stop_match is not None

    @property
    def task_type(self) -> str:
        return "" if self.plan.trace is None else self.plan.trace.task_type

    @property
    def may_be_validated(self) -> bool:
        """Whether a validator may exist for the answer."""
        plan = self.plan
        known = self.response_format is not None or plan.trace is not None
        return known or bool(plan.adapters) or bool(self.checks)

    @property
    def shows_specialist(self) -> bool:
        """Whether the answer says something about its specialist: with the adapters that it always
        runs with, or those that the router chose freely; not those that the caller put together,
        and no version under test."""
        if self.is_canary:
            return False
        fixed = self.snapshot.fixed_digests(self.plan.specialist)
        if fixed and fixed.issuperset(item.digest for item in self.plan.adapters):
            return True
        hints = self.request.hints
        if hints.exclude or hints.max_adapters is not None:
            return False
        return not (self.plan.adapters and hints.names_answerer)

    @property
    def num_choices(self) -> int:
        return self.plan.sampling.n or 1

    @property
    def tenant(self) -> TenantSettings | None:
        """The settings of its tenant, if it has any."""
        return self.snapshot.config.tenant(self.request.tenant)

    @property
    def checks(self) -> tuple[str, ...]:
        """The validators that the specialist's settings name."""
        settings = self.snapshot.config.specialists.get(self.plan.specialist)
        return () if settings is None else settings.checks


def remote_sampling(request: InferenceRequest, plan: RoutePlan) -> Sampling:
    """What a server elsewhere is told: the caller's values and the tuned ones that every server
    knows. What nobody set is left to its defaults, and no seed is drawn here."""
    given, resolved = request.sampling, plan.sampling
    if plan.trace is not None:
        given = replace(
            given,
            temperature=resolved.temperature,
            top_p=resolved.top_p if given.top_p is None and resolved.top_p != 1.0 else given.top_p,
        )
    return replace(given, n=resolved.n, num_beams=resolved.num_beams)


def _reasons(first: RoutePlan, plan: RoutePlan) -> tuple[str, ...]:
    """Those of the router's decision `first`, and what is new in `plan`, which names in place of
    the caller who answers."""
    return (*first.reasons, *(r for r in plan.reasons if r not in (NAMED, *first.reasons)))


def _routed_trace(routed: RoutePlan, steered: RoutePlan) -> RouteTrace | None:
    """How the router decided, with what was tuned for the one who answers in its place."""
    if routed.trace is None or steered.trace is None:
        return routed.trace or steered.trace
    trace = routed.trace
    return replace(steered.trace, classified=trace.classified, router_version=trace.router_version)


def with_lowered_priority(plan: RoutePlan, requested: int, allowed: int) -> RoutePlan:
    """`plan` with a reason that names the lower priority it runs at."""
    reason = f"priority {requested} lowered to {allowed}: this key has no right to more"
    return replace(plan, lowered_priority=allowed, reasons=(*plan.reasons, reason))


# positions that must remain after the soft tokens: one of the prompt, one of the answer
MIN_TOKENS = 2


@quick_init
@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits for the adapters of one request."""

    nbytes: int
    # positions of the context; soft prompts use some of them
    tokens: int
    # whether the base model's modules have a bias
    has_bias: bool = True


@dataclass(frozen=True, slots=True)
class LeftOutAdapter:
    """An adapter that was left out, and the reason."""

    adapter: AdapterChoice
    why: str


def left_out(
    plan: RoutePlan,
    room: AdapterLimits,
    profile: Callable[[str], AdapterProfile | None],
    fixed: Collection[str] = (),
) -> list[LeftOutAdapter]:
    """The adapters of the plan that do not fit. Those with digests in `fixed` get room first, then
    those with better scores.

    An adapter that requires others is kept together with them, or not at all.
    """
    known = {
        item.digest: item_profile
        for item in plan.adapters
        if (item_profile := profile(item.digest))
    }
    if not all(is_exact(item.weight) for item in plan.adapters):
        known = {
            digest: replace(item_profile, narrow_bytes=0) for digest, item_profile in known.items()
        }
    if _fits(known.values(), room):
        return []
    scores = {} if plan.trace is None else {c.digest: c.score for c in plan.trace.candidates}
    kept: dict[str, AdapterProfile] = {}
    why: dict[str, str] = {}
    for digest in sorted(known, key=lambda digest: (digest not in fixed, -scores.get(digest, 0.0))):
        needed = _with_required(digest, known)
        if _fits((kept | needed).values(), room):
            kept |= needed
        else:
            why[digest] = _why(known[digest], needed, kept, room)
    return [
        LeftOutAdapter(item, why[item.digest])
        for item in plan.adapters
        if item.digest in known and item.digest not in kept
    ]


def request_without(
    request: InferenceRequest, plan: RoutePlan, left: Sequence[LeftOutAdapter]
) -> InferenceRequest:
    """The request for a plan without the adapters that were left out."""
    hints = request.hints
    dropped = {item.adapter.digest for item in left}
    if plan.trace is not None and plan.trace.candidates:
        names = tuple(item.adapter.name.partition("@")[0] for item in left)
        return replace(request, hints=replace(hints, exclude=hints.exclude + names))
    # the router adds those that the specialist always runs with again
    kept = tuple(
        AdapterHint(item.name, item.weight) for item in plan.adapters if item.digest not in dropped
    )
    return replace(request, hints=replace(hints, model=plan.specialist, adapters=kept))


def base_alone(request: InferenceRequest, plan: RoutePlan) -> InferenceRequest:
    hints = replace(request.hints, model=plan.specialist, adapters=())
    return replace(request, hints=hints)


def with_left_out(plan: RoutePlan, left: Sequence[LeftOutAdapter]) -> RoutePlan:
    """`plan` with the adapters that were left out, and the reasons."""
    trace = plan.trace
    if trace is None or not left:
        return plan
    why = {item.adapter.digest: item.why for item in left}
    dropped = tuple(f"dropped {item.adapter.name}: {item.why}" for item in left)

    def with_reason(candidate: Candidate) -> Candidate:
        reason = why.get(candidate.digest)
        if reason is None:
            return candidate
        return replace(candidate, chosen=False, why=f"does not fit: {reason}")

    candidates = tuple(with_reason(candidate) for candidate in trace.candidates)
    return replace(
        plan,
        reasons=plan.reasons + dropped,
        trace=replace(trace, candidates=candidates, degraded=trace.degraded + dropped),
    )


def _fits(profiles: Iterable[AdapterProfile], room: AdapterLimits) -> bool:
    stack = list(profiles)
    nbytes = _nbytes(stack, room)
    tokens = sum(profile.card.num_virtual_tokens for profile in stack)
    return nbytes <= room.nbytes and (not tokens or tokens + MIN_TOKENS <= room.tokens)


def _nbytes(stack: Sequence[AdapterProfile], room: AdapterLimits) -> int:
    """Bytes of the stack as the pool composes it: one part in fp32 makes the others fp32 too."""
    if all(profile.narrow_bytes for profile in stack):
        return sum(profile.narrow_bytes for profile in stack)
    shifts = sum(profile.shift_bytes for profile in stack) if room.has_bias else 0
    return shifts + sum(profile.device_bytes or profile.card.nbytes for profile in stack)


def _with_required(digest: str, known: dict[str, AdapterProfile]) -> dict[str, AdapterProfile]:
    """`digest` and all other adapters of the stack that it requires."""
    by_name = {profile.card.name: key for key, profile in known.items()}
    required: dict[str, AdapterProfile] = {}
    pending = [digest]
    while pending:
        key = pending.pop()
        if key in required:
            continue
        required[key] = known[key]
        names = (name.partition("@")[0] for name in known[key].requires)
        pending += [by_name[name] for name in names if name in by_name]
    return required


def _why(
    profile: AdapterProfile,
    needed: Mapping[str, AdapterProfile],
    kept: Mapping[str, AdapterProfile],
    room: AdapterLimits,
) -> str:
    """`needed`: the adapter and those that it requires. The sizes are those of the stack as it
    would be composed: one part may make all others wider."""
    tokens = profile.card.num_virtual_tokens
    if tokens and tokens + MIN_TOKENS > room.tokens:
        return f"its {tokens} soft tokens leave no place in {room.tokens}"
    alone = _nbytes(list(needed.values()), room)
    if alone > room.nbytes:
        those = "its" if len(needed) == 1 else "with what it requires, its"
        return f"{those} {_megabytes(alone, room.nbytes)}"
    stack = list({**kept, **needed}.values())
    together = _nbytes(stack, room)
    if together > room.nbytes:
        before = _nbytes(list(kept.values()), room) / 1e6
        size = _megabytes(together, room.nbytes)
        return f"with it the stack's {size} ({before:.1f} MB without it)"
    soft = sum(item.card.num_virtual_tokens for item in stack)
    return f"with the others {soft} soft tokens leave no place in {room.tokens}"


def _megabytes(nbytes: int, limit: int) -> str:
    """With as many decimals as it takes to tell them apart."""
    for digits in range(1, 7):
        size, most = f"{nbytes / 1e6:.{digits}f}", f"{limit / 1e6:.{digits}f}"
        if size != most:
            break
    return f"{size} MB do not fit in {most} MB"
