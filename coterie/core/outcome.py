"""What came of a request beside its text: whether the answer is valid, and every figure of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Of one answer. `validator` names who looked: json, json_schema, python, a command's name ...

    An answer that nobody can judge has no result, which is not a valid one.
    """

    valid: bool
    validator: str
    error: str | None = None
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class InferenceMetrics:
    """Everything measured about one request. Times in milliseconds; `submitted_at` and the like are
    seconds since 1970, so that the stages of several requests can be laid side by side."""

    job_id: str
    submitted_at: float
    router_latency_ms: float
    expert_load_latency_ms: float
    inference_latency_ms: float
    total_latency_ms: float
    # name@version, in order of composition
    experts_used: tuple[str, ...]
    num_experts: int
    # KV blocks of this request at its longest, and its adapters; not shared weights. 0 where it
    # ended without its engine's last word
    vram_peak_mb: float
    input_tokens: int
    output_tokens: int
    tokens_per_second: float
    success: bool
    error: str | None
    # None = nobody judged it
    validation_passed: bool | None
    finish_reason: str = ""
    task_type: str = ""
    specialist: str = ""
    cached_tokens: int = 0
    queue_ms: float = 0.0
    first_token_ms: float = 0.0
    routed_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    # as the caller named its own user
    user_id: str = ""
    # what its noise was drawn from; the same request with it gets the same answer
    seed: int = 0


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """What /v1/infer answers, by whatever road: whole, at a stream's end, or as a job's result."""

    job_id: str
    text: str
    tokens_generated: int
    # names without versions, in order of composition
    experts_used: tuple[str, ...]
    latency_ms: float
    # stop, length, timeout or abort
    finish_reason: str
    model: str
    task_type: str
    confidence: float
    # what could not be done as wished
    degraded: tuple[str, ...] = ()
    # the caller's own, or the one that was drawn: with it the same request is answered the same
    seed: int = 0
    validation: ValidationResult | None = None
    metrics: InferenceMetrics | None = None
    # where the time went: `timings`, and of a mixture `experts`; as `coterie` on the vendors' APIs
    telemetry: Mapping[str, Any] | None = None
    # ExpertPlan, when it was asked for
    plan: Mapping[str, Any] | None = None
