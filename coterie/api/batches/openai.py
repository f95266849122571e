"""OpenAI's batches: create, list, show, cancel."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.batches.files import list_fields
from coterie.api.batches.types import BatchBody, BatchQuery
from coterie.api.body import parse, query_of
from coterie.api.door import exchange_of, new_id
from coterie.api.errors import OPENAI, encode
from coterie.core.batch import (
    BATCH_CANCELLED,
    BATCH_FAILED,
    BATCH_INPUT,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FINALIZING,
    IN_PROGRESS,
    REQUEST_ERRORED,
    REQUEST_SUCCEEDED,
    Batch,
    LineFault,
    NewBatch,
)
from coterie.core.errors import InvalidRequest
from coterie.service.batches.service import BatchService

JSON = "application/json"
WINDOW, WINDOW_S = "24h", 24 * 3600.0
_TIMES = (
    IN_PROGRESS, FINALIZING, COMPLETED, BATCH_FAILED, EXPIRED, CANCELLING, BATCH_CANCELLED,
)  # fmt: skip


class BatchEndpoints:
    def __init__(self, batches: BatchService, max_body_bytes: int) -> None:
        self.batches = batches
        self.max_body_bytes = max_body_bytes

    async def create_batch(self, request: Request) -> Response:
        """Create a batch from an uploaded file of requests."""
        body = await parse(request, BatchBody, self.max_body_bytes)
        tenant, now = exchange_of(request.scope).tenant, time.time()
        self.batches.check_endpoint(body.endpoint)
        file = await self.batches.files.find(body.input_file_id, tenant, "input_file_id")
        if file.purpose != BATCH_INPUT:
            raise InvalidRequest(
                "input_file_id: the file was not uploaded with the purpose 'batch'",
                param="input_file_id",
            )
        await self.batches.files.check_room(tenant, 0)
        keep = body.output_expires_after
        new = NewBatch(
            id=new_id("batch_"),
            tenant=tenant,
            dialect=OPENAI,
            endpoint=body.endpoint,
            input_file=file.id,
            input_bytes=file.num_bytes,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
            output_keep_s=None if keep is None else float(keep.seconds),
        )
        return _shown(await self.batches.create(new, file))

    async def list_batches(self, request: Request) -> Response:
        """List your batches, newest first."""
        query, tenant = query_of(request, BatchQuery), exchange_of(request.scope).tenant
        page = await self.batches.page(tenant, OPENAI, query.after, query.limit)
        data = [batch_fields(batch) for batch in page.batches]
        return Response(encode(list_fields(data, page.has_more)), media_type=JSON)

    async def get_batch(self, request: Request) -> Response:
        """Show a batch."""
        tenant = exchange_of(request.scope).tenant
        return _shown(await self.batches.find(request.path_params["batch_id"], tenant, OPENAI))

    async def cancel_batch(self, request: Request) -> Response:
        """Cancel a batch. What was answered is in its output file."""
        tenant = exchange_of(request.scope).tenant
        return _shown(await self.batches.cancel(request.path_params["batch_id"], tenant, OPENAI))


def _shown(batch: Batch) -> Response:
    return Response(encode(batch_fields(batch)), media_type=JSON)


def batch_fields(batch: Batch) -> dict[str, Any]:
    faults = [_fault_fields(fault) for fault in batch.faults]
    tokens = batch.tokens
    times = {name: batch.times.get(name) for name in _TIMES}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **{f"{name}_at": None if at is None else int(at) for name, at in times.items()},
        "request_counts": {
            "total": batch.total,
            "completed": batch.counts[REQUEST_SUCCEEDED],
            "failed": batch.counts[REQUEST_ERRORED],
        },
        "usage": {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.prompt + tokens.completion,
        },
        "metadata": batch.metadata,
    }


def _fault_fields(fault: LineFault) -> dict[str, Any]:
    return {
        "code": fault.code,
        "message": fault.message,
        "param": fault.param,
        "line": fault.line,
    }
