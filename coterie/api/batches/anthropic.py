"""Anthropic's message batches: create, list, show, cancel, delete, results."""

from __future__ import annotations

import mmap
import re
import threading
import time
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from coterie.api.batches.calls import MESSAGES
from coterie.api.batches.files import FileContent, list_fields
from coterie.api.batches.openai import WINDOW_S
from coterie.api.batches.receive import LargeBody
from coterie.api.batches.types import MessageBatchQuery
from coterie.api.body import query_of, require_json
from coterie.api.door import exchange_of, new_id
from coterie.api.errors import ANTHROPIC, encode
from coterie.core.batch import (
    BATCH_CANCELLED,
    BATCH_FAILED,
    CANCELLING,
    COMPLETED,
    ENDED_STATES,
    EXPIRED,
    Batch,
    NewBatch,
)
from coterie.core.errors import InvalidRequest, RequestTooLarge
from coterie.service.batches.folder import INPUT
from coterie.service.batches.service import MESSAGE_BATCH, BatchService

JSON, JSONL = "application/json", "application/x-jsonl"
# a body is decoded at once, which takes about a millisecond for each million bytes
MAX_CREATE_BYTES = 32_000_000


_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ENDED_AT = (COMPLETED, BATCH_FAILED, EXPIRED, BATCH_CANCELLED)


