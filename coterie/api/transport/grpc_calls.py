"""The calls of coterie.v1.Inference. Translates messages; the pipeline, JobService,
InferenceRecords and InferBodyReader do the work, as for HTTP."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from coterie.api.auth import AccessKeys
from coterie.api.body import aside, check
from coterie.api.dialect import CallerInfo, ParsedRequest
from coterie.api.door import (
    CLIENT_CLOSED,
    Exchange,
    RefusalReceipts,
    end_trace,
    is_logged,
    log_fault,
    new_id,
    note_receipt,
    refusal_receipt,
    trace_id_of,
)
from coterie.api.errors import OPENAI, public_message, status_of
from coterie.api.native.feedback import FeedbackBody
from coterie.api.native.infer import submit
from coterie.api.native.infer_answer import (
    InferencePipeline,
    RunningInference,
    answer_fields,
)
from coterie.api.native.infer_body import MAX_TIMEOUT_MS, InferBodyReader
from coterie.api.native.jobs import JobParameters, frame_of, view
from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.api.transport.grpc_messages import (
    MessageReader,
    caller_address,
    event_of,
    fields_of,
    message_of,
)
from coterie.core.config import ServerSettings
from coterie.core.errors import CoterieError, InternalError, Overloaded
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
        name: handler(door.unary(name, handle, takes)) for name, (handle, takes) in unary.items()
    }
    return named | {
        name: handler(door.stream(name, handle, takes)) for name, (handle, takes) in streams.items()
    }


SERVICE = "coterie.v1.Inference"
# running calls of one tenant: half of those of all
MAX_TENANT_CALLS = 2048
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
    """Checks the key of a call, reads its message, turns errors into statuses, logs."""

    def __init__(
        self, keys: AccessKeys, settings: ServerSettings, tracer: RequestTracer | None = None
    ) -> None:
        """`tracer`: None without traces."""
        self._keys, self._tracer = keys, tracer
        self._reader = MessageReader(settings.body_timeout_s)
        self._write_timeout_s = settings.write_timeout_s
        # running calls by tenant
        self._running: Counter[str] = Counter()

    def unary(self, name: str, handle: Unary, takes: Any) -> Any:
        async def one(request: Any, call: GrpcCall) -> AsyncGenerator[Any, None]:
            yield await handle(request, call)

        return self.stream(name, one, takes)

    def stream(self, name: str, handle: Stream, takes: Any) -> Any:
        async def wrapped(messages: AsyncIterator[bytes], context: Any) -> None:
            record = _CallRecord(name, context)
            try:
                call = record.enter(self._keys, self._tracer)
                with self._counted(call.tenant):
                    address = caller_address(context)
                    request = await self._reader.read(messages, takes, call.tenant, address)
                    async with aclosing(handle(request, call)) as answers:
                        async for answer in answers:
                            await self._write(context, answer, call)
            except BaseException as error:
                await record.failed(error)
                raise
            finally:
                record.log()

        return wrapped

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        if self._running[tenant] >= MAX_TENANT_CALLS:
            raise Overloaded(f"{MAX_TENANT_CALLS} calls of this tenant run", retry_after_s=1.0)
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    async def _write(self, context: Any, answer: Any, call: GrpcCall) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(answer)
        except (TimeoutError, grpc.aio.InternalError) as error:
            # gRPC can send no status to a client that takes nothing, or that has gone; the call's
            # work ends here
            if isinstance(error, TimeoutError):
                call.exchange.reason = "write_timeout"
            raise asyncio.CancelledError from None


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
        if not is_logged(exchange):
            return
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


def handler(wrapped: Any) -> Any:
    """gRPC's handler object for a method. The method gets an iterator of the client's messages, as
    bytes, and writes its answers itself, also where there is one of them: so it decides when they
    are read, and how long it waits for a client that does not read."""
    return grpc.stream_stream_rpc_method_handler(
        wrapped, response_serializer=lambda message: message.SerializeToString()
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
