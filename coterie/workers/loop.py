"""The life of an engine behind any transport: take commands, step, report; sleep when idle.

Knows neither sockets nor threads: `receive` brings commands, `publish` takes reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from coterie.core.plan import Admitted
from coterie.workers.base import Command, Report

if TYPE_CHECKING:
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
        publish(report)
        host.tend()


def _apply(host: Host, command: Command, report: Report) -> None:
    engine = host.engine
    if command.kind == "abort":
        engine.abort(command.request_id)
    elif command.kind == "preload":
        if host.adapters is not None:
            host.adapters.preload(command.adapters)
    elif command.assignment is not None:
        verdict = engine.add(command.assignment)
        if isinstance(verdict, Admitted):
            report.admitted.append((command.assignment.request_id, verdict))
        else:
            report.rejected.append((command.assignment.request_id, verdict))
