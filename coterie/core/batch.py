"""A batch is a file of requests that are answered later, as one; a file holds what goes in or comes
out.

Values only. Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = (
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
)
COMPLETED, BATCH_FAILED, EXPIRED, BATCH_CANCELLED = "completed", "failed", "expired", "cancelled"
OPEN_STATUSES = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)

# of one request of a batch
PENDING, RUNNING = "pending", "running"
REQUEST_SUCCEEDED, REQUEST_ERRORED = "succeeded", "errored"
REQUEST_CANCELED, REQUEST_EXPIRED = "canceled", "expired"
ENDED_STATES = (REQUEST_SUCCEEDED, REQUEST_ERRORED, REQUEST_CANCELED, REQUEST_EXPIRED)

# what a file is for
BATCH_INPUT, BATCH_OUTPUT = "batch", "batch_output"
# results of a message batch: found by the batch alone
MESSAGE_RESULTS = "message_batch_results"
LISTED_PURPOSES = (BATCH_INPUT, BATCH_OUTPUT)

MAX_BATCH_PAGE, MAX_FILE_PAGE = 1000, 10_000


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file; its bytes are in the folder of files under its id."""

    id: str
    tenant: str
    purpose: str
    # as the caller named it: shown, and never part of a path
    filename: str
    num_bytes: int
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """Tokens of all answers of a batch."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a line of an input file cannot be run. `line` counts from 1."""

    code: str
    message: str
    line: int
    param: str | None = None


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch as its caller asks for it."""

    id: str
    tenant: str
    # "openai" or "anthropic"
    dialect: str
    endpoint: str
    # the id of the uploaded file; empty if the requests came with the call
    input_file: str
    created_at: float
    expires_at: float
    # requests, where they have been counted already
    total: int = 0
    # size of the input, which is kept until the batch has ended
    input_bytes: int = 0
    metadata: Mapping[str, str] | None = None
    # lifetime of the files with results; None = as the settings say
    output_keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The state of a batch."""

    id: str
    tenant: str
    dialect: str
    endpoint: str
    input_file: str
    status: str
    created_at: float
    expires_at: float
    total: int
    output_file: str | None = None
    error_file: str | None = None
    metadata: Mapping[str, str] | None = None
    output_keep_s: float | None = None
    # status -> when it began
    times: Mapping[str, float] = field(default_factory=dict)
    # state -> how many requests ended in it
    counts: Mapping[str, int] = field(default_factory=dict)
    tokens: BatchTokens = BatchTokens()
    faults: tuple[LineFault, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES


@dataclass(frozen=True, slots=True)
class BatchPage:
    batches: tuple[Batch, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class FilePage:
    files: tuple[StoredFile, ...]
    has_more: bool
