"""What is sent and what is answered.

Written by scripts/generate_sdk.py from docs/api/openapi.json; do not edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict


@dataclass(frozen=True)
class AdapterChoice:
    """One adapter of a stack, identified by the digest of its bytes."""

    name: str
    digest: str
    weight: float


@dataclass(frozen=True)
class Candidate:
    """One adapter that was considered, and the result."""

    name: str
    digest: str
    similarity: float
    success: float
    memory: float
    score: float
    probability: float
    chosen: bool
    why: str
    part: float


@dataclass(frozen=True)
class ChangedExpert:
    id: str
    object: Literal["expert"]
    name: str
    version: str
    digest: str
    kind: str
    bases: list[str]
    num_virtual_tokens: int
    bytes: int
    installed_at: int
    signer: str | None
    pinned: bool
    description: str
    current: bool
    canary: dict[str, Any] | None = None


@dataclass(frozen=True)
class DeletedExpert:
    id: str
    object: Literal["expert"]
    deleted: bool


@dataclass(frozen=True)
class DeletedJob:
    """`deleted` is false for a job that was cancelled: it can still be read."""

    job_id: str
    status: Literal["queued", "processing", "succeeded", "failed", "cancelled"]
    submitted_at: str
    started_at: str | None
    finished_at: str | None
    user_id: str | None
    text: str
    result: InferenceResult | None
    error: JobFault | None
    deleted: bool


@dataclass(frozen=True)
class Expert:
    """One installed version of an expert."""

    id: str
    object: Literal["expert"]
    name: str
    version: str
    digest: str
    kind: str
    bases: list[str]
    num_virtual_tokens: int
    bytes: int
    installed_at: int
    signer: str | None
    pinned: bool
    description: str
    current: bool


@dataclass(frozen=True)
class ExpertList:
    object: Literal["list"]
    data: list[Expert]
    aliases: dict[str, str]


class ExpertPatch(TypedDict, total=False):
    """`version` makes an installed version the current one; `alias` gives it another name too."""

    version: str | None
    alias: str | None


@dataclass(frozen=True)
class ExpertPlan:
    """How a request was routed: the experts in order, the sampling values, and the reasons."""

    experts: list[AdapterChoice]
    composition_order: list[str]
    generation_params: GenerationParams
    prompt_modified: str | None
    confidence: float
    reasons: list[str]
    reasoning_trace: RouteTrace | None


@dataclass(frozen=True)
class FeedbackAnswer:
    """A verdict that was counted."""

    job_id: str
    verdict: Literal["good", "bad"]


class FeedbackBody(TypedDict, total=False):
    """Whether the answer of one of your jobs was good. One verdict per job."""

    job_id: Required[str]
    verdict: Required[Literal["good", "bad"] | bool]
    comment: str | None


@dataclass(frozen=True)
class GenerationParams:
    """The sampling values that the request ran with."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    max_tokens: int | None


class GrammarItem(TypedDict, total=False):
    """A grammar's text and the language it is written in."""

    type: Required[Literal["lark", "gbnf"]]
    text: Required[str]


class InferOptions(TypedDict, total=False):
    """A prompt and optionally a document. The router chooses everything else that is left out."""

    # Text with `{prompt}`, and with `{body}` where the body belongs.
    template: str | None
    # The document or data that the prompt is about.
    body: str | None
    temperature: float | None
    max_tokens: int | None
    top_p: float | None
    # 0 = off.
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    # Exactly these, in this order: `name` or `name@version`.
    force_experts: list[str] | None
    # Never chosen by the router.
    exclude_experts: list[str] | None
    max_experts: int | None
    # With model "auto", a specialist that serves this intent answers.
    intent: str | None
    # Most tokens of prompt plus output.
    context_size: int | None
    # Whose rate limit this counts against.
    user_id: str | None
    # Higher is sooner.
    priority: int
    # The answer is cut there and says so.
    timeout_ms: int | None
    model: str
    seed: int | None
    # More than 1 searches instead of drawing.
    num_beams: int | None
    # Of a beam search: above 0 favours long answers.
    length_penalty: float | None
    stop: str | list[str] | None
    # OpenAI's: `json_object`, or `json_schema` with a schema.
    response_format: dict[str, Any] | None
    # Lark or GBNF; told apart by their first rules where only a text is sent.
    grammar: str | GrammarItem | None
    regex: str | None
    # The conversation this belongs to.
    session_id: str | None
    # Answer with the router's plan too.
    explain: bool


