"""The endpoints for jobs: status, result, events, cancellation.

`JobEndpoints(jobs)` for routes.py: `get_job` and `delete_job` on /v1/jobs/{job_id}, `list_jobs` on
/v1/jobs, `job_events` on /v1/jobs/{job_id}/events. `accepted(job)` is what `Prefer: respond-async`
answers. This module only translates; `service/jobs/service.py` does the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.api.body import QueryParameters, query_of
from coterie.api.door import Exchange, exchange_of, log_fault
from coterie.api.errors import encode, public_message, row_of
from coterie.api.native.infer_answer import (
    DELTA,
    ERROR,
    FINISHED,
    STARTED,
    Frame,
    answer_fields,
    error_fields,
    sse,
    started_fields,
)
from coterie.api.transport.sse import KEEPALIVE_S, WhileConnected
from coterie.core.errors import CoterieError, InternalError, InvalidRequest, from_code
from coterie.core.events import InferenceResult
from coterie.core.job import CANCELLED, MAX_PAGE, Job, JobError, JobQuery
from coterie.core.plan import RoutePlan
from coterie.service.jobs.service import JobService, Progress

JSON = "application/json"


class JobEndpoints:
    def __init__(self, jobs: JobService) -> None:
        self.jobs = jobs

    async def get_job(self, request: Request) -> Response:
        """Show the status of a job: its text so far, and its result when it has ended."""
        job = await self.jobs.get(request.path_params["job_id"], _tenant(request))
        return Response(encode(view(job)), 200, None, JSON)

    async def delete_job(self, request: Request) -> Response:
        """Cancel a job that has not ended; remove a job that has ended."""
        job, deleted = await self.jobs.delete(request.path_params["job_id"], _tenant(request))
        return Response(encode(view(job) | {"deleted": deleted}), 200, None, JSON)

    async def list_jobs(self, request: Request) -> Response:
        """List your jobs, newest first."""
        query = query_of(request, JobParameters)
        page = await self.jobs.page(
            JobQuery(_tenant(request), query.status, query.user_id, query.limit, query.after)
        )
        data = [view(job) for job in page.jobs]
        body = {"object": "list", "data": data, "has_more": page.next is not None}
        return Response(encode(body | {"next": page.next}), 200, None, JSON)

    async def job_events(self, request: Request) -> Response:
        """Follow a job: its text so far, then new text, then how it ended."""
        job_id, tenant = request.path_params["job_id"], _tenant(request)
        await self.jobs.get(job_id, tenant)
        return JobEvents(self.jobs.follow(job_id, tenant), job_id, exchange_of(request.scope))


def accepted(job: Job) -> Response:
    """The 202 response for a job that is stored on disk."""
    body = {
        "job_id": job.id,
        "status": job.status,
        "submitted_at": moment(job.submitted_at),
        "estimated_wait_ms": job.estimated_wait_ms,
    }
    headers = {"location": f"/v1/jobs/{job.id}", "preference-applied": "respond-async"}
    return Response(encode(body), 202, headers, JSON)


def view(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "status": job.status,
        "submitted_at": moment(job.submitted_at),
        "started_at": moment(job.started_at),
        "finished_at": moment(job.finished_at),
        "user_id": job.user_id or None,
        "text": job.text,
        "result": None if job.result is None else answer_fields(job.result),
        "error": None if job.error is None else job_error_fields(job.error),
    }


def job_error_fields(error: JobError) -> dict[str, Any]:
    """The error as a direct request would have received it."""
    fault = from_code(error.code, error.message)
    row = row_of(fault)
    return {
        "message": public_message(fault),
        "type": row.openai_type,
        "param": None,
        "code": row.openai_code or error.code,
    }


def moment(at: float | None) -> str | None:
    """ISO 8601, to the millisecond."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _tenant(request: Request) -> str:
    return exchange_of(request.scope).tenant


KEEPALIVE = b": keepalive\n\n"


class JobEvents(Response):
    media_type = "text/event-stream"

    def __init__(
        self, progress: AsyncGenerator[Progress, None], job_id: str, exchange: Exchange
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # the body's length is not known
        del self.headers["content-length"]
        self.progress = progress
        self.job_id = job_id
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with WhileConnected(receive):
                await self._run(send)
        finally:
            await self.progress.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, send: Send) -> None:
        coming: asyncio.Future[Progress] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(self.progress))
                await asyncio.wait({coming}, timeout=KEEPALIVE_S)
                if not coming.done():
                    await _write(send, KEEPALIVE)
                    continue
                item, coming = coming.result(), None
                await _write(send, sse(*frame_of(self.job_id, item)))
                if isinstance(item, Job):
                    return
        except CoterieError as error:
            await _write(send, self._error(error))
        except Exception as error:
            log_fault(error, self.exchange.request_id)
            await _write(send, self._error(InternalError("the server failed to tell the events")))
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    def _error(self, error: CoterieError) -> bytes:
        return sse(ERROR, error_fields(error))


def frame_of(job_id: str, item: Progress) -> Frame:
    """The frame that `item` becomes for a client. Raises the error of a job without a result."""
    if isinstance(item, str):
        return DELTA, {"text": item}
    if isinstance(item, RoutePlan):
        return STARTED, started_fields(job_id, item)
    if item.result is not None:
        return FINISHED, answer_fields(item.result)
    if item.status == CANCELLED:
        raise InvalidRequest("the job was cancelled")
    assert item.error is not None, "a job that failed says why"
    raise from_code(item.error.code, item.error.message)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


Status = Literal["queued", "processing", "succeeded", "failed", "cancelled"]


class JobParameters(QueryParameters):
    """Filters for the list of jobs."""

    status: Status | None = None
    user_id: str | None = None
    limit: int = Field(20, ge=1, le=MAX_PAGE)
    after: str | None = Field(None, description="A page's `next`.")


class JobFault(BaseModel):
    """Why a job failed, as a direct request would have received it."""

    message: str
    type: str
    param: str | None
    code: str | None


class JobView(BaseModel):
    """The status of a job. `text` is the text so far; times are ISO 8601."""

    job_id: str
    status: Status
    submitted_at: str
    started_at: str | None
    finished_at: str | None
    user_id: str | None
    text: str
    result: InferenceResult | None
    error: JobFault | None


class DeletedJob(JobView):
    """`deleted` is false for a job that was cancelled: it can still be read."""

    deleted: bool


class JobList(BaseModel):
    """One page, newest first. Send `next` as `after` to get the following page."""

    object: Literal["list"]
    data: list[JobView]
    has_more: bool
    next: str | None
