"""Reads a request body within its limits and turns it into a checked pydantic value.

Every way a body can be wrong leaves as an `InvalidRequest`, `RequestTooLarge` or
`UnsupportedMediaType`; a client that leaves while it sends is `ClientGone`.

What a body costs is bounded before it is decoded: the number of its values, texts, and lists and
objects. What is large is decoded and checked on a thread, and the first fault ends the checking.
"""

from __future__ import annotations

import asyncio
import ctypes
import difflib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema
from starlette.requests import ClientDisconnect, Request

from coterie.api.door import ClientGone
from coterie.core.errors import InvalidRequest, Overloaded, RequestTooLarge, UnsupportedMediaType

# of one body, a text's own characters aside: a value costs a thread 0.1 us, a text or key 0.5 us, a
# list or object 1 us, and what holds the interpreter holds up the event loop too
MAX_VALUES, MAX_TEXTS, MAX_CONTAINERS = 300_000, 60_000, 30_000
# up to here a body cannot be slow, whatever it holds
MAX_INLINE_BYTES = 16_000
# of a body that is refused for its size
MAX_PASSED_BYTES, PASS_S = 32_000_000, 5.0
# bodies that are being received, all together, in multiples of the largest
MAX_BODIES_AT_ONCE = 64
# memory of bodies from this size on goes back to the system
LARGE_BYTES = 500_000
TRIM_AFTER_S = 1.0

Model = TypeVar("Model", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")
# the subject of pydantic's sentences; ours is the field
_SUBJECT = re.compile(r"^\w+ should ")
_decode = msgspec.json.Decoder(strict=True).decode
# one, so that large bodies wait for each other and never all run beside the event loop
_thread = ThreadPoolExecutor(1, "bodies")


_FAIL_FAST = {"list", "set", "frozenset", "tuple"}
if "fail_fast" in core_schema.DictSchema.__annotations__:
    _FAIL_FAST.add("dict")


def _end_at_first_fault(schema: Any) -> None:
    """Every list in `schema` stops at its first wrong item: each would be an error of its own."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        # a field may be called so too
        if isinstance(kind, str) and kind in _FAIL_FAST:
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first_fault(part)
    elif isinstance(schema, list):
        for part in schema:
            _end_at_first_fault(part)


class RequestBody(BaseModel):
    """Base of every body: unknown fields pass, numbers are never guessed from strings."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        _end_at_first_fault(schema)
        return schema


class _Receiving:
    """Bytes of the bodies that are being received now."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, count: int, limit_bytes: int) -> None:
        if self.num_bytes + count > MAX_BODIES_AT_ONCE * limit_bytes:
            raise Overloaded("too many large bodies are being received", retry_after_s=1.0)
        self.num_bytes += count


_receiving = _Receiving()


async def read_json(request: Request, limit_bytes: int) -> bytes:
    """The body of a request that says it is JSON, or says nothing.

    A page of any origin may post texts and forms without asking first; it may not post JSON.
    """
    given = request.headers.get("content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not _JSON_KIND.fullmatch(kind):
        hint = "; curl: add -H 'content-type: application/json'" if kind == _FORM else ""
        raise UnsupportedMediaType(f"send the body as 'content-type: application/json'{hint}")
    return await read(request, limit_bytes)


_FORM = "application/x-www-form-urlencoded"
_JSON_KIND = re.compile(r"application/[a-z0-9.\-]+\+json")


async def read(request: Request, limit_bytes: int) -> bytes:
    """The whole body. A declared or counted size over the limit stops the reading at once."""
    declared = request.headers.get("content-length", "")
    # the server has checked that it is a number; the count below is what protects us
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > limit_bytes:
        await _pass_over(request)
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    seconds: float = request.app.state.body_timeout_s
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                if size + len(chunk) > limit_bytes:
                    await _pass_over(request)
                    raise _too_large(limit_bytes)
                _receiving.add(len(chunk), limit_bytes)
                size += len(chunk)
                chunks.append(chunk)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {seconds:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        _receiving.num_bytes -= size
    return b"".join(chunks)


async def _pass_over(request: Request) -> None:
    """Reads on for a while: most clients send all of a body before they read the answer."""
    if "expect" in request.headers:
        return
    left = MAX_PASSED_BYTES
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(PASS_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than the limit of {limit_bytes} bytes")


async def aside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work` on the thread for large bodies; here when `size`, in bytes, is small."""
    if size <= MAX_INLINE_BYTES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_thread, lambda: work(*args, **kwargs))
    finally:
        if size >= LARGE_BYTES:
            _trim_soon(loop)


