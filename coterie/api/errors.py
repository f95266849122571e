"""How each dialect writes a `CoterieError`: status, body and retry headers.

`ROWS` has one row per error code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

from coterie.core.errors import AdmissionOffer, ContextExcess, CoterieError
from coterie.obs.log import log
from coterie.service.quotas import REQUESTS, TOKENS, QuotaState

encode = msgspec.json.Encoder().encode

# openai-python ignores a Retry-After above this
MAX_RETRY_AFTER_S = 120.0
OPENAI, ANTHROPIC, OLLAMA = "openai", "anthropic", "ollama"
# the parameters of errors about a tenant's quotas
QUOTAS = {kind: f"{kind}_per_minute" for kind in (REQUESTS, TOKENS)}
# an absolute file path, but no route of this server and no part of a URL; its last part is kept
_SERVER_PATH = re.compile(
    r"(?<![\w/:.~-])/(?!v1/|api/|health)(?:[^\s/'\":,;()]+/)+(?=[^\s/'\":,;()])"
)


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one error code is written on the wire."""

    openai_status: int
    openai_type: str
    openai_code: str | None
    anthropic_status: int
    anthropic_type: str


_BAD = "invalid_request_error"
ROWS: dict[str, ErrorRow] = {
    "invalid_request": ErrorRow(400, _BAD, None, 400, _BAD),
    "context_length_exceeded": ErrorRow(400, _BAD, "context_length_exceeded", 400, _BAD),
    "unsupported": ErrorRow(400, _BAD, "unsupported", 400, _BAD),
    "previous_response_not_found": ErrorRow(400, _BAD, "previous_response_not_found", 400, _BAD),
    "request_too_large": ErrorRow(413, _BAD, "request_too_large", 413, "request_too_large"),
    "unsupported_media_type": ErrorRow(415, _BAD, "unsupported_media_type", 415, _BAD),
    "misdirected": ErrorRow(421, _BAD, "misdirected", 421, _BAD),
    "unauthenticated": ErrorRow(401, _BAD, "invalid_api_key", 401, "authentication_error"),
    "forbidden": ErrorRow(403, "permission_error", "permission_denied", 403, "permission_error"),
    "not_found": ErrorRow(404, _BAD, "model_not_found", 404, "not_found_error"),
    "conflict": ErrorRow(409, _BAD, "conflict", 409, _BAD),
    "overloaded": ErrorRow(429, "requests", "rate_limit_exceeded", 429, "rate_limit_error"),
    "saturated": ErrorRow(529, "server_error", "saturated", 529, "overloaded_error"),
    "unavailable": ErrorRow(503, "server_error", "specialist_unavailable", 529, "overloaded_error"),
    "deadline_exceeded": ErrorRow(504, "server_error", "deadline_exceeded", 504, "timeout_error"),
    "worker_crashed": ErrorRow(500, "server_error", "worker_crashed", 500, "api_error"),
    "weights_error": ErrorRow(500, "server_error", "weights_error", 500, "api_error"),
    "internal_error": ErrorRow(500, "server_error", "internal_error", 500, "api_error"),
}
# for config_error and missing_dependency: the operator has to fix them, not the caller
_FALLBACK = ROWS["internal_error"]


# OpenAI's code for a 404 is about models; it would be wrong for these fields
_NOT_FOUND = {
    "job_id": "job_not_found",
    "receipt_id": "receipt_not_found",
    "response_id": "response_not_found",
    "file_id": "file_not_found",
    "input_file_id": "file_not_found",
    "batch_id": "batch_not_found",
    "action": "not_found",
    "intent": "not_found",
    "subject": "not_found",
    "replica": "not_found",
}


def row_of(error: CoterieError) -> ErrorRow:
    return ROWS.get(error.code, _FALLBACK)


def status_of(error: CoterieError, dialect: str) -> int:
    row = row_of(error)
    return row.anthropic_status if dialect == ANTHROPIC else row.openai_status


def public_message(error: CoterieError) -> str:
    """The message for a caller. In errors of the server, file paths are cut to the file name: the
    full path is only logged, for the operator."""
    if row_of(error).openai_status < 500:
        return error.message
    message = _SERVER_PATH.sub("", error.message)
    if message != error.message:
        log("server_fault", level="error", code=error.code, reason=error.message)
    return message


def openai_body(
    message: str,
    type_: str,
    *,
    param: str | None = None,
    code: str | None = None,
    offer: AdmissionOffer | None = None,
) -> bytes:
    error = {"message": message, "type": type_, "param": param, "code": code}
    return encode({"error": error | _offered(offer)})


def anthropic_body(
    message: str, type_: str, request_id: str, offer: AdmissionOffer | None = None
) -> bytes:
    error = {"type": type_, "message": message}
    return encode({"type": "error", "error": error | _offered(offer), "request_id": request_id})


