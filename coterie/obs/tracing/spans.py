"""What is noted of a traced request while it runs, and the spans it becomes when it has ended.

A request is one server span. Each of its inferences adds one child per stage: parse, route, admit,
queue, prefill, decode, finish; one of an encoder has encode in place of prefill and decode. A stage
begins where the one before it ends, so together they are the whole time of the request. The times
of queue, prefill, decode and encode are those of its receipt, measured where the tokens were
computed.

Nothing here holds a prompt, an answer, a key or another header of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.core.events import Finished, InferenceMetrics
from coterie.core.receipt import Receipt
from coterie.core.request import Chat, InferenceRequest
from coterie.obs.tracing.context import RandomIds, TraceContext
from coterie.obs.tracing.otlp import CLIENT, INTERNAL, SERVER, AttributeValue, SpanRecord

STAGES = ("parse", "route", "admit", "queue", "prefill", "decode", "finish")
ENCODER_STAGES = ("parse", "route", "admit", "queue", "encode", "finish")
CHAT, TEXT = "chat", "text_completion"
MAX_NAME = 128
# further inferences of one request, as those of many prompts, have no spans
MAX_INFERENCES, MAX_CALLS = 16, 8
# statuses from which on a server span is an error
SERVER_FAULT = 500

_Attributes = dict[str, AttributeValue]


class RequestTrace:
    """The server span of a request."""

    __slots__ = (
        "_epoch_ns", "_on_end", "arrived_at", "context", "ended_at", "error", "has_remote_parent",
        "inferences", "is_job", "method", "parent_id", "request_id", "route", "status",
    )  # fmt: skip

    def __init__(
        self,
        context: TraceContext,
        parent_id: str,
        arrived_at: float,
        on_end: Callable[[RequestTrace], None],
        *,
        is_job: bool = False,
    ) -> None:
        """`context`: of this span. `arrived_at`: time.monotonic()."""
        self.context, self.parent_id, self.arrived_at = context, parent_id, arrived_at
        self.has_remote_parent = bool(parent_id)
        self._on_end, self.is_job = on_end, is_job
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self.inferences: list[InferenceTrace] = []
        self.ended_at: float | None = None
        self.method = self.route = self.error = self.request_id = ""
        self.status = 0

    def end(
        self,
        request_id: str,
        *,
        method: str = "",
        route: str = "",
        status: int = 0,
        error: str = "",
    ) -> None:
        """The last byte was sent. `error`: the code of the refusal."""
        if self.ended_at is not None:
            return
        self.ended_at = time.monotonic()
        self.request_id, self.method, self.route = request_id, method, route
        self.status, self.error = status, error
        if self.context.is_sampled:
            self._on_end(self)

    def add(self, inference: InferenceTrace) -> None:
        if len(self.inferences) < MAX_INFERENCES:
            self.inferences.append(inference)

    @property
    def num_spans(self) -> int:
        """The spans it becomes once it has ended."""
        until = self.ended_at or self.arrived_at
        if not self.inferences:
            return 2 if self.error else 1
        return 1 + sum(len(list(i.stages(until))) + len(i.calls) for i in self.inferences)

    def ns(self, at: float) -> int:
        """A time.monotonic() in nanoseconds since 1970."""
        return self._epoch_ns + round(at * 1e9)


@dataclass(slots=True)
class RemoteCall:
    """A call of another server; its context is what that server was told."""

    context: TraceContext
    host: str
    port: int
    model: str
    began_at: float
    ended_at: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class TracedWork:
    """What is known of an inference when it begins."""

    operation: str
    # as the caller sent it
    model: str
    # time.monotonic()
    arrived_at: float
    given: Mapping[str, AttributeValue] = field(default_factory=dict)
    stages: tuple[str, ...] = STAGES


def generation(request: InferenceRequest) -> TracedWork:
    operation = CHAT if isinstance(request.prompt, Chat) else TEXT
    return TracedWork(operation, request.hints.model or "", request.arrived_at, _given(request))


class InferenceTrace:
    """The stages of one inference of a request."""

    __slots__ = (
        "_arrived_at", "_ids", "_last", "_stages", "_times", "admitted_at", "began_at", "calls",
        "choices", "error", "given", "model", "operation", "owns_root", "planned_at", "receipt",
        "root", "stopped_at", "waits",
    )  # fmt: skip

    def __init__(
        self, root: RequestTrace, work: TracedWork, ids: RandomIds, *, owns_root: bool
    ) -> None:
        """`owns_root`: nobody else ends `root`, as for a job."""
        self.root, self.owns_root, self._ids = root, owns_root, ids
        self.began_at = time.monotonic()
        self._arrived_at, self._stages = work.arrived_at, work.stages
        self.operation, self.model, self.given = work.operation, work.model, work.given
        self.planned_at: float | None = None
        self.admitted_at: float | None = None
        # ends of queue, prefill and decode, or of queue and encode; None = not reached
        self._times: tuple[float | None, ...] = (None,) * (len(work.stages) - 4)
        self.stopped_at: float | None = None
        self.receipt: Receipt | None = None
        self.choices: tuple[str, ...] = ()
        self.error = ""
        # parts of the stages, in seconds
        self.waits: _Attributes = {}
        self.calls: list[RemoteCall] = []
        root.add(self)

    def planned(self) -> None:
        self.planned_at = time.monotonic()

    def admitted(self) -> None:
        self.admitted_at, self.error, self.stopped_at = time.monotonic(), "", None

    def refused(self, code: str, receipt: Receipt | None) -> None:
        """It may still be admitted elsewhere."""
        self.stopped_at, self.error, self.receipt = time.monotonic(), code, receipt

    def finished(self, end: Finished, receipt: Receipt) -> None:
        timings, at = end.timings, self._arrived_at
        first = at + timings.first_token_s if timings.first_token_s else None
        last = None if first is None else first + timings.decode_s
        self._times = (at + timings.queue_s, first, last)
        self.stopped_at, self.receipt, self.choices = time.monotonic(), receipt, end.choices
        parts = {
            "coterie.grammar_s": timings.grammar_s,
            "coterie.adapters_s": timings.load_s,
            "coterie.outage_s": timings.outage_s,
            "coterie.moe_stall_s": 0.0 if end.moe is None else end.moe.stall_s,
        }
        self.waits = {name: round(value, 6) for name, value in parts.items() if value}
        if timings.num_preemptions:
            self.waits["coterie.preemptions"] = timings.num_preemptions

    def encoded(self, queued_at: float, computed_at: float, receipt: Receipt) -> None:
        """The vectors of an encoder are there."""
        self._times, self.receipt = (queued_at, computed_at), receipt
        self.stopped_at = time.monotonic()

    def cut_off(self, metrics: InferenceMetrics, receipt: Receipt) -> None:
        """It failed, or its caller left."""
        self.stopped_at, self.receipt = time.monotonic(), receipt
        # the metrics count a job's wait from when it was accepted, and have the time of day
        epoch_s = time.time() - self.stopped_at
        queued = metrics.submitted_at + metrics.queue_ms / 1000 - epoch_s
        first = metrics.first_token_at - epoch_s if metrics.first_token_at else None
        self._times = (queued, first, None)
        self.choices = (metrics.finish_reason,) if metrics.finish_reason else ()
        self.error = "" if metrics.finish_reason else metrics.error or ""

    # calls of another server: one after the other

    def call_began(self, host: str, port: int, model: str) -> dict[str, str]:
        """The headers that the other server gets."""
        root = self.root.context
        context = TraceContext(root.trace_id, self._ids.span_id(), root.flags, root.state)
        if len(self.calls) < MAX_CALLS:
            self.calls.append(RemoteCall(context, host, port, model, time.monotonic()))
        return context.headers()

    def call_ended(self, error: str) -> None:
        """`error`: empty if the whole answer came."""
        if self.calls and self.calls[-1].ended_at is None:
            self.calls[-1].ended_at, self.calls[-1].error = time.monotonic(), error

    def stages(self, ended_at: float) -> Iterator[tuple[str, float, float]]:
        """(stage, start, end): one after the other from arrival to the end of the request. A stage
        that was cut off ends there; those behind it are left out, but for the last."""
        stopped = min(self.stopped_at or ended_at, ended_at)
        at = self.root.arrived_at
        for stage, reached in zip(
            self._stages,
            (self.began_at, self.planned_at, self.admitted_at, *self._times),
            strict=False,
        ):
            until = max(at, min(stopped, stopped if reached is None else reached))
            yield stage, at, until
            at = until
            if reached is None:
                break
        yield STAGES[-1], at, max(at, ended_at)


def spans_of(trace: RequestTrace, ids: RandomIds) -> Iterator[SpanRecord]:
    """The spans of a request that has ended."""
    ended_at, context = trace.ended_at or trace.arrived_at, trace.context
    error = trace.error or next((item.error for item in trace.inferences if item.error), "")
    attributes, name = _described(trace), f"{trace.method} {trace.route}".strip() or "job"
    if trace.inferences:
        first = trace.inferences[0]
        attributes |= _model_attributes(trace.inferences)
        name = f"{first.operation} {shown(first.model) or _specialist(first)}".strip()
    if error or trace.status >= SERVER_FAULT:
        attributes["error.type"] = error or str(trace.status)

    def span(
        own: str, name: str, start: float, end: float, attributes: _Attributes, **more: Any
    ) -> SpanRecord:
        record = SpanRecord(
            context.trace_id, own, context.span_id, name, INTERNAL, trace.ns(start), trace.ns(end),
            attributes, context.flags, context.state,
        )  # fmt: skip
        return record._replace(**more) if more else record

    yield span(
        context.span_id, name, trace.arrived_at, ended_at, attributes,
        parent_id=trace.parent_id, kind=INTERNAL if trace.is_job else SERVER,
        has_remote_parent=trace.has_remote_parent,
        # the fault of a caller is none of the server
        is_error=trace.status >= SERVER_FAULT or bool(error and trace.status < 400),
    )  # fmt: skip
    if error and not trace.inferences:
        parse: _Attributes = {"coterie.stage": STAGES[0]}
        yield span(ids.span_id(), STAGES[0], trace.arrived_at, ended_at, parse)
    for item in trace.inferences:
        for stage, start, end in item.stages(ended_at):
            yield span(ids.span_id(), stage, start, end, _stage_attributes(item, stage))
        for call in item.calls:
            yield span(
                call.context.span_id, f"{item.operation} {call.model}", call.began_at,
                call.ended_at or ended_at, _call_attributes(item, call),
                kind=CLIENT, is_error=bool(call.error),
            )  # fmt: skip


def shown(name: str) -> str:
    """A caller's model name, which may be anything."""
    return "".join(char for char in name[:MAX_NAME] if char.isprintable())


