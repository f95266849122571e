"""Requests that move between worker processes, without processes: who may have what, and when."""

from __future__ import annotations

import asyncio
from typing import cast

from coterie.core.events import Delta, Started
from coterie.core.plan import Admitted, Rejected
from coterie.workers.contract import WorkerCommand, WorkerReport
from coterie.workers.supervisor import SILENT_S, ProcessReplica
from coterie.workers.worker_process import WorkerProcess
from tests.helpers.serving.worker_requests import Listener, assign, tiny_spec


class SilentChild:
    """A worker process that reads commands and reports only what the test says."""

    def __init__(self) -> None:
        self.commands: list[WorkerCommand] = []
        self.can_take = True

    def send(self, command: WorkerCommand) -> bool:
        if self.can_take:
            self.commands.append(command)
        return self.can_take


def give_child(replica: ProcessReplica) -> SilentChild:
    child = SilentChild()
    replica._child = cast(WorkerProcess, child)
    return child


def test_a_request_does_not_return_to_a_process_that_may_have_reported_it() -> None:
    """The first worker falls silent with the request, the second has no room for it, the first is
    heard again: what it had sent before it was told to stop is no part of a new run."""

    async def test() -> None:
        first, second = ProcessReplica(tiny_spec("r0")), ProcessReplica(tiny_spec("r1"))
        old, other = give_child(first), give_child(second)
        listener = Listener()
        submitted = asyncio.create_task(first.submit(assign("a"), listener, lambda: None))
        await asyncio.sleep(0)
        first._take(
            WorkerReport(admitted=[("a", Admitted("r0"))], started=[Started("a", "r0", 4, 0)])
        )
        assert isinstance(await submitted, Admitted)
        first._take(WorkerReport(deltas=[Delta("a", 0, "x", (1,))]))
        first._silent_s = SILENT_S
        assert first.move("a", second) and old.commands[-1].kind == "abort"
        assert other.commands[-1].assignment is not None
        assert other.commands[-1].assignment.emitted == ((1,),)
        other.can_take = False
        second._take(WorkerReport(rejected=[("a", Rejected("overloaded", "full", 60.0))]))
        first._silent_s = 0.0
        assert first.healthy()
        moved = second.move("a", first)
        # it was on its way when the first worker was told to stop
        first._take(WorkerReport(deltas=[Delta("a", 0, "y", (2,))]))
        assert listener.tokens() == [1] and not moved
        # a new process has nothing of it
        new = give_child(first)
        assert second.move("a", first) and new.commands[-1].request_id == "a"
        first._take(WorkerReport(deltas=[Delta("a", 0, "y", (2,))]))
        assert listener.tokens() == [1, 2]
        for replica in (first, second):
            replica._child = None
            await replica.close()

    asyncio.run(test())
