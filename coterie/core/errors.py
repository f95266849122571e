"""All errors, as one tree with stable codes.

    CoterieError
    +-- InvalidRequest            the caller's input; names the parameter
    |   +-- ContextLengthExceeded prompt (plus output) does not fit the context
    |   +-- UnsupportedFeature    valid for the vendor, not built here
    |   +-- UnknownResponse       the response that is to be continued is not kept
    +-- RequestTooLarge           body over the limit
    +-- UnsupportedMediaType      a body that does not say it is JSON
    +-- MisdirectedRequest        sent to a host name that is not this server's
    +-- Unauthenticated           no key, or a wrong one
    +-- Forbidden                 a key without the right
    +-- NotFound                  no such model, job or route
    +-- Conflict                  the change was made already, or is being made
    +-- Overloaded                no room now: queue, deadline or budget; retry later
    |   +-- Saturated             no place can be promised soon
    |       +-- Drained           nothing new begins at the specialist until an operator says so
    +-- Unavailable               no healthy replica can serve this now
    +-- DeadlineExceeded          the request's own deadline passed
    +-- WorkerCrashed             the request ran in repeated crashes, or as a remote server died
    +-- WeightsError              a model file is missing, broken or unknown
    +-- ConfigError               a setting is wrong; names the key
    +-- MissingDependency         an optional package is not installed
    +-- InternalError             our bug

An error says what went wrong. How an API writes it is decided in `api/`, by `code`.
"""

from __future__ import annotations

from dataclasses import dataclass


class CoterieError(Exception):
    """Base class. `code` is stable and documented; `retry_after_s` is None when a retry cannot
    help."""

    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ContextExcess:
    """By how much a request exceeds its context, in tokens. `max_tokens` is None if the prompt
    alone is too long."""

    prompt: int
    max_tokens: int | None
    context: int


class InvalidRequest(CoterieError):
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """`excess` holds the numbers of the message, for dialects that write their own message."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        excess: ContextExcess | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.excess = excess


class UnsupportedFeature(InvalidRequest):
    code = "unsupported"


class UnknownResponse(InvalidRequest):
    code = "previous_response_not_found"


class RequestTooLarge(CoterieError):
    code = "request_too_large"


class UnsupportedMediaType(CoterieError):
    code = "unsupported_media_type"


class MisdirectedRequest(CoterieError):
    code = "misdirected"


class Unauthenticated(CoterieError):
    code = "unauthenticated"


class Forbidden(CoterieError):
    code = "forbidden"


class NotFound(CoterieError):
    code = "not_found"


class Conflict(CoterieError):
    code = "conflict"


@dataclass(frozen=True, slots=True)
class AdmissionOffer:
    """A smaller request that would be admitted now. Only what differs is given."""

    max_tokens: int | None = None
    deadline_ms: int | None = None
    # another specialist, for the request as it is
    model: str | None = None


class Overloaded(CoterieError):
    """`offer`: what the caller could send instead; None if nothing would help."""

    code = "overloaded"
    offer: AdmissionOffer | None = None


class Saturated(Overloaded):
    """More load than can be promised a place soon, then without a time to retry; or no specialist
    may answer now."""

    code = "saturated"


class Drained(Saturated):
    """Callers are told the same as by Saturated; what is for another specialist need not wait."""


class Unavailable(CoterieError):
    code = "unavailable"


class DeadlineExceeded(CoterieError):
    code = "deadline_exceeded"


class WorkerCrashed(CoterieError):
    code = "worker_crashed"


class WeightsError(CoterieError):
    code = "weights_error"


class ConfigError(CoterieError):
    code = "config_error"


class MissingDependency(CoterieError):
    code = "missing_dependency"


class InternalError(CoterieError):
    code = "internal_error"


_LEAVES = (
    InvalidRequest,
    ContextLengthExceeded,
    UnsupportedFeature,
    UnknownResponse,
    RequestTooLarge,
    UnsupportedMediaType,
    MisdirectedRequest,
    Unauthenticated,
    Forbidden,
    NotFound,
    Conflict,
    Overloaded,
    Saturated,
    Unavailable,
    DeadlineExceeded,
    WorkerCrashed,
    WeightsError,
    ConfigError,
    MissingDependency,
    InternalError,
)

ERRORS: dict[str, type[CoterieError]] = {leaf.code: leaf for leaf in _LEAVES}


def from_code(code: str, message: str, *, retry_after_s: float | None = None) -> CoterieError:
    """The error that a `Failed` event or a `Rejected` answer describes."""
    return ERRORS.get(code, InternalError)(message, retry_after_s=retry_after_s)
