"""Every figure of one request as `InferenceMetrics`, from its plan and its last event.

Arithmetic over what was measured elsewhere; the only clock it asks is that of the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from coterie.core.adapters import AdapterCard
from coterie.core.events import Failed, Finished
from coterie.core.outcome import InferenceMetrics, ValidationResult
from coterie.core.plan import AdapterChoice
from coterie.service.run import Run

# finish reasons of answers that came to an end of their own, or to their limit
WHOLE = ("stop", "length")

FindCard = Callable[[str], AdapterCard | None]


def metrics_of(
    run: Run, event: Finished | Failed, validation: ValidationResult | None, find: FindCard
) -> InferenceMetrics:
    """`find` knows the card of a digest."""
    now = time.monotonic()
    base = _common(run, now)
    if isinstance(event, Failed):
        return replace(base, error=event.code)
    usage, timings = event.usage, event.timings
    inference_s = max(timings.total_s - timings.queue_s, 0.0)
    reason = event.choices[0]
    kv_bytes = event.kv_blocks * run.served.info.block_bytes.get(run.served.name, 0)
    return replace(
        base,
        expert_load_latency_ms=_ms(timings.load_s),
        inference_latency_ms=_ms(inference_s),
        vram_peak_mb=round((kv_bytes + adapter_bytes(run.plan.adapters, find)) / 1e6, 3),
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        tokens_per_second=round(usage.completion_tokens / inference_s, 3) if inference_s else 0.0,
        success=reason in WHOLE,
        error=None if reason in WHOLE else reason,
        validation_passed=None if validation is None else validation.valid,
        finish_reason=reason,
        cached_tokens=usage.cached_tokens,
        queue_ms=_ms(timings.queue_s),
        first_token_ms=_ms(timings.first_token_s) if usage.completion_tokens else 0.0,
        first_token_at=base.submitted_at + timings.first_token_s
        if usage.completion_tokens
        else 0.0,
    )


def _common(run: Run, now: float) -> InferenceMetrics:
    arrived_at = run.request.arrived_at
    # this process's clock as seconds since 1970
    epoch = time.time() - now
    names = tuple(adapter.name for adapter in run.plan.adapters)
    return InferenceMetrics(
        job_id=run.request.id,
        submitted_at=epoch + arrived_at,
        router_latency_ms=_ms(run.router_s),
        expert_load_latency_ms=0.0,
        inference_latency_ms=0.0,
        total_latency_ms=_ms(now - arrived_at),
        experts_used=names,
        num_experts=len(names),
        vram_peak_mb=0.0,
        input_tokens=0,
        output_tokens=0,
        tokens_per_second=0.0,
        success=False,
        error=None,
        validation_passed=None,
        task_type=run.task_type,
        specialist=run.served.name,
        routed_at=epoch + run.routed_at,
        finished_at=epoch + now,
    )


def adapter_bytes(adapters: tuple[AdapterChoice, ...], find: FindCard) -> int:
    cards = (find(adapter.digest) for adapter in adapters)
    return sum(card.nbytes for card in cards if card is not None)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