_trims: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}


def _trim_soon(loop: asyncio.AbstractEventLoop) -> None:
    """What a large body took is free by then, and the C library would keep it."""

    def trim() -> None:
        del _trims[loop]
        loop.run_in_executor(_thread, _trim)

    if loop not in _trims:
        _trims[loop] = loop.call_later(TRIM_AFTER_S, trim)


def _trim() -> None:
    # of glibc alone
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def decode(raw: bytes) -> Any:
    """Strict JSON: UTF-8 only, no NaN or Infinity, no lone surrogates; no more than a body may
    hold."""
    if not raw.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if len(raw) > MAX_INLINE_BYTES:
        _check_structure(raw)
    try:
        return _decode(raw)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _check_structure(raw: bytes) -> None:
    """Counts on the bytes: decoding a million small values takes seconds."""
    if _is_small(raw):
        return
    # what stands in texts does not count: away with escapes, then every other piece is a text
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') // 2 > MAX_TEXTS:
        raise RequestTooLarge(f"the body holds more than {MAX_TEXTS} texts and names")
    outside = b"".join(plain.split(b'"')[::2])
    if outside.count(b"[") + outside.count(b"{") > MAX_CONTAINERS:
        raise RequestTooLarge(f"the body holds more than {MAX_CONTAINERS} lists and objects")
    if outside.count(b",") > MAX_VALUES:
        raise RequestTooLarge(f"the body holds more than {MAX_VALUES} values")


def _is_small(raw: bytes) -> bool:
    containers = raw.count(b"[") + raw.count(b"{")
    return (
        containers <= MAX_CONTAINERS
        and raw.count(b'"') // 2 <= MAX_TEXTS
        and raw.count(b",") <= MAX_VALUES
    )


async def parse(request: Request, model: type[Model], limit_bytes: int) -> Model:
    raw = await read_json(request, limit_bytes)
    return await aside(len(raw), lambda: check(model, decode(raw)))


def check(model: type[Model], payload: Any) -> Model:
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    if model.model_config.get("extra") == "forbid":
        _refuse_unknown(model, payload)
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        raise _first_fault(error) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _refuse_unknown(model: type[BaseModel], payload: dict[str, Any]) -> None:
    """The first alone: each would be an error of its own."""
    for name in payload:
        if name not in model.model_fields:
            # a name may be anything, also a prompt in the wrong place
            shown = name if name.isidentifier() and len(name) <= MAX_SHOWN else ""
            known = ", ".join(model.model_fields)
            raise InvalidRequest(f"unknown field `{shown}`; there is: {known}", param=shown or None)


MAX_SHOWN = 64


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


MAX_NAME_SHOWN = 64


class QueryParameters(BaseModel):
    """Base of every set of parameters; numbers are read from their text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Parameters = TypeVar("Parameters", bound=QueryParameters)


def query_of(request: Request, model: type[Parameters]) -> Parameters:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in model.model_fields:
            if model.model_config.get("extra") == "ignore":
                continue
            near = difflib.get_close_matches(name[:MAX_NAME_SHOWN], model.model_fields, 1, 0.0)[0]
            raise InvalidRequest(
                f"unknown parameter `{name[:MAX_NAME_SHOWN]}`; did you mean `{near}`?",
                param=name[:MAX_NAME_SHOWN],
            )
        if name in given:
            raise InvalidRequest(f"{name}: is given twice", param=name)
        given[name] = value
    return check(model, given)
