"""Collects a request's events into an `InferenceResult`, and shows a plan as an ExpertPlan.

HTTP, streams, WebSockets, jobs and gRPC all use it, so they answer the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from coterie.core.errors import CoterieError, from_code
from coterie.core.events import Delta, Event, Failed, Finished, InferenceResult, Started, facts_of
from coterie.core.plan import RoutePlan, RouteTrace
from coterie.core.request import Chat, Prompt, Text
from coterie.core.sampling import TUNED_FIELDS


class AnswerBuilder:
    """Takes every event of one request, in order. It has a result when `ended` is true."""

    def __init__(
        self,
        job_id: str,
        plans: Sequence[RoutePlan],
        *,
        explain: bool = False,
        keeps_deltas: bool = False,
    ) -> None:
        """`plans`: a list that the pipeline appends to; the last plan is the valid one. With
        `keeps_deltas` the result's telemetry holds all deltas and the usage."""
        self.job_id, self._plans, self.explain = job_id, plans, explain
        self._deltas: list[Delta] | None = [] if keeps_deltas else None
        self.finished: Finished | None = None
        self.error: CoterieError | None = None
        self._texts: list[str] = []
        self._max_tokens: int | None = None

    @property
    def plan(self) -> RoutePlan:
        return self._plans[-1]

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def take(self, event: Event) -> None:
        if isinstance(event, Delta):
            if event.choice == 0:
                self._texts.append(event.text)
                if self._deltas is not None:
                    self._deltas.append(event)
        elif isinstance(event, Started):
            self._max_tokens = event.max_tokens
        elif isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, Failed):
            self.error = from_code(event.code, event.message, retry_after_s=event.retry_after_s)

    def shown_plan(self) -> dict[str, Any] | None:
        """The plan as the native API shows it; None unless the request asked for it."""
        return expert_plan(self.plan, self._max_tokens) if self.explain else None

    def result(self) -> InferenceResult:
        """Raises the error that the request failed with."""
        if self.error is not None:
            raise self.error
        finished, trace = self.finished, self.plan.trace
        assert finished is not None, "the request has not ended"
        return InferenceResult(
            job_id=self.job_id,
            text=self.text,
            tokens_generated=finished.usage.completion_tokens,
            experts_used=names_of(self.plan),
            latency_ms=_latency_ms(finished),
            finish_reason=finished.choices[0],
            model=self.plan.specialist,
            task_type="" if trace is None else trace.task_type,
            confidence=self.plan.confidence,
            degraded=() if trace is None else trace.degraded,
            seed=self.plan.sampling.seed or 0,
            validation=finished.validation,
            metrics=finished.metrics,
            telemetry=facts_of(finished) | self._kept(finished),
            plan=self.shown_plan(),
        )

    def _kept(self, finished: Finished) -> dict[str, Any]:
        if self._deltas is None:
            return {}
        return {"deltas": self._deltas, "usage": finished.usage}


def _latency_ms(finished: Finished) -> float:
    """Total time, including validation if it was measured."""
    if finished.metrics is not None:
        return finished.metrics.total_latency_ms
    return round(finished.timings.total_s * 1000, 3)


def names_of(plan: RoutePlan) -> tuple[str, ...]:
    return tuple(adapter.name.partition("@")[0] for adapter in plan.adapters)


def expert_plan(plan: RoutePlan, max_tokens: int | None = None) -> dict[str, Any]:
    """The plan as the native API shows it. `max_tokens` is the value that the request ran with, if
    it is known."""
    sampling = asdict(plan.sampling)
    params = {name: sampling[name] for name in TUNED_FIELDS}
    return {
        "experts": [asdict(adapter) for adapter in plan.adapters],
        "composition_order": [adapter.name for adapter in plan.adapters],
        "generation_params": params | {"max_tokens": max_tokens or plan.tuned.max_tokens},
        "prompt_modified": None if plan.tuned.prompt is None else _text(plan.tuned.prompt),
        "confidence": plan.confidence,
        "reasons": list(plan.reasons),
        "reasoning_trace": None if plan.trace is None else _shown(plan.trace),
    }


def _shown(trace: RouteTrace) -> dict[str, Any]:
    shown = asdict(replace(trace, classified=None))
    del shown["classified"]
    return shown


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, Chat):
        return prompt.messages[-1].content
    return prompt.text if isinstance(prompt, Text) else ""
