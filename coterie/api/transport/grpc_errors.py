"""How gRPC says that something went wrong: a status for each error code, and metadata behind it."""

from __future__ import annotations

import math

import grpc

from coterie.core.errors import CoterieError

_Code = grpc.StatusCode
STATUSES = {
    "invalid_request": _Code.INVALID_ARGUMENT,
    "context_length_exceeded": _Code.INVALID_ARGUMENT,
    "unsupported": _Code.INVALID_ARGUMENT,
    "request_too_large": _Code.RESOURCE_EXHAUSTED,
    "unsupported_media_type": _Code.INVALID_ARGUMENT,
    "misdirected": _Code.PERMISSION_DENIED,
    "unauthenticated": _Code.UNAUTHENTICATED,
    "forbidden": _Code.PERMISSION_DENIED,
    "not_found": _Code.NOT_FOUND,
    "conflict": _Code.ALREADY_EXISTS,
    "overloaded": _Code.RESOURCE_EXHAUSTED,
    "unavailable": _Code.UNAVAILABLE,
    "deadline_exceeded": _Code.DEADLINE_EXCEEDED,
}


def status_of(error: CoterieError) -> grpc.StatusCode:
    """What is not in the table is ours to mend."""
    return STATUSES.get(error.code, _Code.INTERNAL)


def details_of(error: CoterieError, request_id: str) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: ASCII alone."""
    details = {"coterie-code": error.code, "x-request-id": request_id}
    if error.param is not None and error.param.isascii() and error.param.isprintable():
        details["coterie-param"] = error.param
    if error.retry_after_s is not None:
        details["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    return tuple(details.items())