@dataclass(frozen=True)
class InferDelta:
    """Data of a stream's `delta` event: the next piece of the text."""

    text: str


@dataclass(frozen=True)
class InferStarted:
    """Data of a stream's `started` event."""

    job_id: str
    model: str
    experts_used: list[str]
    confidence: float
    task_type: str
    degraded: list[str]
    plan: ExpertPlan | None = None


@dataclass(frozen=True)
class InferenceLog:
    """One page of the log, newest first."""

    object: Literal["list"]
    data: list[InferenceMetrics]
    has_more: bool
    next: str | None


@dataclass(frozen=True)
class InferenceMetrics:
    """All measurements of one request. Times are in milliseconds; `submitted_at` and other times
    of day are seconds since 1970, so that the stages of several requests can be compared."""

    job_id: str
    submitted_at: float
    router_latency_ms: float
    expert_load_latency_ms: float
    inference_latency_ms: float
    total_latency_ms: float
    experts_used: list[str]
    num_experts: int
    vram_peak_mb: float
    input_tokens: int
    output_tokens: int
    tokens_per_second: float
    success: bool
    error: str | None
    validation_passed: bool | None
    finish_reason: str
    task_type: str
    specialist: str
    cached_tokens: int
    queue_ms: float
    first_token_ms: float
    routed_at: float
    first_token_at: float
    finished_at: float
    user_id: str
    seed: int


@dataclass(frozen=True)
class InferenceResult:
    """The answer of /v1/infer: as one body, at the end of a stream, or as the result of a job."""

    job_id: str
    text: str
    tokens_generated: int
    experts_used: list[str]
    latency_ms: float
    finish_reason: str
    model: str
    task_type: str
    confidence: float
    degraded: list[str]
    seed: int
    validation: ValidationResult | None
    metrics: InferenceMetrics | None
    telemetry: dict[str, Any] | None
    plan: ExpertPlan | None = None


class InstallOptions(TypedDict, total=False):
    """A `.expert` file or a PEFT directory on the server's machine."""

    name: str | None
    version: str | None
    base: str | None
    now: bool


@dataclass(frozen=True)
class JobFault:
    """Why a job failed, as a direct request would have received it."""

    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(frozen=True)
class JobList:
    """One page, newest first. Send `next` as `after` to get the following page."""

    object: Literal["list"]
    data: list[JobView]
    has_more: bool
    next: str | None


@dataclass(frozen=True)
class JobSubmission:
    """A request that is answered later."""

    job_id: str
    status: Literal["queued", "processing"]
    submitted_at: str
    estimated_wait_ms: float | None


@dataclass(frozen=True)
class JobView:
    """The status of a job. `text` is the text so far; times are ISO 8601."""

    job_id: str
    status: Literal["queued", "processing", "succeeded", "failed", "cancelled"]
    submitted_at: str
    started_at: str | None
    finished_at: str | None
    user_id: str | None
    text: str
    result: InferenceResult | None
    error: JobFault | None


@dataclass(frozen=True)
class OpenAIError:
    error: dict[str, Any]


class PromoteBody(TypedDict, total=False):
    """How many of the requests a canary gets."""

    # Of the traffic.
    share: float


@dataclass(frozen=True)
class RouteTrace:
    """How one decision was made. Times are milliseconds, by stage."""

    task_type: str
    language: str
    features: dict[str, str | float | bool]
    candidates: list[Candidate]
    threshold: float
    degraded: list[str]
    timings_ms: dict[str, float]
    router_version: str


@dataclass(frozen=True)
class ShownExpert:
    id: str
    object: Literal["expert"]
    name: str
    version: str
    digest: str
    kind: str
    bases: list[str]
    num_virtual_tokens: int
    bytes: int
    installed_at: int
    signer: str | None
    pinned: bool
    description: str
    current: bool
    versions: list[Expert]
    manifest: dict[str, Any] | None


@dataclass(frozen=True)
class ValidationResult:
    """The result for one answer. `validator` is its name: json, json_schema, python, a command
    ... An answer that no validator can check has no result. That does not mean that it is valid."""

    valid: bool
    validator: str
    error: str | None
    duration_ms: float
