"""The calls of coterie.v1.Inference. Translates messages; Reception, JobService and Records do the
work, as they do for HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf import json_format, struct_pb2

from coterie.api.body import aside, check
from coterie.api.errors import encode
from coterie.api.native.feedback import FeedbackBody
from coterie.api.native.infer import submit
from coterie.api.native.infer_answer import (
    Frame,
    InferencePipeline,
    RunningInference,
    answer_fields,
)
from coterie.api.native.infer_parse import InferBodyReader, ParsedInfer
from coterie.api.native.infer_types import MAX_TIMEOUT_MS
from coterie.api.native.jobs import JobParameters, frame_of, view
from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.api.transport.grpc_door import GrpcCall, GrpcDoor, handler
from coterie.core.errors import InvalidRequest
from coterie.core.events import Failed, Finished
from coterie.core.job import JobQuery
from coterie.service.jobs.service import JobService
from coterie.service.records.log import InferenceRecords

Events = AsyncGenerator[pb.InferEvent, None]
# name -> who answers it, and what it takes
Methods = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class GrpcServices:
    """Who does the work."""

    service: InferencePipeline
    jobs: JobService
    records: InferenceRecords
    reception: InferBodyReader


class InferenceCalls:
    def __init__(self, behind: GrpcServices) -> None:
        self._behind = behind

    async def infer(self, request: pb.InferRequest, call: GrpcCall) -> pb.InferenceResult:
        inference = RunningInference(self._behind.service, await self._receive(request, call))
        result = await inference.result()
        call.exchange.prompt_tokens, call.exchange.completion_tokens = inference.tokens()
        return message_of(pb.InferenceResult, answer_fields(result))

    async def infer_stream(self, request: pb.InferRequest, call: GrpcCall) -> Events:
        inference = RunningInference(self._behind.service, await self._receive(request, call))
        async with aclosing(inference.events) as events:
            async for event in events:
                frame = inference.frame(event)
                if frame is not None:
                    yield event_of(frame)
                if isinstance(event, (Finished, Failed)):
                    break
        call.exchange.prompt_tokens, call.exchange.completion_tokens = inference.tokens()

    async def submit_job(self, request: pb.InferRequest, call: GrpcCall) -> pb.JobSubmission:
        # the deadline is the call's, not the job's
        asked = await self._asked(request, call)
        answer = await submit(self._behind.jobs, asked)
        return message_of(pb.JobSubmission, bytes(answer.body))

    async def get_job(self, request: pb.JobRequest, call: GrpcCall) -> pb.Job:
        return message_of(pb.Job, view(await self._behind.jobs.get(request.job_id, call.tenant)))

    async def list_jobs(self, request: pb.ListJobsRequest, call: GrpcCall) -> pb.JobList:
        asked = check(JobParameters, fields_of(request))
        page = await self._behind.jobs.page(
            JobQuery(call.tenant, asked.status, asked.user_id, asked.limit, asked.after)
        )
        jobs = [message_of(pb.Job, view(job)) for job in page.jobs]
        return pb.JobList(data=jobs, has_more=page.next is not None, next=page.next)

    async def cancel_job(self, request: pb.JobRequest, call: GrpcCall) -> pb.CancelledJob:
        jobs = self._behind.jobs
        job, deleted = await jobs.delete(request.job_id, call.tenant)
        return pb.CancelledJob(job=message_of(pb.Job, view(job)), deleted=deleted)

    async def watch_job(self, request: pb.JobRequest, call: GrpcCall) -> Events:
        following = self._behind.jobs.follow(request.job_id, call.tenant)
        async with aclosing(following) as progress:
            async for item in progress:
                yield event_of(frame_of(request.job_id, item))

    async def feedback(self, request: pb.FeedbackRequest, call: GrpcCall) -> pb.FeedbackAnswer:
        body = check(FeedbackBody, fields_of(request))
        good = body.verdict == "good"
        await self._behind.records.feedback(body.job_id, call.tenant, good, body.comment or "")
        return pb.FeedbackAnswer(job_id=body.job_id, verdict=body.verdict)

    async def _receive(self, request: pb.InferRequest, call: GrpcCall) -> ParsedInfer:
        if call.deadline_s is not None:
            left_ms = max(1, int(call.deadline_s * 1000))
            given = request.timeout_ms if request.HasField("timeout_ms") else left_ms
            request.timeout_ms = min(given, left_ms, MAX_TIMEOUT_MS)
        return await self._asked(request, call)

    async def _asked(self, request: pb.InferRequest, call: GrpcCall) -> ParsedInfer:
        size = request.ByteSize()
        fields = await aside(size, fields_of, request)
        return await self._behind.reception.receive(fields, call.caller(), size)


def methods(calls: InferenceCalls, door: GrpcDoor) -> dict[str, Any]:
    """Every method of the service."""
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


# a schema of thousands of lines has fewer; each costs the thread a few microseconds
MAX_STRUCT_VALUES = 30_000
MAX_REPEATED = 10_000

Message = TypeVar("Message")


def fields_of(message: Any) -> dict[str, Any]:
    """The fields that were set, by their names on the wire."""
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
    """A value of a Struct as JSON would have carried it. It knows no integers; in a JSON schema
    3.0 is not 3 to everybody. JSON knows no NaN."""
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
    """The message with these values, also as JSON; what is null is left unset."""
    text = fields if isinstance(fields, bytes) else encode(fields)
    message: Message = json_format.Parse(text, kind(), ignore_unknown_fields=True)
    return message
