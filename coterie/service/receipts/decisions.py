"""What a decision was made from, as it is kept beside the receipt: enough to make it again.

Holds no text of the caller: names, numbers and hashes of words, one or two kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coterie.core.plan import AdapterChoice, AlternateSpecialist, ClassifierInput, RoutePlan
from coterie.core.receipt import CLOSED
from coterie.core.request import AUTO, Chat, InferenceRequest
from coterie.core.settings import RoutingSettings
from coterie.routing.decide import exclusion_in
from coterie.service.breaker.control import EnsembleControl
from coterie.service.breaker.steering import SteeredPlan, SteerRequest
from coterie.service.submit.replicas import ReplicaSet
from coterie.workers.contract import Replica

# a longer record is not kept: the request named hundreds of experts
MAX_BYTES = 16_000
MAX_NAME = 128
# replicas whose states are kept
MAX_LANES = 16


class AskedRoute(msgspec.Struct, frozen=True, array_like=True):
    """What the caller said about who should answer."""

    model: str
    # name and weight
    experts: tuple[tuple[str, float], ...]
    exclude: tuple[str, ...]
    max_experts: int | None
    # specialists that the tenant may use; empty = all
    allowed: tuple[str, ...]
    intent: str
    priority: int
    # whether the content of the prompt decided
    by_content: bool
    has_tools: bool
    # named a specialist or an expert; named a version of an expert
    is_named: bool
    is_pinned: bool
    # experts that the tenant may use; empty = all
    allowed_experts: tuple[str, ...] = ()


class StoredCandidate(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that was considered; the figures are those of `core.plan.Candidate`."""

    name: str
    digest: str
    similarity: float
    success: float
    memory: float
    probability: float
    # why it was left out before the decision; "" = it took part
    excluded: str
    part: float = 0.0


class StoredRoute(msgspec.Struct, frozen=True, array_like=True):
    """The router's decision."""

    specialist: str
    # name, digest and weight
    adapters: tuple[tuple[str, str, float], ...]
    confidence: float
    intent: str
    # specialist, probability, viable
    alternates: tuple[tuple[str, float, bool], ...]
    reasons: tuple[str, ...]


class StoredSteering(msgspec.Struct, frozen=True, array_like=True):
    """The decision after breakers, load, canaries and shadows."""

    specialist: str
    breaker: str
    shadow: str
    shadow_why: str
    canary: str
    reasons: tuple[str, ...]
    # specialist, probability, viable
    alternates: tuple[tuple[str, float, bool], ...]


class SpecialistReading(msgspec.Struct, frozen=True, array_like=True):
    """The state of a specialist when a request was steered."""

    name: str
    # closed, shadow_only, ejected or draining
    state: str
    spike_level: int
    load: float
    is_full: bool
    # enough of its answers were judged; False if nobody asked
    is_known: bool
    is_demoted: bool
    all_ejected: bool
    # none of its replicas can be reached
    is_down: bool = False


class SteeringInputs(msgspec.Struct, frozen=True, array_like=True):
    """What steering read, apart from the settings."""

    readings: tuple[SpecialistReading, ...]
    # set by an operator in place of the settings: shadow_below, spill_below, priority_floor
    override: tuple[float, float, int] | None
    # the specialist that took over the intent, the canary that takes this request
    owner: str
    canary: str
    # the canary's version of the adapters; None = as the router chose
    canary_adapters: tuple[tuple[str, str, float], ...] | None
    canary_label: str
    # by adapter: how many of its answers were judged
    judged: tuple[int, ...]


class LaneReading(msgspec.Struct, frozen=True, array_like=True):
    """The state of a replica when one was chosen."""

    replica: str
    healthy: bool
    waiting: int
    running: int
    free_tokens: int
    preempting: bool


