"""A job is a request that is answered later: its stored request, its state and its result.

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
    """Everything that is needed to run the job, stored until it ends."""

    request: InferenceRequest
    # include the plan in the result
    explain: bool = False
    # the dialect's defaults for values that were not given
    vendor: Sampling = VENDOR_DEFAULTS
    # the result holds every delta and the usage, for a dialect that splits the answer into parts
    keeps_deltas: bool = False


@dataclass(frozen=True, slots=True)
class JobError:
    """`code` is one of `core.errors`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """The state of a job. Times are seconds since 1970."""

    id: str
    status: str
    tenant: str
    user_id: str
    submitted_at: float
    started_at: float | None = None
    finished_at: float | None = None
    # the text generated so far
    text: str = ""
    result: InferenceResult | None = None
    error: JobError | None = None
    # None once the job has started
    estimated_wait_ms: float | None = None

    @property
    def active(self) -> bool:
        return self.status in ACTIVE


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Results are sorted newest first. `after` is the `next` of the page before."""

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
