"""What the endpoints of jobs take and answer, as types for the OpenAPI document. Shapes only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from coterie.api.query import Query
from coterie.core.job import MAX_PAGE
from coterie.core.outcome import InferenceResult

Status = Literal["queued", "processing", "succeeded", "failed", "cancelled"]


class JobParameters(Query):
    """Filters of the list."""

    status: Status | None = None
    user_id: str | None = None
    limit: int = Field(20, ge=1, le=MAX_PAGE)
    after: str | None = Field(None, description="A page's `next`.")


class JobFault(BaseModel):
    """Why a job failed, as it would have been answered at once."""

    message: str
    type: str
    param: str | None
    code: str | None


class JobView(BaseModel):
    """Where a job stands. `text` is what there is so far; times are ISO 8601."""

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
    """`deleted` is false for a job that was cancelled: it can still be asked for."""

    deleted: bool


class JobList(BaseModel):
    """One page, newest first; `next` is what to send as `after`."""

    object: Literal["list"]
    data: list[JobView]
    has_more: bool
    next: str | None
