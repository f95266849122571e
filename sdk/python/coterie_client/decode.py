"""Turns an answer's JSON into the dataclasses of `types.py`, by their annotations.

Fields that this version does not know are ignored, so that it works with newer servers.
"""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from coterie_client.calls import Call
from coterie_client.errors import UnexpectedAnswer

T = TypeVar("T")


def decode_answer(call: Call[T], status: int, body: bytes) -> T:
    try:
        data = json.loads(body)
    except ValueError:
        raise UnexpectedAnswer(
            f"the answer is not JSON: is a Coterie server at {call.path}?", status=status
        ) from None
    return decode(call.answer, data)


def decode(kind: type[T], data: Any) -> T:
    if not isinstance(data, dict):
        raise UnexpectedAnswer(f"the server answered {type(data).__name__} where JSON is expected")
    described: Any = kind
    hints = _hints(described)
    values: dict[str, Any] = {}
    for field in fields(described):
        if field.name in data:
            values[field.name] = _value(hints[field.name], data[field.name])
        elif field.default is MISSING:
            raise UnexpectedAnswer(
                f"the answer has no `{field.name}`: does a Coterie server of this version answer?"
            )
    return kind(**values)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [item for item in get_args(hint) if item is not type(None)]
        return _value(inner[0], value) if len(inner) == 1 else value
    if origin is list and isinstance(value, list):
        (item,) = get_args(hint)
        return [_value(item, one) for one in value]
    return decode(hint, value) if is_dataclass(hint) and isinstance(hint, type) else value