def _offered(offer: AdmissionOffer | None) -> dict[str, dict[str, int | str]]:
    """`offer`: a request that would be admitted now; only the values that differ."""
    if offer is None:
        return {}
    given = {"max_tokens": offer.max_tokens, "deadline_ms": offer.deadline_ms, "model": offer.model}
    return {"offer": {name: value for name, value in given.items() if value is not None}}


def body_of(error: CoterieError, dialect: str, request_id: str) -> bytes:
    """The JSON body; also the payload of an error inside a stream."""
    row, offer = row_of(error), getattr(error, "offer", None)
    if dialect == OLLAMA:
        return ollama_body(_in_ollama_words(error))
    if dialect == ANTHROPIC:
        message = _in_anthropic_words(error)
        return anthropic_body(message, row.anthropic_type, request_id, offer)
    code = row.openai_code
    if row.openai_status == 404:
        code = _NOT_FOUND.get(error.param or "", code)
    kind = TOKENS if error.param == QUOTAS[TOKENS] else row.openai_type
    message = public_message(error)
    return openai_body(message, kind, param=error.param, code=code, offer=offer)


def ollama_body(message: str) -> bytes:
    return encode({"error": message})


def _in_ollama_words(error: CoterieError) -> str:
    """Clients look for these words, and then offer to fetch the model."""
    message = public_message(error)
    is_model = error.code == "not_found" and error.param == "model"
    return f"model not found: {message}" if is_model else message


def _in_anthropic_words(error: CoterieError) -> str:
    """The message in Anthropic's wording. Clients read the numbers in these two sentences and send
    a smaller request."""
    excess = getattr(error, "excess", None)
    if not isinstance(excess, ContextExcess):
        return public_message(error)
    if excess.max_tokens is None:
        return f"prompt is too long: {excess.prompt} tokens > {excess.context} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {excess.prompt} + "
        f"{excess.max_tokens} > {excess.context}, decrease input length or `max_tokens` and try "
        "again"
    )


def headers_of(error: CoterieError, dialect: str, max_queue: int | None = None) -> dict[str, str]:
    """Headers that say whether and when to retry. The clients of both vendors obey `x-should-retry`
    first; without it they retry every 408, 409, 429 and 5xx. `max_queue` is the limit that a 429
    names."""
    headers: dict[str, str] = {}
    status = status_of(error, dialect)
    if error.retry_after_s is not None:
        wait_s = min(max(error.retry_after_s, 0.001), MAX_RETRY_AFTER_S)
        headers["retry-after"] = str(math.ceil(wait_s))
        headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    if status in (409, 429) or status >= 500:
        headers["x-should-retry"] = "false" if error.retry_after_s is None else "true"
    if status == 429 and error.retry_after_s is not None:
        wait_s = min(error.retry_after_s, MAX_RETRY_AFTER_S)
        # for a user's rate limit the size of the queue is not the limit
        limit = None if error.param == "user_id" else max_queue
        # the headers of a quota come from the quota itself
        if error.param not in QUOTAS.values():
            headers.update(_rate_limit(wait_s, dialect, limit))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def quota_headers(states: Sequence[QuotaState], dialect: str) -> list[tuple[bytes, bytes]]:
    """A tenant's quotas as its vendor writes them."""
    headers: list[tuple[str, str]] = []
    for state in states:
        limit, remaining = str(state.limit), str(state.remaining)
        if dialect == ANTHROPIC:
            name = f"anthropic-ratelimit-{state.kind}"
            values = {"limit": limit, "remaining": remaining, "reset": _moment(state.reset_s)}
            headers += [(f"{name}-{key}", value) for key, value in values.items()]
        else:
            values = {"limit": limit, "remaining": remaining, "reset": duration(state.reset_s)}
            headers += [(f"x-ratelimit-{key}-{state.kind}", value) for key, value in values.items()]
    return [(name.encode(), value.encode()) for name, value in headers]


def _moment(seconds: float) -> str:
    """RFC 3339, this many seconds from now."""
    return f"{datetime.now(UTC) + timedelta(seconds=math.ceil(seconds)):%Y-%m-%dT%H:%M:%SZ}"


def _rate_limit(wait_s: float, dialect: str, max_queue: int | None) -> dict[str, str]:
    limit = {} if max_queue is None else {"limit": str(max_queue)}
    if dialect == ANTHROPIC:
        values = limit | {"remaining": "0", "reset": _moment(wait_s)}
        return {f"anthropic-ratelimit-requests-{name}": value for name, value in values.items()}
    values = limit | {"remaining": "0", "reset": duration(wait_s)}
    return {f"x-ratelimit-{name}-requests": value for name, value in values.items()}


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `250ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"


def plain(kind: str, message: str, request_id: str, dialect: str, code: str | None) -> bytes:
    """A body for errors that are not a `CoterieError`: unknown routes and methods."""
    if dialect == ANTHROPIC:
        return anthropic_body(message, kind, request_id)
    if dialect == OLLAMA:
        return ollama_body(message)
    return openai_body(message, _BAD, code=code)
