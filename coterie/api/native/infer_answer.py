"""One running inference, and its events as the native API writes them: frames and an answer.

Independent of the transport: HTTP joins frames into bytes, WebSockets and gRPC send them one by
one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from coterie.api.dialect import ParsedRequest
from coterie.api.errors import OPENAI, body_of, encode
from coterie.api.response_format import format_named, with_param_name
from coterie.core.errors import CoterieError, InternalError
from coterie.core.events import (
    Delta,
    Event,
    Failed,
    Finished,
    InferenceMetrics,
    InferenceResult,
    Started,
    Timings,
    Usage,
)
from coterie.core.plan import RoutePlan
from coterie.core.receipt import Receipt
from coterie.core.request import InferenceRequest
from coterie.service.answer import AnswerBuilder, names_of
from coterie.service.request_limits import Events, until_deadline

STARTED, DELTA, FINISHED, ERROR = "started", "delta", "finished", "error"
Frame = tuple[str, dict[str, Any]]


class InferencePipeline(Protocol):
    """The part of `service.pipeline.Pipeline` that an inference needs."""

    def handle(
        self,
        request: InferenceRequest,
        *,
        on_plan: Callable[[RoutePlan], None] | None = None,
        on_abort: Callable[[InferenceMetrics], None] | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> AsyncGenerator[Event, None]: ...


class RunningInference:
    """The constructor makes the plan and raises if an expert is refused. Closing `events` aborts
    the request."""

    def __init__(
        self,
        service: InferencePipeline,
        parsed: ParsedRequest,
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> None:
        # the last plan is the valid one: a second is made if an expert turns out to be damaged
        self._plans: list[RoutePlan] = []
        # the metrics, if `events` was closed before the end
        self._aborted_metrics: list[InferenceMetrics] = []
        try:
            events = service.handle(
                parsed.request,
                on_plan=self._plans.append,
                on_abort=self._aborted_metrics.append,
                on_receipt=on_receipt,
            )
        except CoterieError as error:
            raise with_param_name(error, "experts", "force_experts") from None
        self.job_id = parsed.request.id
        self.answer = AnswerBuilder(self.job_id, self._plans, explain=parsed.explain)
        self.events: Events = until_deadline(events, parsed.request, self._aborted_metrics)
        self.events = format_named(self.events, parsed.format_field)
        self._arrived_at = parsed.request.arrived_at
        self._has_started = False
        self._prompt_tokens = self._num_tokens = 0

    @property
    def plan(self) -> RoutePlan:
        return self._plans[-1]

    def tokens(self) -> tuple[int, int]:
        """Token counts of the prompt and of the answer so far."""
        finished = self.answer.finished
        if finished is None:
            return self._prompt_tokens, self._num_tokens
        return finished.usage.prompt_tokens, finished.usage.completion_tokens

    async def result(self) -> InferenceResult:
        """Read all events and return the result. Raises the error that the request failed with."""
        async with aclosing(self.events):
            async for event in self.events:
                self.answer.take(event)
        if not self.answer.ended:
            raise InternalError("the answer ended without a result")
        return self.answer.result()

    def frame(self, event: Event) -> Frame | None:
        """The frame that `event` becomes, None if clients do not see it. Raises the error that the
        request failed with."""
        self.answer.take(event)
        if isinstance(event, Delta):
            self._num_tokens += len(event.token_ids)
            return (DELTA, {"text": event.text}) if event.text and event.choice == 0 else None
        if isinstance(event, Started):
            if self._has_started:
                return None
            self._has_started = True
            self._prompt_tokens = event.prompt_tokens
            plan = self.answer.shown_plan()
            more = {} if plan is None else {"plan": plan}
            return STARTED, started_fields(self.job_id, self.plan) | more
        if isinstance(event, (Finished, Failed)):
            return FINISHED, answer_fields(self.answer.result())
        return None

    def aborted(self) -> Frame:
        """The last frame of a request that its caller has cancelled."""
        finished = Finished(
            self.job_id,
            ("abort",),
            Usage(*self.tokens()),
            Timings(total_s=time.monotonic() - self._arrived_at),
            metrics=self._aborted_metrics[-1] if self._aborted_metrics else None,
        )
        frame = self.frame(finished)
        assert frame is not None
        return frame


def started_fields(job_id: str, plan: RoutePlan) -> dict[str, Any]:
    trace = plan.trace
    return {
        "job_id": job_id,
        "model": plan.specialist,
        "experts_used": names_of(plan),
        "confidence": plan.confidence,
        "task_type": "" if trace is None else trace.task_type,
        "degraded": () if trace is None else trace.degraded,
    }


def answer_fields(result: InferenceResult) -> dict[str, Any]:
    """The fields of the answer; `plan` only if the request asked for it."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    if result.plan is None:
        del fields["plan"]
    return fields


def error_fields(error: CoterieError) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(body_of(error, OPENAI, ""))
    return fields


class InferStream:
    """An inference's frames as server-sent events."""

    keepalive = b": keepalive\n\n"

    def __init__(self, inference: RunningInference) -> None:
        self._inference = inference

    def render(self, event: Event) -> bytes:
        frame = self._inference.frame(event)
        return b"" if frame is None else sse(*frame)

    def error(self, error: CoterieError) -> bytes:
        return sse(ERROR, error_fields(error))


def sse(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(fields))
