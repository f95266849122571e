"""Messages of gRPC calls: how one is read, and what it says as values of Python.

A message is read after the key of its call was checked: until then a client may send headers alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import unquote

from google.protobuf import json_format, struct_pb2
from google.protobuf.message import DecodeError

from coterie.api.body import aside
from coterie.api.errors import encode
from coterie.api.native.infer_answer import Frame
from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.api.transport.connections import address_of
from coterie.core.errors import InvalidRequest, Overloaded

# messages of one tenant that are being received at the same time; the others wait for their turn
MAX_READS = 16
# a message that keeps another address waiting has this long
GRACE_S = 1.0
RETRY_S = 1.0


def event_of(frame: Frame) -> pb.InferEvent:
    name, fields = frame
    if name == "delta":
        return pb.InferEvent(delta=pb.InferDelta(text=fields["text"]))
    return message_of(pb.InferEvent, {name: fields})


# even a schema of thousands of lines has fewer; each value takes a few microseconds on the thread
MAX_STRUCT_VALUES = 30_000
MAX_REPEATED = 10_000

Message = TypeVar("Message")


class ReadPlaces:
    """So many messages of a tenant are received at a time; without keys everybody is one tenant.
    Addresses share the places: a free one goes to the address that waits and has fewest, and of
    one that has more than its share the oldest message ends after GRACE_S."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._num_free, self._timeout_s = size, timeout_s
        # address -> the messages that are being received, the oldest first
        self._held: dict[str, dict[asyncio.Timeout, None]] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def held(self, address: str) -> AsyncIterator[None]:
        """Raises TimeoutError after `timeout_s` with a place, or earlier if it is taken away, and
        Overloaded after as long a wait for one."""
        await self._wait(address)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                self._held.setdefault(address, {})[limit] = None
                try:
                    yield
                finally:
                    self._remove(address, limit)
        finally:
            self._give_on()

    async def _wait(self, address: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        self._end_one_for(address)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append(turn)
        try:
            async with asyncio.timeout(self._timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._give_on()
            else:
                self._forget(address, turn)
            if isinstance(error, TimeoutError):
                message = f"{MAX_READS} messages are being received; try again later"
                raise Overloaded(message, retry_after_s=RETRY_S) from None
            raise

    def _give_on(self) -> None:
        while self._waiting:
            address = min(self._waiting, key=lambda one: len(self._held.get(one, ())))
            turn = self._waiting[address][0]
            self._forget(address, turn)
            # it may have been given up just now
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    def _forget(self, address: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(address, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(address, None)

    def _end_one_for(self, address: str) -> None:
        """For one more of `address`, if another one has more than both would have."""
        most = max(self._held, key=lambda one: len(self._held[one]), default=address)
        own = len(self._held.get(address, ())) + len(self._waiting.get(address, ()))
        if len(self._held.get(most, ())) <= own + 1:
            return
        oldest = next(iter(self._held[most]))
        # it is not ended twice
        self._remove(most, oldest)
        when = oldest.when()
        if when is not None and not oldest.expired():
            now = asyncio.get_running_loop().time()
            oldest.reschedule(max(when - self._timeout_s + GRACE_S, now))

    def _remove(self, address: str, limit: asyncio.Timeout) -> None:
        holders = self._held.get(address, {})
        holders.pop(limit, None)
        if not holders:
            self._held.pop(address, None)


def caller_address(context: Any) -> str:
    """The address of a call's client to count by; `ipv4:1.2.3.4:5` and `ipv6:%5B::1%5D:5` to
    gRPC."""
    host = context.peer().partition(":")[2].rpartition(":")[0]
    return address_of((unquote(host).strip("[]"),))


class MessageReader:
    """Reads the messages of calls: how many of a tenant at a time, and for how long."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._places: dict[str, ReadPlaces] = {}

    async def read(
        self, messages: AsyncIterator[bytes], kind: type[Message], tenant: str, address: str
    ) -> Message:
        """The message of a call."""
        places = self._places.get(tenant)
        if places is None:
            places = self._places[tenant] = ReadPlaces(MAX_READS, self._timeout_s)
        try:
            async with places.held(address):
                raw = await anext(messages, None)
        except TimeoutError:
            raise InvalidRequest(
                f"the message did not arrive within {self._timeout_s:g} s, or kept others waiting"
            ) from None
        if raw is None:
            raise InvalidRequest("the call has no message")
        return await aside(len(raw), decoded, kind, raw)


def decoded(kind: type[Message], raw: bytes) -> Message:
    """Raises InvalidRequest if the bytes are no message of this kind."""
    try:
        message: Message = kind.FromString(raw)  # type: ignore[attr-defined]
    except DecodeError:
        raise InvalidRequest(f"the bytes are no message of the type {kind.__name__}") from None
    return message


def fields_of(message: Any) -> dict[str, Any]:
    """The fields that are set, by their names on the wire."""
    return {field.name: _value(value) for field, value in message.ListFields()}


def _value(value: Any) -> Any:
    if isinstance(value, struct_pb2.Struct):
        left = [MAX_STRUCT_VALUES]
        return {name: _plain(item, left) for name, item in value.fields.items()}
    if hasattr(value, "ListFields"):
        return fields_of(value)
    if not hasattr(value, "__len__") or isinstance(value, str):
        return value
    if len(value) > MAX_REPEATED:
        raise InvalidRequest(f"a field holds more than {MAX_REPEATED} values")
    return list(value)


def _plain(value: struct_pb2.Value, left: list[int]) -> Any:
    """A value of a Struct as JSON would have it. A Struct has no integers, but some readers of a
    JSON schema distinguish 3.0 from 3. JSON has no NaN. `left`: how many more values are
    allowed."""
    left[0] -= 1
    if left[0] < 0:
        raise InvalidRequest(f"a structure holds more than {MAX_STRUCT_VALUES} values")
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            raise InvalidRequest("a structure holds a number that is not finite")
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return {name: _plain(item, left) for name, item in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_plain(item, left) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def message_of(kind: type[Message], fields: bytes | dict[str, Any]) -> Message:
    """The message with these fields, given as a dict or as JSON. Null fields are left unset."""
    text = fields if isinstance(fields, bytes) else encode(fields)
    message: Message = json_format.Parse(text, kind(), ignore_unknown_fields=True)
    return message
