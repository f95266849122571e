"""A job is a request that is answered later: what is kept of it, where it stands, how it ended.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.events import InferenceResult
from coterie.core.request import InferenceRequest, Sampling
from coterie.core.sampling import VENDOR_DEFAULTS

QUEUED, PROCESSING = "queued", "processing"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
ACTIVE = (QUEUED, PROCESSING)
MAX_PAGE = 100


@dataclass(frozen=True, slots=True)
class JobSpec:
    """All that a run needs, kept from acceptance to end."""

    request: InferenceRequest
    # the plan goes into the result
    explain: bool = False
    # the dialect's values for what was left open
    vendor: Sampling = VENDOR_DEFAULTS


@dataclass(frozen=True, slots=True)
class JobError:
    """`code` is one of `core.errors`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """Where a job stands. Times are seconds since 1970."""

    id: str
    status: str
    tenant: str
    user_id: str
    submitted_at: float
    started_at: float | None = None
    finished_at: float | None = None
    # so far
    text: str = ""
    result: InferenceResult | None = None
    error: JobError | None = None
    # until it begins; None once it has
    estimated_wait_ms: float | None = None

    @property
    def active(self) -> bool:
        return self.status in ACTIVE


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Newest first. `after` is a page's `next`."""

    tenant: str
    status: str | None = None
    user_id: str | None = None
    limit: int = 20
    after: str | None = None


@dataclass(frozen=True, slots=True)
class JobPage:
    jobs: tuple[Job, ...]
    # None on the last page
    next: str | None
