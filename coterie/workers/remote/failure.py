"""What went wrong with a remote server, as one of our typed errors. The text that a server sends is
shortened, and our key is never in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

MAX_SHOWN = 300
# a longer wait is not believed
MAX_RETRY_AFTER_S = 3600.0
# after a fault of the remote server that names no time
RETRY_S = 2.0
_ODD = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")
_TOO_LONG = re.compile(r"maximum context length|context (length|window|size)|too many tokens", re.I)


class RemoteFailure(Exception):
    """The end of one request. `code` is one of `core.errors`."""

    def __init__(
        self,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        *,
        is_down: bool = False,
        kind: str = "",
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.retry_after_s = code, message, retry_after_s
        # nobody listens at its address
        self.is_down = is_down
        # for counters: timeouts, cut_answers, bad_answers
        self.kind = kind


class _Fault(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None
    param: str | None = None


class _FaultBody(msgspec.Struct):
    error: _Fault | str | None = None
    detail: Any = None
    message: str = ""


def refused(
    status: int, headers: Mapping[str, str], raw: bytes, name: str, key: str
) -> RemoteFailure:
    """The failure for an answer that is not 200."""
    fault = _fault_of(raw)
    text = shown(fault.message, key)
    wait_s = retry_after(headers)
    said = f": {text}" if text else ""
    if 300 <= status < 400:
        return RemoteFailure(
            "unavailable", f"{name} answered with a redirect, which is not followed", RETRY_S
        )
    if status in (401, 403):
        # its key is ours, not the caller's
        return RemoteFailure("unavailable", f"{name} refuses this server's key", RETRY_S)
    if status in (404, 405):
        return RemoteFailure("unavailable", f"{name} does not have this model or API{said}")
    if status == 413:
        return RemoteFailure("request_too_large", f"the request is too large for {name}{said}")
    if status in (429, 529):
        return RemoteFailure("overloaded", f"{name} is busy{said}", wait_s or RETRY_S)
    if status in (408, 504) or status >= 500:
        return RemoteFailure("unavailable", f"{name} failed ({status}){said}", wait_s or RETRY_S)
    if 400 <= status < 500:
        return RemoteFailure(_caller_code(fault), f"{name} refused the request{said}")
    return RemoteFailure("unavailable", f"{name} answered with status {status}", RETRY_S)


def in_stream(fault: Any, name: str, key: str) -> RemoteFailure:
    """The failure for an error that comes inside an answer."""
    try:
        known = msgspec.convert({"error": fault}, _FaultBody).error
    except msgspec.ValidationError:
        known = None
    found = known if isinstance(known, _Fault) else _Fault(known or "")
    text = shown(found.message, key)
    said = f": {text}" if text else ""
    status = found.code if isinstance(found.code, int) else None
    if status == 429 or found.code == "rate_limit_exceeded":
        return RemoteFailure("overloaded", f"{name} is busy{said}", RETRY_S)
    is_ours = found.type == "invalid_request_error" or (status is not None and status < 500)
    if is_ours:
        return RemoteFailure(_caller_code(found), f"{name} refused the request{said}")
    return RemoteFailure("unavailable", f"{name} failed{said}", RETRY_S)


def shown(text: str, key: str) -> str:
    """At most `MAX_SHOWN` characters on one line, without the key."""
    if key:
        text = text.replace(key, "***")
    text = _ODD.sub(" ", text).strip()
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from a Retry-After header: a number, or a date."""
    text = headers.get("retry-after", "").strip()[:64]
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            at = parsedate_to_datetime(text)
        except (ValueError, TypeError):
            return None
        if at.tzinfo is None:
            at = at.replace(tzinfo=UTC)
        seconds = (at - datetime.now(UTC)).total_seconds()
    if not 0 <= seconds < float("inf"):
        return None
    return min(seconds, MAX_RETRY_AFTER_S)


def _caller_code(fault: _Fault) -> str:
    if fault.code == "context_length_exceeded" or _TOO_LONG.search(fault.message[:2000]):
        return "context_length_exceeded"
    return "unsupported" if fault.code == "unsupported" else "invalid_request"


def _fault_of(raw: bytes) -> _Fault:
    try:
        body = msgspec.json.decode(raw, type=_FaultBody)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _Fault()
    if isinstance(body.error, _Fault):
        return body.error
    text = body.error or body.message
    if not text and isinstance(body.detail, str):
        text = body.detail
    return _Fault(text)
