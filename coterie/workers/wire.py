"""Encodes core values as msgpack. One message type per direction and phase, so no tags are needed.

Gateway to child: a `WorkerSpec`, then `WorkerCommand`s. Child to gateway: a `LoadOutcome`, then
`WorkerReport`s.
msgspec reads a dataclass about twice as fast as Python builds one from a tuple (1.0 against 2.1
microseconds per Delta), so values are sent as maps with their field names. A message is written and
read as a whole; only if that fails, piece by piece (see loop.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from coterie.core.value_check import fault_of
from coterie.workers.contract import (
    ReplicaInfo,
    WorkerCommand,
    WorkerReport,
    WorkerSpec,
)
from coterie.workers.loop import REQUEST_LISTS, SHARED_LISTS, drop_bad_values, fail_requests


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The first message of the child: what it loaded, or the error if it could not load."""

    info: ReplicaInfo | None = None
    code: str = ""
    message: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_REPORT = msgspec.msgpack.Decoder(WorkerReport)
_HINTS = get_type_hints(WorkerReport)

# errors of a message that is not msgpack, and of a message with values of wrong types
Unreadable, Mistyped = msgspec.DecodeError, msgspec.ValidationError

encode = _ENCODER.encode
decode_spec = msgspec.msgpack.Decoder(WorkerSpec).decode
decode_command = msgspec.msgpack.Decoder(WorkerCommand).decode
decode_loaded = msgspec.msgpack.Decoder(LoadOutcome).decode


def encode_report(report: WorkerReport) -> bytes:
    """Encode a report. Values that cannot be encoded are removed from it."""
    try:
        return encode(report)
    except (TypeError, ValueError, OverflowError, RecursionError):
        drop_bad_values(report, _unwritable)
        return encode(report)


def _unwritable(value: Any, kind: Any) -> str | None:
    try:
        encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return fault_of(value, kind) or f": {type(error).__name__}"
    return None


def decode_report(message: bytes) -> WorkerReport:
    """Raises `Unreadable` only if nothing in the message can be read."""
    try:
        return _REPORT.decode(message)
    except msgspec.ValidationError:
        return _piecewise(msgspec.msgpack.decode(message))


def _piecewise(loose: Any) -> WorkerReport:
    if not isinstance(loose, dict):
        raise Unreadable("a report is a map")
    report, lost = WorkerReport(), set[str]()
    for name in ("faults", "stats", *SHARED_LISTS):
        try:
            setattr(report, name, msgspec.convert(loose.get(name), _HINTS[name]))
        except msgspec.ValidationError as error:
            report.faults.append(f"{name}: {error}")
    for name, kind in REQUEST_LISTS.items():
        items = loose.get(name)
        if not isinstance(items, list):
            raise Unreadable(f"{name} is a list")
        for item in items:
            try:
                getattr(report, name).append(msgspec.convert(item, kind))
            except msgspec.ValidationError as error:
                report.faults.append(f"{name}: {error}")
                lost.add(_owner(item))
    if lost:
        fail_requests(report, lost)
    return report


def _owner(item: Any) -> str:
    if isinstance(item, dict):
        item = (item.get("request_id"),)
    return item[0] if isinstance(item, list | tuple) and item and isinstance(item[0], str) else ""


def unread(message: bytes) -> WorkerCommand:
    """The request id of a command that `decode_command` refuses."""
    return WorkerCommand("unread", _owner(msgspec.msgpack.decode(message)))
