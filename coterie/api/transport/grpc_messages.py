"""Messages of gRPC calls: how one is read, and what it says as values of Python.

A message is read after the key of its call was checked: until then a client may send headers alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from google.protobuf import json_format, struct_pb2
from google.protobuf.message import DecodeError

from coterie.api.body import aside
from coterie.api.errors import encode
from coterie.api.native.infer_answer import Frame
from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.core.errors import InvalidRequest

# messages of one tenant that are being received at the same time; the others wait for their turn
MAX_READS = 16


def event_of(frame: Frame) -> pb.InferEvent:
    name, fields = frame
    if name == "delta":
        return pb.InferEvent(delta=pb.InferDelta(text=fields["text"]))
    return message_of(pb.InferEvent, {name: fields})


# even a schema of thousands of lines has fewer; each value takes a few microseconds on the thread
MAX_STRUCT_VALUES = 30_000
MAX_REPEATED = 10_000

Message = TypeVar("Message")


class MessageReader:
    """Reads the messages of calls: how many of a tenant at a time, and for how long."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reads: dict[str, asyncio.Semaphore] = {}

    async def read(
        self, messages: AsyncIterator[bytes], kind: type[Message], tenant: str
    ) -> Message:
        """The message of a call."""
        async with self._reads.setdefault(tenant, asyncio.Semaphore(MAX_READS)):
            try:
                async with asyncio.timeout(self._timeout_s):
                    raw = await anext(messages, None)
            except TimeoutError:
                raise InvalidRequest(
                    f"the message did not arrive within {self._timeout_s:g} s"
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
