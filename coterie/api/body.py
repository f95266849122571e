"""Reads a request body within its limits and turns it into a checked pydantic value.

An invalid body raises `InvalidRequest`, `RequestTooLarge` or `UnsupportedMediaType`; a client that
disconnects while it sends raises `ClientGone`.

The cost of a body is limited before it is decoded: the number of its values, texts, lists and
objects. A large body is decoded and checked on a thread. The check ends at the first error.
"""

from __future__ import annotations

import asyncio
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

from coterie.api.door import ClientGone, reads_any_type
from coterie.api.transport.whole import whole_body
from coterie.core.errors import InvalidRequest, Overloaded, RequestTooLarge, UnsupportedMediaType
from coterie.core.free_memory import return_free_memory
from coterie.core.value_check import is_deeper

# limits of one body. On a thread a value takes 0.1 us, a text or key 0.5 us (without its
# characters), a list or object 1 us; and a thread that holds the interpreter lock delays the event
# loop too.
MAX_VALUES, MAX_TEXTS, MAX_CONTAINERS = 300_000, 60_000, 30_000
# lists and objects inside each other; code that walks a value may call itself for each
MAX_BODY_DEPTH = 200
# a body up to this size is always fast
MAX_INLINE_BYTES = 16_000
# how much of a body that is too large is read and dropped
MAX_PASSED_BYTES, PASS_S = 32_000_000, 5.0
# limit for all bodies that are being received together, in multiples of the largest allowed body
MAX_BODIES_AT_ONCE = 64
# the memory of a body of at least this size, or of smaller ones that arrived together, is returned
# to the system
LARGE_BYTES = 500_000
TRIM_AFTER_S = 1.0