def _given(request: InferenceRequest) -> _Attributes:
    """Numbers of the request that the conventions name."""
    sampling, limits = request.sampling, request.limits
    given = {
        "gen_ai.request.max_tokens": limits.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.seed": sampling.seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _described(trace: RequestTrace) -> _Attributes:
    attributes: _Attributes = {"coterie.request_id": trace.request_id}
    if trace.method:
        attributes["http.request.method"] = trace.method
    if trace.route:
        attributes["http.route"] = trace.route
    if trace.status:
        attributes["http.response.status_code"] = trace.status
    return attributes


def _specialist(item: InferenceTrace) -> str:
    return "" if item.receipt is None else item.receipt.plan.specialist


def _model_attributes(inferences: list[InferenceTrace]) -> _Attributes:
    """Of all inferences together; those of a request are planned alike."""
    first, receipts = inferences[0], [item.receipt for item in inferences if item.receipt]
    attributes: _Attributes = {
        "gen_ai.operation.name": first.operation,
        "gen_ai.provider.name": "coterie",
        "gen_ai.request.model": shown(first.model) or _specialist(first),
        **first.given,
    }
    reasons = [reason for item in inferences for reason in item.choices]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if not receipts:
        return attributes
    receipt, plan = receipts[0], receipts[0].plan
    attributes |= {
        "gen_ai.response.id": receipt.request_id,
        "gen_ai.usage.input_tokens": sum(item.prompt_tokens for item in receipts),
        "gen_ai.usage.output_tokens": sum(item.completion_tokens for item in receipts),
        "gen_ai.usage.cache_read.input_tokens": sum(item.cached_tokens for item in receipts),
        "coterie.admission": receipt.admission,
        "coterie.breaker": plan.breaker,
    }
    named = {
        "gen_ai.response.model": plan.specialist,
        "coterie.replica": plan.replica,
        "coterie.intent": plan.intent,
        "coterie.shadow": plan.shadow,
        "coterie.experts": [item.name for item in plan.adapters],
    }
    attributes |= {name: value for name, value in named.items() if value}
    if plan.specialist:
        attributes["coterie.confidence"] = float(plan.confidence)
    return attributes


_PARTS = {
    "admit": ("coterie.grammar_s",),
    "queue": ("coterie.adapters_s",),
    "decode": ("coterie.preemptions", "coterie.moe_stall_s", "coterie.outage_s"),
}


def _stage_attributes(item: InferenceTrace, stage: str) -> _Attributes:
    attributes: _Attributes = {"coterie.stage": stage}
    if item.receipt is not None:
        attributes["gen_ai.response.id"] = item.receipt.request_id
    for name in _PARTS.get(stage, ()):
        if name in item.waits:
            attributes[name] = item.waits[name]
    return attributes


def _call_attributes(item: InferenceTrace, call: RemoteCall) -> _Attributes:
    attributes: _Attributes = {
        "gen_ai.operation.name": item.operation,
        # of servers that speak its protocol
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": call.model,
        "server.address": call.host,
        "server.port": call.port,
    }
    if call.error:
        attributes["error.type"] = call.error
    return attributes
