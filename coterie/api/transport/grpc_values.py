"""Protobuf messages as the values that JSON would have carried, and back.

One translation for every call: what is accepted and answered is decided by the same code as over
HTTP, and this only changes its clothes.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from google.protobuf import json_format, struct_pb2

from coterie.api.errors import encode
from coterie.core.errors import InvalidRequest

# a schema of thousands of lines has fewer; each costs the thread a few microseconds
MAX_STRUCT_VALUES = 30_000
MAX_REPEATED = 10_000

Message = TypeVar("Message")


def fields_of(message: Any) -> dict[str, Any]:
    """The fields that were set, by their names on the wire."""
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
    """A value of a Struct as JSON would have carried it. It knows no integers; in a JSON schema
    3.0 is not 3 to everybody. JSON knows no NaN."""
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
    """The message with these values, also as JSON; what is null is left unset."""
    text = fields if isinstance(fields, bytes) else encode(fields)
    message: Message = json_format.Parse(text, kind(), ignore_unknown_fields=True)
    return message
