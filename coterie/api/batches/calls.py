"""Answers the requests of batches through the endpoints that answer them over HTTP, and writes the
lines of the files with results.

A request of a batch has the tenant of its batch and the lowest priority; its body is checked,
planned, admitted and rendered as every other one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message

from coterie.api import errors
from coterie.api.body import aside, check, decode
from coterie.api.dialect import CallerInfo
from coterie.api.door import Exchange, log_exchange, log_fault, new_id
from coterie.api.openai.parse import parse_chat, parse_completion
from coterie.api.openapi import RouteRow
from coterie.core.batch import (
    REQUEST_CANCELED,
    REQUEST_ERRORED,
    REQUEST_SUCCEEDED,
    Batch,
    BatchTokens,
)
from coterie.core.errors import (
    CoterieError,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    Unavailable,
)
from coterie.service.batches.batch_tables import ClaimedRequest, EndedRequest
from coterie.service.batches.calls import BadLine, RequestAnswer

MESSAGES = "/v1/messages"
# the endpoints of requests in an input file, where the server has them
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_CUSTOM_ID = 512
LOWEST_PRIORITY = 0
# what a line has around its body
LINE_BYTES = 8192
_CALLER = CallerInfo("", 0.0)
# endpoint -> what the dialect itself checks of a body
_PARSERS: Mapping[str, Callable[[Any], object]] = {
    "/v1/chat/completions": lambda body: parse_chat(body, _CALLER, ""),
    "/v1/completions": lambda body: parse_completion(body, _CALLER, ""),
}
# fields that ask for another kind of answer
_NOT_IN_A_BATCH = ("stream", "background")


_NOTHING = msgspec.Raw(b"")


class _Line(msgspec.Struct):
    """One line of an input file."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = _NOTHING
    params: msgspec.Raw = _NOTHING


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The usage of an answer, as any of the endpoints writes it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answered(msgspec.Struct):
    usage: _Usage | None = None


_line_decoder = msgspec.json.Decoder(_Line)
_usage_decoder = msgspec.json.Decoder(_Answered)
_encode = msgspec.json.Encoder().encode


class EndpointCalls:
    """`rows`: the routes of the server."""

    def __init__(self, app: ASGIApp, rows: Sequence[RouteRow], max_body_bytes: int) -> None:
        self._app = app
        self._rows = {row.path: row for row in rows if row.methods == ("POST",)}
        self._max_body_bytes = max_body_bytes
        self.max_line_bytes = max_body_bytes + LINE_BYTES

    @property
    def endpoints(self) -> Collection[str]:
        return [path for path in ENDPOINTS if path in self._rows]

    def check_line(self, batch: Batch, raw: bytes) -> str:
        line = _read_line(raw)
        if batch.endpoint == MESSAGES:
            # its errors are results; the shape was checked when the batch was created
            return str(line.custom_id)
        custom_id = line.custom_id
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            raise BadLine(
                "invalid_custom_id",
                f"custom_id: must be a text of 1 to {MAX_CUSTOM_ID} characters", "custom_id",
            )  # fmt: skip
        if line.method != "POST":
            raise BadLine("invalid_method", "method: must be POST", "method")
        if line.url != batch.endpoint:
            message = f"url: must be {batch.endpoint}, the endpoint of the batch"
            raise BadLine("mismatched_url", message, "url")
        if line.body is _NOTHING:
            raise BadLine("missing_body", "body: is required", "body")
        try:
            self._check_body(batch.endpoint, bytes(line.body))
        except CoterieError as error:
            param = f"body.{error.param}" if error.param else "body"
            raise BadLine("invalid_body", f"body: {error.message}", param) from error
        return custom_id

    def _check_body(self, endpoint: str, raw: bytes) -> None:
        if len(raw) > self._max_body_bytes:
            raise RequestTooLarge(f"is larger than the limit of {self._max_body_bytes} bytes")
        payload = decode(raw)
        _refuse_other_kinds(payload)
        row = self._rows[endpoint]
        if row.body is not None:
            body = check(row.body, payload)
            parser = _PARSERS.get(endpoint)
            if parser is not None:
                parser(body)

    async def answer(self, batch: Batch, request: ClaimedRequest, raw: bytes) -> RequestAnswer:
        exchange = Exchange(new_id("req_"), batch.dialect, time.monotonic(), tenant=batch.tenant)
        exchange.max_priority = LOWEST_PRIORITY
        line = _read_line(raw)
        body = line.params if batch.endpoint == MESSAGES else line.body
        row = self._rows[batch.endpoint]
        call = _Call(self._app, row, exchange, bytes(body))
        try:
            await call.run()
        except (Overloaded, Unavailable):
            raise
        except CoterieError as error:
            call.refuse(error)
        except Exception as error:
            log_fault(error, exchange.request_id)
            call.refuse(InternalError("the server failed to answer; the log has the request id"))
        finally:
            log_exchange(exchange, call.scope, "POST")
        is_good = call.status == 200
        return RequestAnswer(
            _result_line(batch, request.custom_id, request.id, call),
            REQUEST_SUCCEEDED if is_good else REQUEST_ERRORED,
            _tokens(call.body) if is_good else BatchTokens(),
        )

    def error_line(self, batch: Batch, request: ClaimedRequest, error: CoterieError) -> bytes:
        exchange = Exchange(new_id("req_"), batch.dialect, time.monotonic(), tenant=batch.tenant)
        call = _Call(self._app, self._rows[batch.endpoint], exchange, b"")
        call.refuse(error)
        return _result_line(batch, request.custom_id, request.id, call)

    def unanswered_line(self, batch: Batch, request: EndedRequest) -> bytes:
        is_cancelled = request.state == REQUEST_CANCELED
        if batch.dialect == errors.ANTHROPIC:
            return _line({"custom_id": request.custom_id, "result": {"type": request.state}})
        error = _EXPIRED if not is_cancelled else _CANCELLED
        row = {
            "id": _request_name(request.id), "custom_id": request.custom_id, "response": None,
            "error": error,
        }  # fmt: skip
        return _line(row)


_EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
_CANCELLED = {
    "code": "batch_cancelled",
    "message": "This request was not executed because the batch was cancelled.",
}


def _request_name(number: int) -> str:
    return f"batch_req_{number:024x}"


def _read_line(raw: bytes) -> _Line:
    try:
        return _line_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"the line is not a JSON object: {error}") from None


def _refuse_other_kinds(payload: Any) -> None:
    if not isinstance(payload, dict):
        raise InvalidRequest("must be a JSON object")
    for name in _NOT_IN_A_BATCH:
        if payload.get(name):
            raise InvalidRequest(f"{name}: is not available in a batch", param=name)


class _Call:
    """One request and its answer, without a connection."""

    def __init__(self, app: ASGIApp, row: RouteRow, exchange: Exchange, body: bytes) -> None:
        self._row, self._body = row, body
        self._is_sent = False
        self.exchange = exchange
        self.status, self.body = 0, b""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self.scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": row.path, "raw_path": row.path.encode(), "query_string": b"",
            "headers": headers, "app": app, "route": row, "coterie.exchange": exchange,
        }  # fmt: skip

    async def run(self) -> None:
        _refuse_other_kinds(await aside(len(self._body), decode, self._body))
        request = Request(self.scope, self._receive, self._send)
        response = await self._row.endpoint(request)
        await response(self.scope, self._receive, self._send)

    def refuse(self, error: CoterieError) -> None:
        exchange = self.exchange
        self.status = exchange.status = errors.status_of(error, exchange.dialect)
        self.body = errors.body_of(error, exchange.dialect, exchange.request_id)

    async def _receive(self) -> Message:
        if self._is_sent:
            # nobody can disconnect
            await asyncio.Event().wait()
        self._is_sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = self.exchange.status = message["status"]
        else:
            self.body += message.get("body", b"")


# characters that some readers take for the end of a line; in JSON they are only in texts
_LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]


def _line(row: dict[str, Any]) -> bytes:
    """One line of a file with results."""
    raw = _encode(row)
    for char, escaped in _LINE_ENDS:
        raw = raw.replace(char, escaped)
    return raw


def _result_line(batch: Batch, custom_id: str, number: int, call: _Call) -> bytes:
    body = msgspec.Raw(call.body)
    if batch.dialect == errors.ANTHROPIC:
        kind = "message" if call.status == 200 else "error"
        state = REQUEST_SUCCEEDED if call.status == 200 else REQUEST_ERRORED
        return _line({"custom_id": custom_id, "result": {"type": state, kind: body}})
    response = {
        "status_code": call.status, "request_id": call.exchange.request_id, "body": body,
    }  # fmt: skip
    row = {
        "id": _request_name(number), "custom_id": custom_id, "response": response, "error": None,
    }  # fmt: skip
    return _line(row)


def _tokens(body: bytes) -> BatchTokens:
    try:
        usage = _usage_decoder.decode(body).usage
    except msgspec.MsgspecError:
        usage = None
    if usage is None:
        return BatchTokens()
    read = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    made = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return BatchTokens(
        usage.prompt_tokens or usage.input_tokens,
        read.cached_tokens,
        usage.completion_tokens or usage.output_tokens,
        made.reasoning_tokens,
    )
