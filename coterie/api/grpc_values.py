"""Protobuf messages as the values that JSON would have carried, and back.

One translation for every call: what is accepted and answered is decided by the same code as over
HTTP, and this only changes its clothes.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf import json_format, struct_pb2

from coterie.api.errors import encode

Message = TypeVar("Message")


def fields_of(message: Any) -> dict[str, Any]:
    """The fields that were set, by their names on the wire."""
    return {field.name: _value(value) for field, value in message.ListFields()}


def _value(value: Any) -> Any:
    if isinstance(value, struct_pb2.Struct):
        return _whole(json_format.MessageToDict(value))
    if hasattr(value, "ListFields"):
        return fields_of(value)
    return list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value


def _whole(value: Any) -> Any:
    """A Struct knows no integers; in a JSON schema 3.0 is not 3 to everybody."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def message_of(kind: type[Message], fields: bytes | dict[str, Any]) -> Message:
    """The message with these values, also as JSON; what is null is left unset."""
    text = fields if isinstance(fields, bytes) else encode(fields)
    message: Message = json_format.Parse(text, kind(), ignore_unknown_fields=True)
    return message
