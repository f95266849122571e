"""Spans as OTLP: the protobuf message `ExportTraceServiceRequest`, written by hand.

The message has a dozen fields here. The numbers are those of opentelemetry/proto/trace/v1 and
collector/trace/v1; tests read what is written here with the official package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

# Span.SpanKind
INTERNAL, SERVER, CLIENT = 1, 2, 3
_STATUS_ERROR = 2
# Span.flags: whether the parent is known to be in another process, and whether it is
_KNOWS_PARENT, _REMOTE_PARENT = 0x100, 0x200
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = struct.Struct("<Q").pack


class SpanRecord(NamedTuple):
    """One span that has ended; times are nanoseconds since 1970, ids hexadecimal."""

    trace_id: str
    span_id: str
    # empty if it has none
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: Attributes
    trace_flags: int
    state: str = ""
    has_remote_parent: bool = False
    is_error: bool = False


def export_request(spans: Iterable[bytes], resource: Attributes, version: str) -> bytes:
    """The body of a request to `/v1/traces`, of spans that `encoded` has written. `version`: of the
    program that made them."""
    scope = _text(1, "coterie") + _text(2, version)
    scoped = _message(1, scope) + b"".join([_message(2, span) for span in spans])
    described = _message(1, _attributes(1, resource))
    return _message(1, described + _message(2, scoped))


def rejected_spans(answer: bytes) -> int:
    """How many spans a receiver that answered 200 did not take; 0 if the answer cannot be read."""
    try:
        for field, partial in _fields(answer):
            if field == 1 and isinstance(partial, bytes):
                for inner, value in _fields(partial):
                    if inner == 1 and isinstance(value, int):
                        return value
    except (IndexError, ValueError):
        pass
    return 0


def encoded(span: SpanRecord) -> bytes:
    parts = [
        _message(1, bytes.fromhex(span.trace_id)),
        _message(2, bytes.fromhex(span.span_id)),
    ]
    if span.state:
        parts.append(_text(3, span.state))
    if span.parent_id:
        parts.append(_message(4, bytes.fromhex(span.parent_id)))
    flags = span.trace_flags | _KNOWS_PARENT
    if span.has_remote_parent:
        flags |= _REMOTE_PARENT
    parts += [
        _text(5, span.name),
        _integer(6, span.kind),
        _tag(7, _FIXED64) + _FIXED(span.start_ns),
        _tag(8, _FIXED64) + _FIXED(span.end_ns),
        _attributes(9, span.attributes),
    ]
    if span.is_error:
        parts.append(_message(15, _integer(3, _STATUS_ERROR)))
    parts.append(_tag(16, _FIXED32) + struct.pack("<I", flags))
    return b"".join(parts)


def _attributes(number: int, attributes: Attributes) -> bytes:
    return b"".join(
        [
            _message(number, _name(name) + _message(2, _value(value)))
            for name, value in attributes.items()
        ]
    )


def _value(value: AttributeValue) -> bytes:
    if isinstance(value, str):
        return _text(1, value)
    if isinstance(value, bool):
        return _integer(2, int(value))
    if isinstance(value, int):
        return _integer(3, value)
    if isinstance(value, float):
        return _tag(4, _FIXED64) + struct.pack("<d", value)
    return _message(5, b"".join([_message(1, _text(1, item)) for item in value]))


@lru_cache(maxsize=256)
def _name(name: str) -> bytes:
    return _text(1, name)


@lru_cache(maxsize=256)
def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _integer(number: int, value: int) -> bytes:
    return _tag(number, _VARINT) + _varint(value & (2**64 - 1))


def _text(number: int, value: str) -> bytes:
    # half of a surrogate pair cannot be written
    return _message(number, value.encode(errors="replace"))


def _message(number: int, data: bytes) -> bytes:
    return _tag(number, _BYTES) + _varint(len(data)) + data


_SMALL = tuple(number.to_bytes() for number in range(0x80))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SMALL[value]
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _fields(data: bytes) -> Iterable[tuple[int, int | bytes]]:
    """The fields of a message. Raises IndexError or ValueError if it is none."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag & 7 == _VARINT:
            number, at = _read_varint(data, at)
            yield tag >> 3, number
            continue
        if tag & 7 == _BYTES:
            size, at = _read_varint(data, at)
        elif tag & 7 in (_FIXED64, _FIXED32):
            size = 8 if tag & 7 == _FIXED64 else 4
        else:
            raise ValueError("no field of a message")
        if at + size > len(data):
            raise ValueError("the message is cut")
        yield tag >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")