class DecisionRecord(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    # seconds since 1970
    at: float
    # digest of the settings, version of the trained router
    config: str
    router: str
    asked: AskedRoute
    # the fields of a `ClassifierInput`; None = the specialist was not chosen by content
    classified: tuple[str, tuple[str, ...], str, bytes, bytes, bytes] | None
    candidates: tuple[StoredCandidate, ...]
    threshold: float
    routed: StoredRoute
    steering: SteeringInputs | None
    steered: StoredSteering | None
    lanes: tuple[LaneReading, ...] = ()
    replica: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(DecisionRecord)


def encoded(record: DecisionRecord) -> bytes | None:
    """None if it is too long to be kept."""
    data = _encode(record)
    return data if len(data) <= MAX_BYTES else None


def decoded(data: bytes) -> DecisionRecord:
    return _decoder.decode(data)


def asked_route(
    request: InferenceRequest, steer: SteerRequest, settings: RoutingSettings
) -> AskedRoute:
    hints, prompt = request.hints, request.prompt
    has_tools = isinstance(prompt, Chat) and bool(prompt.tools)
    is_routed = settings.enabled and isinstance(prompt, Chat) and not has_tools
    return AskedRoute(
        (hints.model or "")[:MAX_NAME],
        tuple((item.name[:MAX_NAME], item.weight) for item in hints.adapters),
        tuple(name[:MAX_NAME] for name in hints.exclude),
        hints.max_adapters,
        tuple(hints.allowed),
        hints.intent[:MAX_NAME],
        steer.priority,
        is_routed and not hints.adapters and hints.model in (None, "", AUTO),
        has_tools,
        steer.is_named,
        steer.is_pinned,
        hints.allowed_experts,
    )


def stored_route(plan: RoutePlan) -> StoredRoute:
    return StoredRoute(
        plan.specialist,
        stored_adapters(plan.adapters),
        plan.confidence,
        plan.intent,
        stored_alternates(plan.alternates),
        plan.reasons,
    )


def stored_alternates(
    alternates: Iterable[AlternateSpecialist],
) -> tuple[tuple[str, float, bool], ...]:
    return tuple((other.specialist, other.probability, other.viable) for other in alternates)


def stored_adapters(adapters: Iterable[AdapterChoice]) -> tuple[tuple[str, str, float], ...]:
    return tuple((item.name, item.digest, item.weight) for item in adapters)


def stored_steering(steered: SteeredPlan) -> StoredSteering:
    return StoredSteering(
        steered.specialist,
        steered.breaker,
        steered.shadow,
        steered.shadow_why,
        steered.canary,
        steered.reasons,
        stored_alternates(steered.alternates),
    )


def stored_candidates(plan: RoutePlan) -> tuple[StoredCandidate, ...]:
    trace = plan.trace
    return tuple(
        StoredCandidate(
            item.name,
            item.digest,
            item.similarity,
            item.success,
            item.memory,
            item.probability,
            exclusion_in(item.why),
            item.part,
        )
        for item in (() if trace is None else trace.candidates)
    )


def stored_input(
    given: ClassifierInput | None,
) -> tuple[str, tuple[str, ...], str, bytes, bytes, bytes] | None:
    if given is None:
        return None
    found = given.declared, given.structures, given.features
    return *found, given.meaning, given.form, given.words


def steering_inputs(
    control: EnsembleControl, plan: RoutePlan, request_id: str, now: float
) -> SteeringInputs:
    """What steering read for this plan at the time `now`: the states of all specialists that might
    answer."""
    watches, canaries = control.watches, control.canaries
    owner = canaries.owner(plan.intent)
    canary = canaries.specialist(plan.intent, owner or plan.specialist, request_id)
    names = [plan.specialist, owner, canary, *(item.specialist for item in plan.alternates)]
    names.append(control.base)
    states: dict[str, str] = {}
    # fallbacks are added while the list is read
    for name in names:
        watch = watches.get(name)
        if watch is not None and name not in states:
            states[name] = watch.state(now)
            names.append(watch.settings.fallback)
    # what steering does not look at takes time to find out
    all_closed = set(states.values()) <= {CLOSED}
    readings = []
    for name, state in states.items():
        watch = watches[name]
        is_read = watch.settings.is_watched or not all_closed
        readings.append(
            SpecialistReading(
                name,
                state,
                watch.spike.level,
                watch.spike.load,
                watch.is_full,
                is_read and watch.is_known(now),
                watch.is_demoted,
                state != CLOSED and watch.replicas.all_ejected(now),
                watch.is_down,
            )
        )
    changed, label = canaries.adapters(plan.adapters, request_id)
    override = control.override(plan.intent)
    return SteeringInputs(
        tuple(readings),
        None
        if override is None
        else (override.shadow_below, override.spill_below, override.priority_floor),
        owner,
        canary,
        None if changed is None else stored_adapters(changed),
        label,
        tuple(control.judged_answers(item.digest) for item in plan.adapters),
    )


def lane_readings(replicas: ReplicaSet) -> tuple[LaneReading, ...]:
    return tuple(_lane_reading(replicas, replica) for replica in replicas.members[:MAX_LANES])


def _lane_reading(replicas: ReplicaSet, replica: Replica) -> LaneReading:
    state, queue = replicas.state(replica), replicas.queue(replica)
    return LaneReading(
        replica.name,
        replica.healthy(),
        queue.waiting,
        queue.running,
        0 if state is None else state.free_tokens,
        state is not None and state.preempting,
    )
