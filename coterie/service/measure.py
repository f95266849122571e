"""Every figure of one request as `InferenceMetrics`, from its plan and its last event.

Arithmetic over what was measured elsewhere; the only clock it asks is that of the end.
"""

from __future__ import annotations

import time

from coterie.core.events import Finished
from coterie.core.outcome import InferenceMetrics, ValidationResult
from coterie.service.run import Run

# finish reasons of answers that came to an end of their own, or to their limit
WHOLE = ("stop", "length")


def metrics_of(
    run: Run, end: Finished, validation: ValidationResult | None = None, failure: str | None = None
) -> InferenceMetrics:
    """`failure` is the code of what went wrong, if anything did. A job's times run from its
    acceptance: what it waited to be begun is a part of its queue."""
    usage, timings, reason = end.usage, end.timings, end.choices[0]
    adapters, arrived_at, now = run.plan.adapters, run.request.arrived_at, time.monotonic()
    # this process's clock as seconds since 1970
    epoch = time.time() - now
    submitted_at = run.request.submitted_at
    waited_s = 0.0 if submitted_at is None else max(epoch + arrived_at - submitted_at, 0.0)
    inference_s = max(timings.total_s - timings.queue_s, 0.0)
    answered = usage.completion_tokens > 0
    return InferenceMetrics(
        job_id=run.request.id,
        submitted_at=epoch + arrived_at - waited_s,
        router_latency_ms=_ms(run.router_s),
        expert_load_latency_ms=_ms(timings.load_s),
        inference_latency_ms=_ms(inference_s),
        total_latency_ms=_ms(now - arrived_at + waited_s),
        experts_used=tuple(adapter.name for adapter in adapters),
        num_experts=len(adapters),
        vram_peak_mb=round(_held_bytes(run, end) / 1e6, 3),
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        tokens_per_second=round(usage.completion_tokens / inference_s, 3) if inference_s else 0.0,
        success=reason in WHOLE,
        error=failure or (None if reason in WHOLE else reason),
        validation_passed=None if validation is None else validation.valid,
        finish_reason=reason,
        task_type=run.task_type,
        specialist=run.served.name,
        cached_tokens=usage.cached_tokens,
        queue_ms=_ms(timings.queue_s + waited_s),
        first_token_ms=_ms(timings.first_token_s + waited_s) if answered else 0.0,
        routed_at=epoch + run.routed_at,
        first_token_at=epoch + arrived_at + timings.first_token_s if answered else 0.0,
        finished_at=epoch + now,
        user_id=run.request.user_id,
        seed=run.plan.sampling.seed or 0,
    )


def _held_bytes(run: Run, end: Finished) -> int:
    """KV and adapters. Nothing of what it shared with everybody."""
    block_bytes = run.served.info.block_bytes.get(run.served.name, 0)
    return end.kv_blocks * block_bytes + end.adapter_bytes


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
