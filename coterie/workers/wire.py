"""Core values as msgpack. One message type per direction and phase, so no tags travel.

Gateway to child: a `WorkerSpec`, then `WorkerCommand`s. Child to gateway: a `LoadOutcome`, then
`WorkerReport`s.
msgspec reads a dataclass about twice as fast as Python builds one from a tuple (1.0 against 2.1
microseconds per Delta), so values travel as maps under their own field names. A message is written
and read whole; only where that fails, piece by piece (see sift.py).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from coterie.core.events import Delta, Failed, Finished, Started
from coterie.core.plan import Admitted, LaneState, Rejected
from coterie.core.value_check import fault_of
from coterie.workers.contract import (
    AdapterLoad,
    ReplicaInfo,
    WorkerCommand,
    WorkerReport,
    WorkerSpec,
)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The child's first word: what it loaded, or the error that kept it from loading."""

    info: ReplicaInfo | None = None
    code: str = ""
    message: str = ""


# in front of the WorkerSpec on the child's standard input
LENGTH = struct.Struct("<Q")

_ENCODER = msgspec.msgpack.Encoder()
_REPORT = msgspec.msgpack.Decoder(WorkerReport)
_HINTS = get_type_hints(WorkerReport)

# what a message raises that is no msgpack at all, and one whose values are not of their types
Unreadable, Mistyped = msgspec.DecodeError, msgspec.ValidationError

encode = _ENCODER.encode
decode_spec = msgspec.msgpack.Decoder(WorkerSpec).decode
decode_command = msgspec.msgpack.Decoder(WorkerCommand).decode
decode_loaded = msgspec.msgpack.Decoder(LoadOutcome).decode


def encode_report(report: WorkerReport) -> bytes:
    """Whatever is in it: what cannot be written is taken out of it."""
    try:
        return encode(report)
    except (TypeError, ValueError, OverflowError, RecursionError):
        sift(report, _unwritable)
        return encode(report)


def _unwritable(value: Any, kind: Any) -> str | None:
    try:
        encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return fault_of(value, kind) or f": {type(error).__name__}"
    return None


def decode_report(message: bytes) -> WorkerReport:
    """Raises `Unreadable` only where nothing of it can be read."""
    try:
        return _REPORT.decode(message)
    except msgspec.ValidationError:
        return _piecewise(msgspec.msgpack.decode(message))


def _piecewise(loose: Any) -> WorkerReport:
    if not isinstance(loose, dict):
        raise Unreadable("a report is a map")
    report, lost = WorkerReport(), set[str]()
    for name in ("faults", "stats", *COMMON):
        try:
            setattr(report, name, msgspec.convert(loose.get(name), _HINTS[name]))
        except msgspec.ValidationError as error:
            report.faults.append(f"{name}: {error}")
    for name, kind in OWNED.items():
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
        fail(report, lost)
    return report


def _owner(item: Any) -> str:
    if isinstance(item, dict):
        item = (item.get("request_id"),)
    return item[0] if isinstance(item, list | tuple) and item and isinstance(item[0], str) else ""


def unread(message: bytes) -> WorkerCommand:
    """What is left of a command that `decode_command` refuses: whose it is."""
    return WorkerCommand("unread", _owner(msgspec.msgpack.decode(message)))


# what a client is told; the value itself may be anybody's text
TOLD = "a value of this request could not be passed on; the log has its name"

# (value, its type) -> the path to what is wrong with it, or None
Fault = Callable[[Any, Any], str | None]

# what belongs to a request, by the report's lists
OWNED: dict[str, Any] = {
    "admitted": tuple[str, Admitted],
    "rejected": tuple[str, Rejected],
    "started": Started,
    "deltas": Delta,
    "finished": Finished,
    "failed": Failed,
}
# what belongs to nobody: left out, and the last report's stands
COMMON: dict[str, Any] = {"lanes": LaneState, "adapters": AdapterLoad}


def sift(report: WorkerReport, fault: Fault) -> None:
    """Leave in `report` only what `fault` finds nothing wrong with."""
    lost: set[str] = set()
    for name, kind in OWNED.items():
        for item in getattr(report, name):
            if (found := fault(item, kind)) is not None:
                report.faults.append(f"{name}.{found}")
                lost.add(owner_of(item))
    for name, kind in COMMON.items():
        items = getattr(report, name)
        wrong = [found for item in items or () if (found := fault(item, kind)) is not None]
        if wrong:
            report.faults += [f"{name}.{found}" for found in wrong]
            setattr(report, name, tuple(item for item in items if fault(item, kind) is None))
    for name, value in list(report.stats.items()):
        if (found := fault(value, float)) is not None:
            report.faults.append(f"stats.{name}{found}")
            del report.stats[name]
    if lost:
        fail(report, lost)


def fail(report: WorkerReport, lost: set[str]) -> None:
    """Nothing else is told of a request that lost an event: half an answer would pass for whole."""
    for name in OWNED:
        kept = [item for item in getattr(report, name) if owner_of(item) not in lost]
        setattr(report, name, kept)
    # of an event without an owner there is nobody to tell
    report.failed += [Failed(owner, "internal_error", TOLD) for owner in sorted(lost) if owner]


def owner_of(item: Any) -> str:
    """The request's id, or nothing where even that cannot be told."""
    found = item[0] if isinstance(item, tuple) else item.request_id
    return found if type(found) is str else ""
