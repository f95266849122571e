"""The main loop of an engine with any transport: take commands, step, report; sleep when idle.

Reports are checked here, where they are made: a value of a wrong type is removed and fails only the
request that it belongs to, with every transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coterie.core.events import Delta, Failed, Finished, Started
from coterie.core.moe import MoeResidency
from coterie.core.plan import Admitted, Assignment, LaneState, Rejected
from coterie.core.value_check import fault_of
from coterie.obs.log import log
from coterie.workers.contract import (
    AdapterLoad,
    WorkerCommand,
    WorkerReport,
)

if TYPE_CHECKING:
    from coterie.engine.engine import Engine
    from coterie.workers.host import EngineHost


# receive(wait): all commands that have arrived; with wait=True it blocks until there is one
Receive = Callable[[bool], Sequence[WorkerCommand]]


Publish = Callable[[WorkerReport], None]


def serve(host: EngineHost, receive: Receive, publish: Publish) -> None:
    """Runs until a stop command. An exception of the engine ends the loop: its state is unknown."""
    engine, reported_version = host.engine, -1
    prefixes = PrefixReports()
    while True:
        commands = receive(not engine.has_work())
        report = WorkerReport()
        if any(command.kind == "stop" for command in commands):
            return
        for command in commands:
            _apply(host, command, report)
        # step also if nothing is left to run: the Finished of an abort comes with the next step
        for event in engine.step():
            report.take(event)
        report.lanes = prefixes.without_known(engine.lane_states(), at_once=not engine.has_work())
        report.stats = engine.stats()
        if host.adapters is not None and host.adapters.version != reported_version:
            reported_version = host.adapters.version
            report.adapters = host.adapters.loads()
        drop_bad_values(report, fault_of)
        publish(report)
        host.save_if_due()


def first_report(host: EngineHost) -> WorkerReport:
    """Before the first request: metrics show what was placed and reserved at start."""
    report = WorkerReport(lanes=host.engine.lane_states(), stats=host.engine.stats())
    drop_bad_values(report, fault_of)
    return report


# prefix digests that changed are sent this often, not with every step: they may be kilobytes
PREFIXES_EVERY_S = 0.25


class PrefixReports:
    """Leaves out of the reports the prefix digests that the gateway already has."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        # by lane: the digests that were sent, and when
        self._sent: dict[str, tuple[frozenset[bytes] | None, float]] = {}

    def without_known(
        self, states: tuple[LaneState, ...], *, at_once: bool
    ) -> tuple[LaneState, ...]:
        """`at_once`: no report follows soon."""
        now = self._now()
        return tuple(self._trimmed(state, now, at_once) for state in states)

    def _trimmed(self, state: LaneState, now: float, at_once: bool) -> LaneState:
        sent, sent_at = self._sent.get(state.lane, (None, -PREFIXES_EVERY_S))
        is_due = at_once or now - sent_at >= PREFIXES_EVERY_S
        if state.prefix_digests is sent or not is_due:
            return replace(state, prefix_digests=None)
        self._sent[state.lane] = state.prefix_digests, now
        return state


def _apply(host: EngineHost, command: WorkerCommand, report: WorkerReport) -> None:
    engine = host.engine
    if command.kind == "abort":
        engine.abort(command.request_id)
    elif command.kind == "preload":
        if host.adapters is not None:
            host.adapters.preload(command.adapters)
    elif command.kind == "residency":
        report.residency = host.residency()
    elif command.kind == "unread":
        report.rejected.append((command.request_id, Rejected("internal_error", VALUE_LOST, None)))
    elif command.assignment is not None:
        verdict = _add(engine, command.assignment)
        if isinstance(verdict, Admitted):
            report.admitted.append((command.assignment.request_id, verdict))
        else:
            report.rejected.append((command.assignment.request_id, verdict))


def _add(engine: Engine, assignment: Assignment) -> Admitted | Rejected:
    """Add a request. If the engine raises an unexpected error, only this request fails."""
    try:
        return engine.add(assignment)
    except Exception as error:
        log("request_not_added", level="error", error=error, request_id=assignment.request_id)
        engine.abort(assignment.request_id)
        return Rejected("internal_error", VALUE_LOST, None)


# the message for clients; the value itself may be text of a prompt
VALUE_LOST = "a value of this request could not be passed on; the log has its name"


# (value, its type) -> the path of the wrong part, or None
Fault = Callable[[Any, Any], str | None]


# lists of the report whose items belong to a request -> type of the items
REQUEST_LISTS: dict[str, Any] = {
    "admitted": tuple[str, Admitted],
    "rejected": tuple[str, Rejected],
    "started": Started,
    "deltas": Delta,
    "finished": Finished,
    "failed": Failed,
}


# lists whose items belong to no request: a bad item is left out, and the last report's value stays
SHARED_LISTS: dict[str, Any] = {
    "lanes": LaneState,
    "adapters": AdapterLoad,
    "residency": MoeResidency,
}


def drop_bad_values(report: WorkerReport, fault: Fault) -> None:
    """Remove the values of `report` in which `fault` finds something wrong."""
    lost: set[str] = set()
    for name, kind in REQUEST_LISTS.items():
        for item in getattr(report, name):
            if (path := fault(item, kind)) is not None:
                report.faults.append(f"{name}.{path}")
                lost.add(owner_of(item))
    for name, kind in SHARED_LISTS.items():
        items = getattr(report, name)
        wrong = [path for item in items or () if (path := fault(item, kind)) is not None]
        if wrong:
            report.faults += [f"{name}.{path}" for path in wrong]
            setattr(report, name, tuple(item for item in items if fault(item, kind) is None))
    for name, value in list(report.stats.items()):
        if (path := fault(value, float)) is not None:
            report.faults.append(f"stats.{name}{path}")
            del report.stats[name]
    if lost:
        fail_requests(report, lost)


def fail_requests(report: WorkerReport, lost: set[str]) -> None:
    """Fail the requests that lost an event and remove their other events: half an answer would look
    like a whole one."""
    for name in REQUEST_LISTS:
        kept = [item for item in getattr(report, name) if owner_of(item) not in lost]
        setattr(report, name, kept)
    # an event without a request cannot be reported to anyone
    report.failed += [
        Failed(owner, "internal_error", VALUE_LOST) for owner in sorted(lost) if owner
    ]


def owner_of(item: Any) -> str:
    """The id of the request, or "" if it cannot be read."""
    owner = item[0] if isinstance(item, tuple) else item.request_id
    return owner if type(owner) is str else ""
