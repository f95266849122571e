"""All errors, as one tree.

CoterieError
+-- BadRequest        a field is wrong; `param` names it
+-- Unauthorized      no key, or a wrong one
+-- Forbidden         this key has no right to it
+-- NotFound          no such model, expert or job
+-- Conflict          the change was made already
+-- RateLimited       retry after `retry_after_s`
+-- Unavailable       models are still loading, or no worker is healthy
+-- ServerError       the server failed
+-- Timeout           no answer in time
+-- ConnectionFailed  no server was reached, or the connection broke
+-- UnexpectedAnswer  an answer that is not from a Coterie server
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


class CoterieError(Exception):
    """Base class. `code` is the server's stable code; `status` is None if there was no answer."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class BadRequest(CoterieError):
    pass


class Unauthorized(CoterieError):
    pass


class Forbidden(CoterieError):
    pass


class NotFound(CoterieError):
    pass


class Conflict(CoterieError):
    pass


class RateLimited(CoterieError):
    pass


class Unavailable(CoterieError):
    pass


class ServerError(CoterieError):
    pass


class Timeout(CoterieError):
    pass


class ConnectionFailed(CoterieError):
    pass


class UnexpectedAnswer(CoterieError):
    pass


BY_STATUS: dict[int, type[CoterieError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    429: RateLimited,
    503: Unavailable,
    504: Timeout,
}
# an error inside a stream has no HTTP status
BY_CODE: dict[str, type[CoterieError]] = {
    "invalid_api_key": Unauthorized,
    "permission_denied": Forbidden,
    "model_not_found": NotFound,
    "not_found": NotFound,
    "conflict": Conflict,
    "rate_limit_exceeded": RateLimited,
    "specialist_unavailable": Unavailable,
    "deadline_exceeded": Timeout,
}


def of_answer(status: int, headers: Mapping[str, str], body: bytes) -> CoterieError:
    """The error in an error response. `headers` must ignore case."""
    error = _error_object(body)
    kind = BY_STATUS.get(status, ServerError if status >= 500 else BadRequest)
    return kind(
        error.get("message") or f"the server answered {status}",
        code=error.get("code"),
        param=error.get("param"),
        status=status,
        request_id=headers.get("x-request-id"),
        retry_after_s=retry_after_s(headers),
    )


def of_frame(data: Mapping[str, Any], request_id: str | None) -> CoterieError:
    """The error that ended a stream."""
    error = data.get("error") or {}
    code = error.get("code")
    wrong = error.get("type") == "invalid_request_error"
    kind = BY_CODE.get(code or "", BadRequest if wrong else ServerError)
    message = error.get("message") or "the server ended the stream with an error"
    return kind(message, code=code, param=error.get("param"), request_id=request_id)


def _error_object(body: bytes) -> dict[str, Any]:
    """The error object in the body; empty if the body is not ours, for instance from a proxy."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until a retry makes sense; `retry-after-ms` is more exact."""
    exact, rough = headers.get("retry-after-ms"), headers.get("retry-after")
    if exact is not None and _NUMBER.fullmatch(exact):
        return float(exact) / 1000
    if rough is None:
        return None
    if _NUMBER.fullmatch(rough):
        return float(rough)
    try:
        return max(0.0, parsedate_to_datetime(rough).timestamp() - time())
    except ValueError:
        return None
