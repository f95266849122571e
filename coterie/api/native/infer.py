"""POST /v1/infer: whole, as a stream, or accepted as a job. Receives, asks, writes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import read_json
from coterie.api.dialect import ParsedRequest, caller_of, note_usage
from coterie.api.door import exchange_of, receipt
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
from coterie.api.transport.sse import EventStream, while_connected
from coterie.core.errors import CoterieError
from coterie.core.job import JobSpec
from coterie.service.jobs.service import JobService

JSON = "application/json"


class InferEndpoints:
    def __init__(
        self,
        service: InferencePipeline,
        jobs: JobService,
        reception: InferBodyReader,
        max_body_bytes: int,
    ) -> None:
        self.service = service
        self.jobs = jobs
        self.reception = reception
        self.max_body_bytes = max_body_bytes

    async def infer(self, request: Request) -> Response:
        """Answer a prompt with the experts that suit it: whole, streamed, or later as a job."""
        raw = await read_json(request, self.max_body_bytes)
        asked = await self.reception.receive(raw, caller_of(request), len(raw))
        if prefers_job(request):
            return await submit(self.jobs, asked)
        exchange = exchange_of(request.scope)
        inference = RunningInference(self.service, asked)
        receipt(exchange, inference.plan)
        if asked.stream:
            return EventStream(inference.events, InferStream(inference), exchange)
        async with while_connected(request.receive):
            result = await inference.result()
        receipt(exchange, inference.plan)
        assert inference.answer.finished is not None
        note_usage(exchange, inference.answer.finished)
        return Response(encode(answer_fields(result)), media_type=JSON)


async def submit(jobs: JobService, asked: ParsedRequest) -> Response:
    """Accepted as a job, or refused in the words of this API."""
    spec = JobSpec(asked.request, asked.explain)
    try:
        return accepted(await jobs.submit(spec))
    except CoterieError as error:
        renamed = with_param_name(error, "experts", "force_experts")
        raise with_param_name(renamed, FORMAT, asked.format_field) from None


def prefers_job(request: Request) -> bool:
    """RFC 7240: preferences in any number of headers, apart by commas, with parameters."""
    given = ",".join(request.headers.getlist("prefer")).split(",")
    return any(item.partition(";")[0].strip().lower() == "respond-async" for item in given)