Model = TypeVar("Model", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")
# the subject of pydantic's sentences; we replace it with the field
_SUBJECT = re.compile(r"^\w+ should ")
_decode = msgspec.json.Decoder(strict=True).decode
# one thread, so that large bodies wait for each other and do not delay the event loop all at once
_thread = ThreadPoolExecutor(1, "bodies")


_FAIL_FAST = {"list", "set", "frozenset", "tuple"}
if "fail_fast" in core_schema.DictSchema.__annotations__:
    _FAIL_FAST.add("dict")


def _end_at_first_fault(schema: Any) -> None:
    """Let every list in `schema` stop at its first wrong item; otherwise each wrong item would be
    an error."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        # a field may also be named "type"
        if isinstance(kind, str) and kind in _FAIL_FAST:
            schema["fail_fast"] = True
        for part in schema.values():
            _end_at_first_fault(part)
    elif isinstance(schema, list):
        for part in schema:
            _end_at_first_fault(part)


class RequestBody(BaseModel):
    """Base of all bodies: unknown fields are allowed, numbers are not read from strings."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        _end_at_first_fault(schema)
        return schema


class _Receiving:
    """Counts the bytes of the bodies that are being received now."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, count: int, limit_bytes: int) -> None:
        if self.num_bytes + count > MAX_BODIES_AT_ONCE * limit_bytes:
            raise Overloaded("too many large bodies are being received", retry_after_s=1.0)
        self.num_bytes += count


receiving = _Receiving()


async def read_json(request: Request, limit_bytes: int) -> bytes:
    """The body of a request whose content type is JSON or not given; on routes that take prompts,
    of any content type."""
    if not reads_any_type(request.scope["path"]):
        require_json(request)
    return await read(request, limit_bytes)


def require_json(request: Request) -> None:
    """Refuse a content type other than JSON. A web page of any origin can post texts and forms
    without a preflight request, but not JSON: where state is changed this is a second wall behind
    `OriginCheck`."""
    kind = _header(request, b"content-type").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not _JSON_KIND.fullmatch(kind):
        hint = "; curl: add -H 'content-type: application/json'" if kind == _FORM else ""
        raise UnsupportedMediaType(f"send the body as 'content-type: application/json'{hint}")


_FORM = "application/x-www-form-urlencoded"
_JSON_KIND = re.compile(r"application/[a-z0-9.\-]+\+json")


def _header(request: Request, name: bytes) -> str:
    """The first header of this name; empty if there is none."""
    for key, value in request.scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


async def read(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Stops at once if the declared or counted size exceeds the limit."""
    declared = _header(request, b"content-length")
    # the server has checked that it is a number; the count below is the real protection
    if declared.isascii() and declared.isdigit() and int(declared[:19]) > limit_bytes:
        await pass_over(request)
        raise _too_large(limit_bytes)
    whole = whole_body(request.receive)
    if whole is not None:
        if len(whole) > limit_bytes:
            raise _too_large(limit_bytes)
        receiving.add(len(whole), limit_bytes)
        receiving.num_bytes -= len(whole)
        return whole
    chunks: list[bytes] = []
    size = 0
    seconds: float = request.app.state.body_timeout_s
    try:
        async with asyncio.timeout(seconds):
            is_last = False
            while not is_last:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk, is_last = message.get("body", b""), not message.get("more_body", False)
                if size + len(chunk) > limit_bytes:
                    if not is_last:
                        await pass_over(request)
                    raise _too_large(limit_bytes)
                receiving.add(len(chunk), limit_bytes)
                size += len(chunk)
                chunks.append(chunk)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {seconds:g} s") from None
    finally:
        if receiving.num_bytes >= LARGE_BYTES:
            _trim_soon(asyncio.get_running_loop())
        receiving.num_bytes -= size
    return b"".join(chunks)


async def pass_over(request: Request) -> None:
    """Read and drop the rest for a while: most clients send the whole body before they read the
    answer."""
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
    """Run `work` on the thread for large bodies, or here if `size` (in bytes) is small."""
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
    """Return the memory of a large body to the system later, when it is free."""

    def trim() -> None:
        del _trims[loop]
        loop.run_in_executor(_thread, return_free_memory)

    if loop not in _trims:
        _trims[loop] = loop.call_later(TRIM_AFTER_S, trim)


def decode(raw: bytes) -> Any:
    """Decode strict JSON: UTF-8 only, no NaN or Infinity, no lone surrogates, within the limits of
    a body."""
    if not raw.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    if len(raw) > MAX_INLINE_BYTES:
        _check_structure(raw)
    try:
        value = _decode(raw)
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_BODY_DEPTH and is_deeper(value, MAX_BODY_DEPTH):
        raise InvalidRequest(f"the body is nested deeper than {MAX_BODY_DEPTH}")
    return value


def _check_structure(raw: bytes) -> None:
    """Check the limits by counting bytes, before decoding: a million small values take seconds."""
    if _is_small(raw):
        return
    # text inside strings does not count: remove escapes, then every second piece is a string
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
    """Refuse the first unknown field; otherwise pydantic would make one error for each."""
    for name in payload:
        if name not in model.model_fields:
            # the name may be any text, even a prompt in the wrong place: do not repeat it
            shown = name if name.isidentifier() and len(name) <= MAX_SHOWN else ""
            known = ", ".join(model.model_fields)
            raise InvalidRequest(f"unknown field `{shown}`; there is: {known}", param=shown or None)


MAX_SHOWN = 64


def _first_fault(error: ValidationError) -> InvalidRequest:
    """The first error, with the name of its field. The value is never repeated: it may be a prompt,
    and clients log errors."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    field = faults[0]["loc"][:1]
    # every member of a union reports an error; that which read deepest, and of lists the furthest,
    # is probably the intended one
    fault = max(
        (f for f in faults if f["loc"][:1] == field),
        key=lambda f: (len(f["loc"]), [step for step in f["loc"] if isinstance(step, int)]),
    )
    # the members of a union add their names to the path; a caller knows only fields and indexes
    path = [str(step) for step in fault["loc"] if isinstance(step, int) or _is_field(step)]
    param = ".".join(path) or None
    message = _SUBJECT.sub("must ", fault["msg"].removeprefix("Value error, "))
    if fault["type"] == "missing":
        message = "is required"
    elif fault["type"] in ("model_type", "dict_type"):
        message = "must be a JSON object"
    return InvalidRequest(f"{param or 'body'}: {message}", param=param)


def _is_field(step: str) -> bool:
    """Whether the step is a field: types start with a capital or have Python's names."""
    if not step.isidentifier() or step[0].isupper():
        return False
    return step not in ("str", "int", "float", "bool")


MAX_NAME_SHOWN = 64


class QueryParameters(BaseModel):
    """Base of all query parameters; here numbers are read from text."""

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
