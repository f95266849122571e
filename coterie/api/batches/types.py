"""Bodies, parameters and answers of files and batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from coterie.api.body import QueryParameters, RequestBody
from coterie.core.batch import MAX_BATCH_PAGE, MAX_FILE_PAGE

MIN_KEEP_S, MAX_KEEP_S = 3600, 2_592_000
MAX_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
ObjectId = Annotated[str, Field(min_length=1, max_length=128)]


class ExpiresAfter(RequestBody):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_KEEP_S, le=MAX_KEEP_S)


class FileBody(RequestBody):
    """The form of an upload. The part `file` is the file itself."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileForm(FileBody):
    """The same with the file, as the document shows it."""

    file: bytes = Field(json_schema_extra={"format": "binary"})


class BatchBody(RequestBody):
    input_file_id: ObjectId
    endpoint: str = Field(max_length=128)
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = (
        None
    )
    output_expires_after: ExpiresAfter | None = None


class FileQuery(QueryParameters):
    purpose: str | None = Field(None, max_length=64)
    limit: int = Field(MAX_FILE_PAGE, ge=1, le=MAX_FILE_PAGE)
    order: Literal["asc", "desc"] = "desc"
    after: ObjectId | None = None


class BatchQuery(QueryParameters):
    limit: int = Field(20, ge=1, le=100)
    after: ObjectId | None = None


class MessageBatchQuery(QueryParameters):
    # the vendor's client sends `beta` too
    model_config = ConfigDict(extra="ignore")

    limit: int = Field(20, ge=1, le=MAX_BATCH_PAGE)
    after_id: ObjectId | None = None
    before_id: ObjectId | None = None


class MessageBatchRequest(RequestBody):
    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    # as the body of /v1/messages
    params: dict[str, Any]


class MessageBatchBody(RequestBody):
    requests: list[MessageBatchRequest] = Field(min_length=1)


class FileObject(BaseModel):
    """A file; `status` is always `processed`."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchFault(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(BaseModel):
    object: Literal["list"]
    data: list[BatchFault]


class BatchCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchReadDetails(BaseModel):
    cached_tokens: int


class BatchMadeDetails(BaseModel):
    reasoning_tokens: int


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: BatchReadDetails
    output_tokens: int
    output_tokens_details: BatchMadeDetails
    total_tokens: int


class BatchObject(BaseModel):
    """A batch. `errors` says which lines of the input are wrong."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
        "cancelled",
    ]  # fmt: skip
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchCounts(BaseModel):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatchObject(BaseModel):
    """A message batch. The counts other than `processing` are 0 until it has ended."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchList(BaseModel):
    data: list[MessageBatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatchObject(BaseModel):
    id: str
    type: Literal["message_batch_deleted"]