class _Request(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class _Create(msgspec.Struct):
    # each is decoded by itself: a million of them would hold up the other threads
    requests: list[msgspec.Raw]


_decoder = msgspec.json.Decoder(_Create)
_request_decoder = msgspec.json.Decoder(_Request)
_one_at_a_time = threading.Lock()


class MessageBatchEndpoints:
    def __init__(self, batches: BatchService, max_body_bytes: int) -> None:
        self.batches = batches
        self.max_body_bytes = max_body_bytes

    async def create_message_batch(self, request: Request) -> Response:
        """Create a batch of messages."""
        tenant, now = exchange_of(request.scope).tenant, time.time()
        batch_id = new_id(MESSAGE_BATCH)
        async with LargeBody(request) as body:
            require_json(request)
            async with self.batches.files.receive(tenant) as upload:
                async for piece in body.pieces(min(upload.limit, MAX_CREATE_BYTES)):
                    await upload.write(piece)
                if not upload.writer.num_bytes:
                    raise InvalidRequest("the body is empty; send a JSON object")
                num_bytes = upload.writer.num_bytes
                await self.batches.files.check_room(tenant, num_bytes)
                total = await upload.writer.rewrite(batch_id + INPUT, self._write_lines)
        new = NewBatch(
            id=batch_id,
            tenant=tenant,
            dialect=ANTHROPIC,
            endpoint=MESSAGES,
            input_file="",
            created_at=now,
            expires_at=now + WINDOW_S,
            total=total,
            input_bytes=num_bytes,
        )
        return _shown(request, await self.batches.create(new))

    async def list_message_batches(self, request: Request) -> Response:
        """List your message batches, newest first."""
        query, tenant = query_of(request, MessageBatchQuery), exchange_of(request.scope).tenant
        if query.after_id is not None and query.before_id is not None:
            raise InvalidRequest("after_id: cannot be combined with before_id", param="after_id")
        page = await self.batches.page(
            tenant,
            ANTHROPIC,
            query.before_id or query.after_id,
            query.limit,
            before=query.before_id is not None,
        )
        data = [batch_fields(request, batch) for batch in page.batches]
        body = list_fields(data, page.has_more)
        del body["object"]
        return Response(encode(body), media_type=JSON)

    async def get_message_batch(self, request: Request) -> Response:
        """Show a message batch."""
        return _shown(request, await self._find(request))

    async def cancel_message_batch(self, request: Request) -> Response:
        """Cancel a message batch. What was answered is in its results."""
        tenant = exchange_of(request.scope).tenant
        batch_id = request.path_params["batch_id"]
        return _shown(request, await self.batches.cancel(batch_id, tenant, ANTHROPIC))

    async def delete_message_batch(self, request: Request) -> Response:
        """Delete a message batch that has ended, with its results."""
        tenant = exchange_of(request.scope).tenant
        batch_id = request.path_params["batch_id"]
        await self.batches.delete(batch_id, tenant, ANTHROPIC)
        return Response(encode({"id": batch_id, "type": "message_batch_deleted"}), media_type=JSON)

    async def message_batch_results(self, request: Request) -> Response:
        """Read the results of a message batch: one JSON object a line."""
        file = await self.batches.results(await self._find(request))
        content = await self.batches.files.content(file)
        return FileContent(content, file.num_bytes, JSONL)

    async def _find(self, request: Request) -> Batch:
        tenant = exchange_of(request.scope).tenant
        return await self.batches.find(request.path_params["batch_id"], tenant, ANTHROPIC)

    def _write_lines(self, source: mmap.mmap, target: BinaryIO) -> int:
        """Write each request of the body as a line. Returns how many there are."""
        requests = _read_body(source)
        most = self.batches.settings.max_requests
        if not 1 <= len(requests) <= most:
            raise InvalidRequest(f"requests: must hold 1 to {most} requests", param="requests")
        seen: set[str] = set()
        for index, raw in enumerate(requests):
            where = f"requests.{index}"
            item = _read_request(raw, where)
            if not _CUSTOM_ID.fullmatch(item.custom_id):
                raise InvalidRequest(
                    f"{where}.custom_id: must be 1 to 64 letters, digits, - and _",
                    param=f"{where}.custom_id",
                )
            if item.custom_id in seen:
                raise InvalidRequest(
                    f"{where}.custom_id: another request has the same",
                    param=f"{where}.custom_id",
                )
            seen.add(item.custom_id)
            # outside of texts, where new lines are written as \\n, they mean nothing
            params = bytes(item.params).replace(b"\n", b" ")
            if not params.startswith(b"{"):
                raise InvalidRequest(
                    f"{where}.params: must be a JSON object", param=f"{where}.params"
                )
            if len(params) > self.max_body_bytes:
                raise RequestTooLarge(
                    f"{where}.params: is larger than the limit of {self.max_body_bytes} bytes",
                    param=f"{where}.params",
                )
            target.write(b'{"custom_id":"%b","params":%b}\n' % (item.custom_id.encode(), params))
        return len(requests)


def _read_request(raw: msgspec.Raw, where: str) -> _Request:
    try:
        return _request_decoder.decode(raw)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.MsgspecError as error:
        # the text names a type and a place, never a value
        raise InvalidRequest(f"{where}: {error}", param=where) from None
    except RecursionError:
        raise InvalidRequest(f"{where}: is nested too deeply", param=where) from None


def _read_body(source: mmap.mmap) -> list[msgspec.Raw]:
    try:
        with _one_at_a_time:
            return _decoder.decode(source).requests
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.ValidationError as error:
        # the text names a type and a place, never a value
        raise InvalidRequest(f"requests: {error}", param="requests") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _shown(request: Request, batch: Batch) -> Response:
    return Response(encode(batch_fields(request, batch)), media_type=JSON)


def batch_fields(request: Request, batch: Batch) -> dict[str, Any]:
    ended_at = next((batch.times[name] for name in _ENDED_AT if name in batch.times), None)
    counts = dict.fromkeys(ENDED_STATES, 0) if batch.is_open else dict(batch.counts)
    status = "in_progress" if batch.is_open else "ended"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "canceling" if batch.status == CANCELLING else status,
        "request_counts": {"processing": batch.total if batch.is_open else 0, **counts},
        "created_at": _moment(batch.created_at),
        "expires_at": _moment(batch.expires_at),
        "ended_at": _moment(ended_at),
        "cancel_initiated_at": _moment(batch.times.get(CANCELLING)),
        "archived_at": None,
        "results_url": _results_url(request, batch),
    }


def _results_url(request: Request, batch: Batch) -> str | None:
    if batch.output_file is None:
        return None
    # behind a proxy that ends TLS
    is_https = request.headers.get("x-forwarded-proto", "").strip().lower() == "https"
    base = request.base_url.replace(scheme="https") if is_https else request.base_url
    return f"{str(base).rstrip('/')}{MESSAGES}/batches/{batch.id}/results"


def _moment(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
