"""The life of an engine behind any transport: take commands, step, report; sleep when idle.

Knows neither sockets nor threads: `receive` brings commands, `publish` takes reports. What a report
holds is checked here, where it is made: on any transport a value of a wrong type fails its request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coterie.core.plain import fault_of
from coterie.core.plan import Admitted, Assignment, Rejected
from coterie.obs.trace import log
from coterie.workers.base import Command, Report
from coterie.workers.sift import TOLD, sift

if TYPE_CHECKING:
    from coterie.engine.engine import Engine
    from coterie.workers.host import Host

# receive(wait): everything that is there; with wait=True it blocks until something is
Receive = Callable[[bool], Sequence[Command]]
Publish = Callable[[Report], None]


def serve(host: Host, receive: Receive, publish: Publish) -> None:
    """Runs until a stop command. What the engine raises ends the loop: its state is unknown."""
    engine, told = host.engine, -1
    while True:
        commands = receive(not engine.has_work())
        report = Report()
        if any(command.kind == "stop" for command in commands):
            return
        for command in commands:
            _apply(host, command, report)
        # an abort leaves its Finished for the next step, also when nothing else is left to run
        for event in engine.step():
            report.take(event)
        report.lanes = engine.lane_states()
        report.stats = engine.stats()
        if host.adapters is not None and host.adapters.version != told:
            told = host.adapters.version
            report.adapters = host.adapters.loads()
        sift(report, fault_of)
        publish(report)
        host.tend()


def _apply(host: Host, command: Command, report: Report) -> None:
    engine = host.engine
    if command.kind == "abort":
        engine.abort(command.request_id)
    elif command.kind == "preload":
        if host.adapters is not None:
            host.adapters.preload(command.adapters)
    elif command.kind == "unread":
        report.rejected.append((command.request_id, Rejected("internal_error", TOLD, None)))
    elif command.assignment is not None:
        verdict = _add(engine, command.assignment)
        if isinstance(verdict, Admitted):
            report.admitted.append((command.assignment.request_id, verdict))
        else:
            report.rejected.append((command.assignment.request_id, verdict))


def _add(engine: Engine, assignment: Assignment) -> Admitted | Rejected:
    """An engine refuses what it cannot run; what it did not foresee costs this request alone."""
    try:
        return engine.add(assignment)
    except Exception as error:
        log("request_not_added", level="error", error=error, request_id=assignment.request_id)
        engine.abort(assignment.request_id)
        return Rejected("internal_error", TOLD, None)
