"""POST /v1/infer: answered whole, as a stream, or accepted as a job."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import read_json
from coterie.api.dialect import ParsedRequest, caller_of, note_usage
from coterie.api.door import exchange_of, note_plan, note_receipt
from coterie.api.errors import encode
from coterie.api.native.infer_answer import (
    InferencePipeline,
    InferStream,
    RunningInference,
    answer_fields,
)
from coterie.api.native.infer_body import InferBodyReader
from coterie.api.native.jobs import accepted
from coterie.api.response_format import FORMAT, with_param_name
from coterie.api.transport.sse import EventStream, WhileConnected
from coterie.core.errors import CoterieError
from coterie.core.job import JobSpec
from coterie.service.jobs.service import JobService

JSON = "application/json"


class InferEndpoints:
    def __init__(
        self,
        service: InferencePipeline,
        jobs: JobService,
        body_reader: InferBodyReader,
        max_body_bytes: int,
    ) -> None:
        self.service = service
        self.jobs = jobs
        self.body_reader = body_reader
        self.max_body_bytes = max_body_bytes

    async def infer(self, request: Request) -> Response:
        """Answer a prompt with the experts that fit it: whole, streamed, or later as a job."""
        raw = await read_json(request, self.max_body_bytes)
        parsed = await self.body_reader.receive(raw, caller_of(request), len(raw))
        exchange = exchange_of(request.scope)
        exchange.model = parsed.request.hints.model or ""
        if prefers_job(request):
            return await submit(self.jobs, parsed)
        inference = RunningInference(self.service, parsed, partial(note_receipt, exchange))
        note_plan(exchange, inference.plan)
        if parsed.stream:
            return EventStream(inference.events, InferStream(inference), exchange)
        async with WhileConnected(request.receive):
            result = await inference.result()
        note_plan(exchange, inference.plan)
        assert inference.answer.finished is not None
        note_usage(exchange, inference.answer.finished)
        return Response(encode(answer_fields(result)), media_type=JSON)


async def submit(jobs: JobService, parsed: ParsedRequest) -> Response:
    """Accept the request as a job. Errors name the fields of this API."""
    spec = JobSpec(parsed.request, parsed.explain)
    try:
        return accepted(await jobs.submit(spec))
    except CoterieError as error:
        renamed = with_param_name(error, "experts", "force_experts")
        raise with_param_name(renamed, FORMAT, parsed.format_field) from None


def prefers_job(request: Request) -> bool:
    """Whether a Prefer header says respond-async. RFC 7240: there may be several headers, each with
    preferences separated by commas, each preference with parameters."""
    preferences = ",".join(request.headers.getlist("prefer")).split(",")
    return any(item.partition(";")[0].strip().lower() == "respond-async" for item in preferences)
