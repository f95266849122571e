"""Decisions as values: who answers, whether it is permitted, and what a replica is asked to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from coterie.core.request import Limits, Prompt, ResponseFormat, Sampling


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """One adapter of a stack, known by the digest of its bytes."""

    name: str
    digest: str
    weight: float = 1.0


def stack_key(adapters: Sequence[AdapterChoice]) -> str:
    """Names a stack by what it computes: its digests and weights in order. Empty for none."""
    if not adapters:
        return ""
    hasher = blake2b(digest_size=16, person=b"coterie-stack")
    for adapter in adapters:
        data = f"{adapter.digest} {float(adapter.weight).hex()}".encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class TunedFields:
    """What the router put in place of the caller's own; None = the request's stands."""

    prompt: Prompt | None = None
    # shortened to the room that is left, where a caller's own would be refused
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    # what the chosen adapter says that its answers match; they are judged by it, not held to it
    answer_pattern: str = ""


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The router's decision. `sampling` is resolved: see `Sampling`."""

    request_id: str
    specialist: str
    adapters: tuple[AdapterChoice, ...]
    sampling: Sampling
    confidence: float
    reasons: tuple[str, ...]
    tuned: TunedFields = TunedFields()
    # how it was decided; None where the caller's names alone decided
    trace: RouteTrace | None = None
    # what it runs at where the caller's key has no right to the priority asked for
    lowered_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one replica is asked to run: tokens, not text.

    `emitted` holds, per choice, the token ids the client already has: a replica that takes over
    after a crash continues behind them. Choices in `finished` are complete and are not run again.
    """

    request_id: str
    lane: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    adapters: tuple[AdapterChoice, ...]
    session: str
    tenant: str
    # time.monotonic() of this machine; None = no deadline
    deadline: float | None
    arrived_at: float
    emitted: tuple[tuple[int, ...], ...] = ()
    finished: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    replica: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """`code` is one of `core.errors`; `retry_after_s` is None when a retry cannot help."""

    code: str
    reason: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class LaneState:
    """How a lane stands, published by its worker after each step."""

    lane: str
    queued: int
    max_queue: int
    free_tokens: int
    total_tokens: int
    resident_adapters: tuple[str, ...]
    prefix_digests: tuple[str, ...]
    predicted_first_token_s: float
    preempting: bool
    # what a step took lately; 0 = none was made
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One adapter that was looked at, and what became of it."""

    # name@version
    name: str
    digest: str
    # each 0 to 1: of the prompt with the adapter, its rate of valid answers, room left in memory
    similarity: float
    success: float
    memory: float
    # weighted sum, and the calibrated chance that this adapter is the right one
    score: float
    probability: float
    chosen: bool
    # "chosen", "below threshold", "incompatible with x", "excluded", "does not fit" ...
    why: str


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """One decision, told. Times are milliseconds, by stage."""

    task_type: str
    # ISO 639-1, or "und"
    language: str
    # named features that are not texts of the caller: has_json, has_code, code_language, length ...
    features: Mapping[str, str | float | bool] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    threshold: float = 0.0
    # what could not be done as wished: "dropped x: ..." ; told to the caller
    degraded: tuple[str, ...] = ()
    timings_ms: Mapping[str, float] = field(default_factory=dict)
