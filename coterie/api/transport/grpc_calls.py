"""The calls of coterie.v1.Inference. Translates messages; the pipeline, JobService,
InferenceRecords and InferBodyReader do the work, as for HTTP."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf import json_format, struct_pb2

from coterie.api.auth import AccessKeys
from coterie.api.body import aside, check
from coterie.api.dialect import CallerInfo, ParsedRequest
from coterie.api.door import (
    CLIENT_CLOSED,
    Exchange,
    RefusalReceipts,
    end_trace,
    log_fault,
    new_id,
    note_receipt,
    refusal_receipt,
    trace_id_of,
)
from coterie.api.errors import OPENAI, encode, public_message, status_of
from coterie.api.native.feedback import FeedbackBody
from coterie.api.native.infer import submit
from coterie.api.native.infer_answer import (
    Frame,
    InferencePipeline,
    RunningInference,
    answer_fields,
)
from coterie.api.native.infer_body import MAX_TIMEOUT_MS, InferBodyReader
from coterie.api.native.jobs import JobParameters, frame_of, view
from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.core.errors import CoterieError, InternalError, InvalidRequest
from coterie.core.events import Failed, Finished
from coterie.core.job import JobQuery
from coterie.core.receipt import reason_of
from coterie.obs.log import log
from coterie.obs.tracing.tracer import RequestTracer
from coterie.service.jobs.service import JobService
from coterie.service.records.log import InferenceRecords

Events = AsyncGenerator[pb.InferEvent, None]
# name -> (function, type of its request message)
Methods = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class GrpcServices:
    """The services that do the work."""

    service: InferencePipeline
    jobs: JobService
    records: InferenceRecords
    body_reader: InferBodyReader
    # makes receipts of requests that cannot be read
    refusals: RefusalReceipts


class InferenceCalls:
    def __init__(self, services: GrpcServices) -> None:
        self._services = services

    async def infer(self, request: pb.InferRequest, call: GrpcCall) -> pb.InferenceResult:
        inference = await self._running(request, call)
        result = await inference.result()
        call.exchange.prompt_tokens, call.exchange.completion_tokens = inference.tokens()
        return message_of(pb.InferenceResult, answer_fields(result))

    async def infer_stream(self, request: pb.InferRequest, call: GrpcCall) -> Events:
        inference = await self._running(request, call)
        async with aclosing(inference.events) as events:
            async for event in events:
                frame = inference.frame(event)
                if frame is not None:
                    yield event_of(frame)
                if isinstance(event, (Finished, Failed)):
                    break
        call.exchange.prompt_tokens, call.exchange.completion_tokens = inference.tokens()

    async def submit_job(self, request: pb.InferRequest, call: GrpcCall) -> pb.JobSubmission:
        # the deadline applies to the call, not to the job
        parsed = await self._parsed(request, call)
        answer = await submit(self._services.jobs, parsed)
        return message_of(pb.JobSubmission, bytes(answer.body))

    async def get_job(self, request: pb.JobRequest, call: GrpcCall) -> pb.Job:
        return message_of(pb.Job, view(await self._services.jobs.get(request.job_id, call.tenant)))

    async def list_jobs(self, request: pb.ListJobsRequest, call: GrpcCall) -> pb.JobList:
        query = check(JobParameters, fields_of(request))
        page = await self._services.jobs.page(
            JobQuery(call.tenant, query.status, query.user_id, query.limit, query.after)
        )
        jobs = [message_of(pb.Job, view(job)) for job in page.jobs]
        return pb.JobList(data=jobs, has_more=page.next is not None, next=page.next)

    async def cancel_job(self, request: pb.JobRequest, call: GrpcCall) -> pb.CancelledJob:
        jobs = self._services.jobs
        job, deleted = await jobs.delete(request.job_id, call.tenant)
        return pb.CancelledJob(job=message_of(pb.Job, view(job)), deleted=deleted)

    async def watch_job(self, request: pb.JobRequest, call: GrpcCall) -> Events:
        following = self._services.jobs.follow(request.job_id, call.tenant)
        async with aclosing(following) as progress:
            async for item in progress:
                yield event_of(frame_of(request.job_id, item))

    async def feedback(self, request: pb.FeedbackRequest, call: GrpcCall) -> pb.FeedbackAnswer:
        body = check(FeedbackBody, fields_of(request))
        good = body.verdict == "good"
        await self._services.records.feedback(body.job_id, call.tenant, good, body.comment or "")
        return pb.FeedbackAnswer(job_id=body.job_id, verdict=body.verdict)

    async def _running(self, request: pb.InferRequest, call: GrpcCall) -> RunningInference:
        exchange = call.exchange
        exchange.refusals = self._services.refusals
        parsed = await self._receive(request, call)
        exchange.model = parsed.request.hints.model or ""
        return RunningInference(self._services.service, parsed, partial(note_receipt, exchange))

    async def _receive(self, request: pb.InferRequest, call: GrpcCall) -> ParsedRequest:
        if call.deadline_s is not None:
            left_ms = max(1, int(call.deadline_s * 1000))
            given = request.timeout_ms if request.HasField("timeout_ms") else left_ms
            request.timeout_ms = min(given, left_ms, MAX_TIMEOUT_MS)
        return await self._parsed(request, call)

    async def _parsed(self, request: pb.InferRequest, call: GrpcCall) -> ParsedRequest:
        size = request.ByteSize()
        fields = await aside(size, fields_of, request)
        return await self._services.body_reader.receive(fields, call.caller(), size)


def methods(calls: InferenceCalls, door: GrpcDoor) -> dict[str, Any]:
    """All methods of the service."""
    unary: Methods = {
        "Infer": (calls.infer, pb.InferRequest),
        "SubmitJob": (calls.submit_job, pb.InferRequest),
        "GetJob": (calls.get_job, pb.JobRequest),
        "ListJobs": (calls.list_jobs, pb.ListJobsRequest),
        "CancelJob": (calls.cancel_job, pb.JobRequest),
        "Feedback": (calls.feedback, pb.FeedbackRequest),
    }
    streams: Methods = {
        "InferStream": (calls.infer_stream, pb.InferRequest),
        "WatchJob": (calls.watch_job, pb.JobRequest),
    }
    named = {
        name: handler("unary", door.unary(name, handle), takes)
        for name, (handle, takes) in unary.items()
    }
    return named | {
        name: handler("stream", door.stream(name, handle), takes)
        for name, (handle, takes) in streams.items()
    }


def event_of(frame: Frame) -> pb.InferEvent:
    name, fields = frame
    if name == "delta":
        return pb.InferEvent(delta=pb.InferDelta(text=fields["text"]))
    return message_of(pb.InferEvent, {name: fields})


# even a schema of thousands of lines has fewer; each value takes a few microseconds on the thread
MAX_STRUCT_VALUES = 30_000
MAX_REPEATED = 10_000

Message = TypeVar("Message")


def fields_of(message: Any) -> dict[str, Any]:
    """The fields that are set, by their names on the wire."""
    return {field.name: _value(value) for field, value in message.ListFields()}


def _value(value: Any) -> Any:
    if isinstance(value, struct_pb2.Struct):
        left = [MAX_STRUCT_VALUES]
        return {name: _plain(item, left) for name, item in value.fields.items()}
    if hasattr(value, "ListFields"):
        return fields_of(value)
    if not hasattr(value, "__len__") or isinstance(value, str):
        return value
    if len(value) > MAX_REPEATED:
        raise InvalidRequest(f"a field holds more than {MAX_REPEATED} values")
    return list(value)


def _plain(value: struct_pb2.Value, left: list[int]) -> Any:
    """A value of a Struct as JSON would have it. A Struct has no integers, but some readers of a
    JSON schema distinguish 3.0 from 3. JSON has no NaN. `left`: how many more values are
    allowed."""
    left[0] -= 1
    if left[0] < 0:
        raise InvalidRequest(f"a structure holds more than {MAX_STRUCT_VALUES} values")
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            raise InvalidRequest("a structure holds a number that is not finite")
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return {name: _plain(item, left) for name, item in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(item, left) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def message_of(kind: type[Message], fields: bytes | dict[str, Any]) -> Message:
    """The message with these fields, given as a dict or as JSON. Null fields are left unset."""
    text = fields if isinstance(fields, bytes) else encode(fields)
    message: Message = json_format.Parse(text, kind(), ignore_unknown_fields=True)
    return message


SERVICE = "coterie.v1.Inference"
# share of the remaining deadline, and most seconds, that are kept for sending the answer
_SEND_SHARE, MAX_SEND_S = 0.1, 0.5

Unary = Callable[[Any, "GrpcCall"], Awaitable[Any]]
Stream = Callable[[Any, "GrpcCall"], AsyncGenerator[Any, None]]


class GrpcCall:
    """One running call: its exchange, deadline and session."""

    def __init__(self, exchange: Exchange, deadline_s: float | None, session: str) -> None:
        self.exchange, self.deadline_s, self.session = exchange, deadline_s, session

    @property
    def tenant(self) -> str:
        return self.exchange.tenant

    def caller(self) -> CallerInfo:
        return CallerInfo(self.exchange.tenant, self.exchange.arrived_at, self.session)


# calls that are traced: those that answer a prompt
_TRACED = ("Infer", "InferStream")


class GrpcDoor:
    def __init__(self, keys: AccessKeys, tracer: RequestTracer | None = None) -> None:
        """`tracer`: None without traces."""
        self._keys, self._tracer = keys, tracer

    def unary(self, name: str, handle: Unary) -> Any:
        async def wrapped(request: Any, context: Any) -> Any:
            record = _CallRecord(name, context)
            try:
                return await handle(request, record.enter(self._keys, self._tracer))
            except BaseException as error:
                await record.failed(error)
                raise
            finally:
                record.log()

        return wrapped

    def stream(self, name: str, handle: Stream) -> Any:
        async def wrapped(request: Any, context: Any) -> AsyncIterator[Any]:
            record = _CallRecord(name, context)
            try:
                async with aclosing(
                    handle(request, record.enter(self._keys, self._tracer))
                ) as messages:
                    async for message in messages:
                        yield message
            except BaseException as error:
                await record.failed(error)
                raise
            finally:
                record.log()

        return wrapped


class _CallRecord:
    def __init__(self, name: str, context: Any) -> None:
        self._name, self._context = name, context
        self.exchange = Exchange(new_id("req_"), OPENAI, time.monotonic())
        self.exchange.status = 200

    def enter(self, keys: AccessKeys, tracer: RequestTracer | None) -> GrpcCall:
        """Check the key. Raises if it is not valid."""
        metadata = [_header(*item[:2]) for item in self._context.invocation_metadata() or ()]
        self.exchange.tenant = keys.tenant(f"/{SERVICE}", metadata)
        if tracer is not None and self._name in _TRACED:
            self.exchange.trace = tracer.begin(metadata, self.exchange.arrived_at)
        session = next((value for name, value in metadata if name == b"x-session-id"), b"")
        left_s = self._context.time_remaining()
        if left_s is not None:
            left_s = max(left_s - min(left_s * _SEND_SHARE, MAX_SEND_S), 0.001)
        return GrpcCall(self.exchange, left_s, session.decode("latin-1")[:512])

    async def failed(self, error: BaseException) -> None:
        """End the call with the status of `error`. Returns if the call ends by itself."""
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.exchange.status = CLIENT_CLOSED
            return
        if not isinstance(error, Exception):
            return
        if not isinstance(error, CoterieError):
            log_fault(error, self.exchange.request_id)
            error = InternalError("the server failed to answer; the log has the request id")
        self.exchange.status, self.exchange.reason = status_of(error, OPENAI), reason_of(error)
        receipt = refusal_receipt(error, self.exchange)
        details = details_of(error, self.exchange.request_id)
        if receipt is not None:
            details += (("x-coterie-receipt", receipt.request_id),)
        await self._context.abort(grpc_status_of(error), public_message(error), details)

    def log(self) -> None:
        exchange = self.exchange
        end_trace(exchange, "GRPC", f"/{SERVICE}/{self._name}")
        log(
            "request",
            request_id=exchange.request_id,
            trace_id=trace_id_of(exchange),
            tenant_digest=exchange.tenant,
            method="GRPC",
            route=f"/{SERVICE}/{self._name}",
            status=exchange.status,
            reason=exchange.reason,
            prompt_tokens=exchange.prompt_tokens,
            completion_tokens=exchange.completion_tokens,
            duration_ms=round(exchange.elapsed_ms(), 1),
        )


def _header(name: str, value: str | bytes) -> tuple[bytes, bytes]:
    return name.encode(), value if isinstance(value, bytes) else value.encode()


def handler(kind: str, wrapped: Any, takes: Any) -> Any:
    """gRPC's handler object for a method; `kind` is unary or stream."""
    make = {
        "unary": grpc.unary_unary_rpc_method_handler,
        "stream": grpc.unary_stream_rpc_method_handler,
    }[kind]
    return make(
        wrapped,
        request_deserializer=takes.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


_Code = grpc.StatusCode
STATUSES = {
    "invalid_request": _Code.INVALID_ARGUMENT,
    "context_length_exceeded": _Code.INVALID_ARGUMENT,
    "unsupported": _Code.INVALID_ARGUMENT,
    "previous_response_not_found": _Code.INVALID_ARGUMENT,
    "request_too_large": _Code.RESOURCE_EXHAUSTED,
    "unsupported_media_type": _Code.INVALID_ARGUMENT,
    "misdirected": _Code.PERMISSION_DENIED,
    "unauthenticated": _Code.UNAUTHENTICATED,
    "forbidden": _Code.PERMISSION_DENIED,
    "not_found": _Code.NOT_FOUND,
    "conflict": _Code.ALREADY_EXISTS,
    "overloaded": _Code.RESOURCE_EXHAUSTED,
    "saturated": _Code.RESOURCE_EXHAUSTED,
    "unavailable": _Code.UNAVAILABLE,
    "deadline_exceeded": _Code.DEADLINE_EXCEEDED,
}


def grpc_status_of(error: CoterieError) -> grpc.StatusCode:
    """The gRPC status. Errors that are not in the table are internal errors."""
    return STATUSES.get(error.code, _Code.INTERNAL)


def details_of(error: CoterieError, request_id: str) -> tuple[tuple[str, str], ...]:
    """Trailing metadata; only ASCII is allowed."""
    details = {"coterie-code": error.code, "x-request-id": request_id}
    if error.param is not None and error.param.isascii() and error.param.isprintable():
        details["coterie-param"] = error.param
    if error.retry_after_s is not None:
        details["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    return tuple(details.items())
