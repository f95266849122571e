"""One bad value costs one request: it is taken out of the report, and whose it was fails.

Used where a report is made (by type), where it is written (what msgpack refuses) and where it is
read. Whoever fails here still runs in the worker: the gateway aborts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.core.events import Delta, Failed, Finished, Started
from coterie.core.plan import Admitted, LaneState, Rejected
from coterie.workers.base import AdapterLoad, Report

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


def sift(report: Report, fault: Fault) -> None:
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


def fail(report: Report, lost: set[str]) -> None:
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
