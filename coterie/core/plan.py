"""Decisions as values: who answers, whether it is permitted, and what a replica has to run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from coterie.core.quick_init import quick_init
from coterie.core.request import Chat, Limits, Prompt, ResponseFormat, Sampling, Text


@quick_init
@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """One adapter of a stack, identified by the digest of its bytes."""

    name: str
    digest: str
    weight: float = 1.0


def stack_key(adapters: Sequence[AdapterChoice]) -> str:
    """Names a stack by what it computes: its digests and weights in order. Empty for an empty
    stack."""
    if not adapters:
        return ""
    hasher = blake2b(digest_size=16, person=b"coterie-stack")
    for adapter in adapters:
        data = f"{adapter.digest} {float(adapter.weight).hex()}".encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()


@quick_init
@dataclass(frozen=True, slots=True)
class TunedFields:
    """Values that the router sets in place of the caller's; None = the request's value stays."""

    prompt: Prompt | None = None
    # shortened to the space that is left, where an explicit value of a caller would be refused
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    # the pattern that the chosen adapter states for its answers; only validated, not enforced
    answer_pattern: str = ""
    # sampling values of the task type and of the chosen adapter
    sampling: Mapping[str, float] = field(default_factory=dict)


@quick_init
@dataclass(frozen=True, slots=True)
class AlternateSpecialist:
    """Another specialist that could answer. `viable`: likely enough to answer in place of the
    first choice."""

    specialist: str
    probability: float
    viable: bool


@quick_init
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
    # how it was decided; None if the caller named everything
    trace: RouteTrace | None = None
    # the priority it runs at if the caller's key does not allow the requested one
    lowered_priority: int | None = None
    # declared by the caller, or found by a rule or by the classifier; "" = not known
    intent: str = ""
    # most likely first; empty if the caller named a specialist
    alternates: tuple[AlternateSpecialist, ...] = ()
    # a specialist whose answer is only judged; "" = none
    shadow: str = ""


@quick_init
@dataclass(frozen=True, slots=True)
class Assignment:
    """What one replica has to run: tokens, not text.

    `emitted` holds, per choice, the token ids that the client already has: a replica that takes
    over after a crash continues after them. Choices in `finished` are complete and are not run
    again.
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

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def prompt_key(self) -> Hashable:
        """Equal for equal prompts."""
        return self.prompt_ids


NO_PROMPT = Text("")


class RemoteCallTrace(Protocol):
    """Notes the calls of another server in the trace of a request, one after the other."""

    def call_began(self, host: str, port: int, model: str) -> Mapping[str, str]:
        """The headers that the other server gets."""

    def call_ended(self, error: str) -> None:
        """`error`: empty if the whole answer came."""


@dataclass(frozen=True, slots=True)
class RemoteAssignment(Assignment):
    """What a remote server has to run: the prompt as the caller wrote it. Its tokens are not known
    here, so `prompt_ids` is empty."""

    prompt: Prompt = NO_PROMPT
    estimated_tokens: int = 0
    # False = max_tokens is an estimate, and the server decides
    is_limited: bool = True
    # None = the request is not traced
    trace: RemoteCallTrace | None = field(default=None, compare=False, repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        return self.estimated_tokens

    @property
    def prompt_key(self) -> Hashable:
        prompt = self.prompt
        if isinstance(prompt, Chat):
            return tuple((message.role, message.content) for message in prompt.messages)
        return prompt


@quick_init
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
    """The state of a lane, published by its worker after each step."""

    lane: str
    queued: int
    max_queue: int
    free_tokens: int
    total_tokens: int
    resident_adapters: tuple[str, ...]
    # short digests of cached prompt beginnings, see core.prefix; None = as in the report before
    prefix_digests: frozenset[bytes] | None
    predicted_first_token_s: float
    preempting: bool
    # duration of recent steps; 0 = no step yet
    step_s: float = 0.0
    # tokens of a KV block, for `prefix_digests`; 0 = nothing is cached here
    block_size: int = 0
    # of `free_tokens`, those in cached blocks that nobody uses
    cached_tokens: int = 0


@quick_init
@dataclass(frozen=True, slots=True)
class Candidate:
    """One adapter that was considered, and the result."""

    # name@version
    name: str
    digest: str
    # each 0 to 1: similarity of prompt and adapter, rate of valid answers, free memory
    similarity: float
    success: float
    memory: float
    # weighted sum, and the calibrated chance that this adapter is the right one
    score: float
    probability: float
    chosen: bool
    # "chosen", "below threshold", "incompatible with x", "excluded", "does not fit" ...
    why: str
    # probability for a part of the prompt, if another adapter is for another part; 0 = no such part
    part: float = 0.0


@quick_init
@dataclass(frozen=True, slots=True)
class ClassifierInput:
    """What the choice of a specialist depends on, apart from settings and the trained router.
    Holds no text of the caller: numbers, and hashes of words. Made and read in
    `routing/classify/`."""

    # the intent that the caller declared; "" = none
    declared: str
    # structures found in the text: "diff", "log" ...; the most specific first
    structures: tuple[str, ...]
    # how `meaning`, `form` and `words` were made
    features: str
    # int16 [dim], uint8 [form], uint16 [words]; little-endian
    meaning: bytes = b""
    form: bytes = b""
    words: bytes = b""


@quick_init
@dataclass(frozen=True, slots=True)
class RouteTrace:
    """How one decision was made. Times are milliseconds, by stage."""

    task_type: str
    # ISO 639-1, or "und"
    language: str
    # named features that hold no text of the caller: has_json, has_code, code_language, length ...
    features: Mapping[str, str | float | bool] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    threshold: float = 0.0
    # what could not be done as requested: "dropped x: ..."; reported to the caller
    degraded: tuple[str, ...] = ()
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    # input of the choice of a specialist, and the version of the trained router that made it;
    # None and "" if the choice was not made by content. The input is not shown to callers
    classified: ClassifierInput | None = None
    router_version: str = ""

    @property
    def has_several_tasks(self) -> bool:
        """Whether adapters were chosen that are each for a part of the prompt."""
        return sum(item.chosen and item.part > 0 for item in self.candidates) > 1
