"""The endpoints of jobs: where one stands, what came of it, its events, an end to it.

`JobEndpoints(jobs)` for routes.py: `get_job` and `delete_job` on /v1/jobs/{job_id}, `list_jobs` on
/v1/jobs, `job_events` on /v1/jobs/{job_id}/events. `accepted(job)` is what `Prefer: respond-async`
answers. Translates and nothing more; `service/jobs/service.py` does the work.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.errors import encode, row_of, told
from coterie.api.exchange import exchange_of
from coterie.api.native.infer_answer import answer_fields
from coterie.api.native.jobs_events import JobEvents
from coterie.api.native.jobs_types import JobParameters
from coterie.api.query import query_of
from coterie.core.errors import from_code
from coterie.core.job import Job, JobError, JobQuery
from coterie.service.jobs.service import JobService

JSON = "application/json"


class JobEndpoints:
    def __init__(self, jobs: JobService) -> None:
        self.jobs = jobs

    async def get_job(self, request: Request) -> Response:
        """Show where a job stands: its text so far, and its result once it has ended."""
        job = await self.jobs.get(request.path_params["job_id"], _tenant(request))
        return Response(encode(view(job)), 200, None, JSON)

    async def delete_job(self, request: Request) -> Response:
        """Cancel a job that has not ended; remove one that has."""
        job, deleted = await self.jobs.delete(request.path_params["job_id"], _tenant(request))
        return Response(encode(view(job) | {"deleted": deleted}), 200, None, JSON)

    async def list_jobs(self, request: Request) -> Response:
        """List your jobs, newest first."""
        asked = query_of(request, JobParameters)
        page = await self.jobs.page(
            JobQuery(_tenant(request), asked.status, asked.user_id, asked.limit, asked.after)
        )
        data = [view(job) for job in page.jobs]
        body = {"object": "list", "data": data, "has_more": page.next is not None}
        return Response(encode(body | {"next": page.next}), 200, None, JSON)

    async def job_events(self, request: Request) -> Response:
        """Follow a job: its text so far, then what comes, then its end."""
        job_id, tenant = request.path_params["job_id"], _tenant(request)
        await self.jobs.get(job_id, tenant)
        return JobEvents(self.jobs.follow(job_id, tenant), job_id, exchange_of(request.scope))


def accepted(job: Job) -> Response:
    """202 for a job that is on disk."""
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
        "error": None if job.error is None else error_fields(job.error),
    }


def error_fields(error: JobError) -> dict[str, Any]:
    """As it would have been answered at once."""
    fault = from_code(error.code, error.message)
    row = row_of(fault)
    return {
        "message": told(fault),
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
