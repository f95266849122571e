"""Reads a request body within its limits and turns it into a checked pydantic value.

Every way a body can be wrong leaves as an `InvalidRequest` or `RequestTooLarge`; a client that
leaves while it sends is `ClientGone`. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from coterie.api.exchange import ClientGone
from coterie.core.errors import InvalidRequest, RequestTooLarge

READ_TIMEOUT_S = 60.0

Model = TypeVar("Model", bound=BaseModel)
# the subject of pydantic's sentences; ours is the field
_SUBJECT = re.compile(r"^\w+ should ")
_decode = msgspec.json.Decoder(strict=True).decode


class Body(BaseModel):
    """Base of every body: unknown fields pass, numbers are never guessed from strings."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


async def read(request: Request, limit_bytes: int) -> bytes:
    """The whole body. A declared or counted size over the limit stops the reading at once."""
    declared = request.headers.get("content-length", "")
    # the server has checked that it is a number; the count below is what protects us
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {READ_TIMEOUT_S:.0f} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than the limit of {limit_bytes} bytes")


def decode(raw: bytes) -> Any:
    """Strict JSON: UTF-8 only, no NaN or Infinity, no lone surrogates."""
    if not raw.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        return _decode(raw)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


async def parse(request: Request, model: type[Model], limit_bytes: int) -> Model:
    return check(model, decode(await read(request, limit_bytes)))


def check(model: type[Model], payload: Any) -> Model:
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        raise _first_fault(error) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _first_fault(error: ValidationError) -> InvalidRequest:
    """The first fault in the words of its field. The value itself is never repeated: it may be
    a prompt, and errors are logged by clients."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    field = faults[0]["loc"][:1]
    # each member of a union complains; the one that came furthest is the one that was meant
    fault = max((f for f in faults if f["loc"][:1] == field), key=lambda f: len(f["loc"]))
    # the members of a union add their own names to the path; a caller knows fields and indexes
    path = [str(step) for step in fault["loc"] if isinstance(step, int) or _is_field(step)]
    param = ".".join(path) or None
    message = _SUBJECT.sub("must ", fault["msg"].removeprefix("Value error, "))
    if fault["type"] == "missing":
        message = "is required"
    elif fault["type"] in ("model_type", "dict_type"):
        message = "must be a JSON object"
    return InvalidRequest(f"{param or 'body'}: {message}", param=param)


def _is_field(step: str) -> bool:
    """Types are named in capitals or like Python's own; fields never are."""
    if not step.isidentifier() or step[0].isupper():
        return False
    return step not in ("str", "int", "float", "bool")
