"""Makes decisions of the past again, from what was stored of them: the router's, then steering.

With the same settings and the same trained router each is the same, bit for bit. With others, the
differences say what they would change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.errors import CoterieError
from coterie.core.plan import AdapterChoice, ClassifierInput, RoutePlan
from coterie.core.receipt import CLOSED
from coterie.core.request import (
    AdapterHint,
    Chat,
    InferenceRequest,
    Limits,
    RouteHints,
    Sampling,
    Text,
)
from coterie.routing.classify.trained import TrainedRouter
from coterie.routing.decide import ScoredAdapter
from coterie.routing.protocols import AdapterCatalog, Matcher
from coterie.routing.resolve import FixedAdapter, Specialist
from coterie.routing.resolve import read as read_names
from coterie.routing.router import Router, StoredRouting
from coterie.service.breaker.spike import IntentThresholds, SpikeController
from coterie.service.breaker.steering import IntentRules, PlanSteering, SteerRequest
from coterie.service.breaker.watch import SpecialistWatch, WatchedSpecialist
from coterie.service.canary import CanarySet
from coterie.service.receipts.context import DecisionContext, StoredSpecialist
from coterie.service.receipts.decisions import (
    DecisionRecord,
    SpecialistReading,
    SteeringInputs,
    StoredCandidate,
    StoredRoute,
    StoredSteering,
    stored_route,
    stored_steering,
)

_SOME_TOOL: tuple[dict[str, Any], ...] = ({"name": "tool"},)
# outcomes of a replay
SAME, CHANGED, LOST = "same", "changed", "lost"


class LostInput(CoterieError):
    """Something that a decision was made from is not there any more."""

    code = "lost_input"


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    record: DecisionRecord
    # SAME = all is equal, bit for bit
    outcome: str
    # who answered and who would, `specialist[+adapters]`; "refused: ..." if nobody would
    before: str
    after: str
    # what differs, or what is lost
    why: str = ""


@dataclass(slots=True)
class ReplaySummary:
    total: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    # somebody else would answer; the other changes are in shadows, figures or reasons alone
    other_answer: int = 0
    # (who answered, who would) -> how often
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)
    # what is lost -> how many decisions
    losses: Counter[str] = field(default_factory=Counter)

    def lose(self, why: str, count: int) -> None:
        """Count decisions that cannot be read."""
        self.total += count
        self.outcomes[LOST] += count
        self.losses.update({why: count} if count else {})

    def add(self, decision: ReplayedDecision) -> None:
        self.total += 1
        self.outcomes[decision.outcome] += 1
        if decision.outcome == LOST:
            self.losses[decision.why] += 1
        elif decision.before != decision.after:
            self.other_answer += 1
            self.moves[decision.before, decision.after] += 1


class _RecordedCatalog:
    """The installed adapters, with names that mean what they meant when a decision was made."""

    def __init__(self, catalog: AdapterCatalog) -> None:
        self._catalog = catalog
        # of the decision that is being made again
        self.meanings: Mapping[str, AdapterCard] = {}

    def find(self, name: str, version: str) -> AdapterCard | None:
        card = self.meanings.get(name)
        if card is None or not version:
            return card or self._catalog.find(name, version)
        return self._catalog.find(card.name, version)

    def names(self) -> Iterable[str]:
        return {*self._catalog.names(), *self.meanings}

    def profile(self, card: AdapterCard) -> AdapterProfile:
        return self._catalog.profile(card)

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        then = {card.name: self.profile(card) for card in self.meanings.values()}
        return {**self._catalog.current_profiles(), **then}

    def matcher(self) -> Matcher | None:
        return self._catalog.matcher()

    def usual_quality(self) -> float:
        return self._catalog.usual_quality()


class DecisionReplay:
    """`contexts`: settings by their digest. `routers`: gives a trained router by its version.
    `other`: makes other settings of those that a decision was made with. `version`: in place of the
    version that it was made with."""

    def __init__(
        self,
        contexts: Mapping[str, DecisionContext],
        catalog: AdapterCatalog,
        routers: Callable[[str], TrainedRouter | None],
        other: Callable[[DecisionContext], DecisionContext] | None = None,
        version: str | None = None,
    ) -> None:
        self._catalog, self._routers, self._version = _RecordedCatalog(catalog), routers, version
        self._contexts = (
            contexts if other is None else {key: other(item) for key, item in contexts.items()}
        )
        # by settings and version
        self._made: dict[tuple[str, str], Router] = {}

    def run(
        self, records: Iterable[DecisionRecord]
    ) -> tuple[ReplaySummary, list[ReplayedDecision]]:
        """The summary, and the decisions that are not the same."""
        summary, different = ReplaySummary(), list[ReplayedDecision]()
        for record in records:
            decision = self.compared(record)
            summary.add(decision)
            if decision.outcome != SAME:
                different.append(decision)
        return summary, different

    def compared(self, record: DecisionRecord) -> ReplayedDecision:
        before = _answer(record.routed, record.steered, record.steering)
        try:
            routed, steered = self.again(record)
        except LostInput as error:
            return ReplayedDecision(record, LOST, before, "", error.message)
        except CoterieError as error:
            after = f"refused: {error.code}"
            return ReplayedDecision(record, CHANGED, before, after, error.message)
        after = _answer(routed, steered, record.steering)
        if (routed, steered) == (record.routed, record.steered):
            return ReplayedDecision(record, SAME, before, after)
        return ReplayedDecision(
            record, CHANGED, before, after, _difference(record, routed, steered)
        )

    def again(self, record: DecisionRecord) -> tuple[StoredRoute, StoredSteering | None]:
        """The decision, made again. Raises LostInput, or the error that it is refused with."""
        context = self._contexts.get(record.config)
        if context is None:
            raise LostInput(f"the settings {record.config or '(none)'} are not kept")
        if not context.specialists:
            raise LostInput(f"the settings {record.config} have none of these specialists")
        version = record.router if self._version is None else self._version
        self._catalog.meanings = {}
        self._catalog.meanings = self._meanings(record, context)
        plan = self._route(record, self._router(context, record.config, version))
        routed = stored_route(plan)
        if record.steering is None:
            return routed, None
        return routed, _steered(record, record.steering, plan, context)

    def _router(self, context: DecisionContext, digest: str, version: str) -> Router:
        made = self._made.get((digest, version))
        if made is None:
            trained = self._routers(version) if version else None
            if version and trained is None:
                raise LostInput(f"the router {version} is not kept")
            specialists = [self._specialist(item) for item in context.specialists]
            made = Router(specialists, self._catalog, context.routing, trained=trained)
            self._made[digest, version] = made
        return made

    def _specialist(self, stored: StoredSpecialist) -> Specialist:
        fixed = tuple(
            FixedAdapter(choice, self._profile(choice.digest, choice.name))
            for choice in stored.fixed
        )
        return Specialist(
            stored.name,
            fingerprint=stored.fingerprint,
            adapter_bytes=stored.adapter_bytes,
            fixed=fixed,
            intents=stored.intents,
        )

    def _meanings(
        self, record: DecisionRecord, context: DecisionContext
    ) -> Mapping[str, AdapterCard]:
        """What the names meant that the decision depends on, by the digests in the record."""
        found = {
            name.partition("@")[0]: self._profile(digest, name).card
            for name, digest in (
                *((item.name, item.digest) for item in record.candidates),
                *((name, digest) for name, digest, _ in record.routed.adapters),
            )
        }
        if record.asked.by_content:
            return found
        fixed = {
            choice.digest
            for item in context.specialists
            if item.name == record.routed.specialist
            for choice in item.fixed
        }
        # an alias: the adapters in the order of the request, and behind them what these require
        order = [
            found[name.partition("@")[0]]
            for name, digest, _ in record.routed.adapters
            if digest not in fixed
        ]
        asked = record.asked
        hints = RouteHints(asked.model or None, tuple(AdapterHint(*item) for item in asked.experts))
        names = [
            item.name.partition("@")[0] for item in read_names(hints, _names(context)).adapters
        ]
        rest = iter([card for card in order if card.name not in names])
        for name in names:
            if name not in found and (card := next(rest, None)) is not None:
                found[name] = card
        return found

    def _profile(self, digest: str, name: str) -> AdapterProfile:
        bare, _, version = name.partition("@")
        # two packages may hold the same bytes
        card = self._catalog.find(bare, version)
        if card is None or card.digest != digest:
            raise LostInput(f"the expert {name} ({digest[:8]}) is not installed")
        return self._catalog.profile(card)

    def _route(self, record: DecisionRecord, router: Router) -> RoutePlan:
        asked = record.asked
        hints = RouteHints(
            asked.model or None,
            tuple(AdapterHint(*item) for item in asked.experts),
            asked.exclude,
            asked.max_experts,
            allowed=asked.allowed,
            allowed_experts=asked.allowed_experts,
            intent=asked.intent,
        )
        if not asked.by_content:
            # neither a text nor a chat with tools is routed by its content
            prompt = Chat((), tools=_SOME_TOOL) if asked.has_tools else Text("")
            request = InferenceRequest(
                record.request_id, prompt, Sampling(), Limits(), hints, None, None, "", 0.0
            )
            return router.plan(request)
        if self._version is not None and record.classified is None:
            raise LostInput("no input of a trained router was stored")
        stored = StoredRouting(
            None if record.classified is None else ClassifierInput(*record.classified),
            None if not record.threshold else [self._scored(item) for item in record.candidates],
            record.threshold,
        )
        return router.plan_again(record.request_id, hints, stored)

    def _scored(self, item: StoredCandidate) -> ScoredAdapter:
        # the score follows from the other figures and the settings
        return ScoredAdapter(
            self._profile(item.digest, item.name),
            item.similarity,
            item.success,
            item.memory,
            0.0,
            item.probability,
            item.excluded,
            item.part,
        )


def _steered(
    record: DecisionRecord, inputs: SteeringInputs, plan: RoutePlan, context: DecisionContext
) -> StoredSteering:
    taken_by = {inputs.owner, inputs.canary} - {"", *_names(context)}
    if taken_by:
        raise LostInput(f"the settings have no specialist {min(taken_by)}, which was a canary")
    readings = {item.name: item for item in inputs.readings}
    watches = {
        item.name: _StoredWatch(item.watched, readings.get(item.name))
        for item in context.specialists
    }
    judged = dict(
        zip((digest for _, digest, _ in record.routed.adapters), inputs.judged, strict=True)
    )
    steering = PlanSteering(
        cast(Mapping[str, SpecialistWatch], watches),
        context.specialists[0].name,
        context.ensemble,
        cast(CanarySet, _StoredCanaries(inputs)),
        lambda digest: (0, judged.get(digest, 0)),
    )
    asked = record.asked
    request = SteerRequest(
        record.request_id,
        asked.priority,
        is_named=asked.is_named,
        is_pinned=asked.is_pinned,
        allowed=frozenset(asked.allowed) or None,
    )
    return stored_steering(steering.steer(plan, request, _rules(plan.intent, inputs, context), 0.0))


def _names(context: DecisionContext) -> frozenset[str]:
    return frozenset(item.name for item in context.specialists)


def _rules(intent: str, inputs: SteeringInputs, context: DecisionContext) -> IntentRules:
    settings = next((item for item in context.intents if item.name == intent), None)
    if settings is None:
        return IntentRules(IntentThresholds(0.0, 0.0))
    values = IntentThresholds(settings.shadow_below, settings.spill_below)
    if inputs.override is not None:
        values = IntentThresholds(*inputs.override)
    return IntentRules(values, settings.high_stakes)


class _StoredWatch:
    """The part of `SpecialistWatch` that steering reads. A specialist whose state was not read has
    nothing against it, and is not known."""

    def __init__(self, settings: WatchedSpecialist, reading: SpecialistReading | None) -> None:
        self.settings, self.name = settings, settings.name
        self.reading = reading or SpecialistReading(
            settings.name, CLOSED, 0, 0.0, False, False, False, False
        )
        self.spike = SpikeController(0.0)
        self.spike.level, self.spike.load = self.reading.spike_level, self.reading.load
        self.is_full, self.is_demoted = self.reading.is_full, self.reading.is_demoted
        self.is_down = self.reading.is_down
        self.replicas = self

    def state(self, now: float) -> str:
        return self.reading.state

    def is_known(self, now: float) -> bool:
        return self.reading.is_known

    def all_ejected(self, now: float) -> bool:
        return self.reading.all_ejected

    def back_in_s(self, now: float) -> float:
        return 0.0


class _StoredCanaries:
    """The part of `CanarySet` that steering reads."""

    def __init__(self, inputs: SteeringInputs) -> None:
        self._inputs = inputs

    def owner(self, intent: str) -> str:
        return self._inputs.owner

    def specialist(self, intent: str, current: str, request_id: str) -> str:
        return self._inputs.canary

    def adapters(
        self, adapters: Sequence[AdapterChoice], request_id: str
    ) -> tuple[tuple[AdapterChoice, ...] | None, str]:
        changed = self._inputs.canary_adapters
        if changed is None:
            return None, ""
        return tuple(AdapterChoice(*item) for item in changed), self._inputs.canary_label


def _answer(
    routed: StoredRoute, steered: StoredSteering | None, inputs: SteeringInputs | None
) -> str:
    """Who answers: the specialist and its adapters."""
    if steered is not None and steered.specialist != routed.specialist:
        return steered.specialist
    adapters = routed.adapters
    if steered is not None and steered.canary and inputs is not None and inputs.canary_adapters:
        adapters = inputs.canary_adapters
    return "+".join((routed.specialist, *(name for name, _, _ in adapters)))


def _difference(record: DecisionRecord, routed: StoredRoute, steered: StoredSteering | None) -> str:
    """The fields that differ, with their values where they are short."""
    found = []
    for old, new in ((record.routed, routed), (record.steered, steered)):
        if old is None or new is None:
            continue
        for name in cast(Any, old).__struct_fields__:
            before, after = getattr(old, name), getattr(new, name)
            if before != after:
                short = isinstance(before, str | float | bool)
                found.append(f"{name} {before} -> {after}" if short else name)
    return ", ".join(found)
