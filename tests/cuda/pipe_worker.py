"""A worker process at the end of a pipe, where ZeroMQ and msgspec are not installed.

The loop of the worker (`loop.serve`), the engine and the record of what each client has
(`InFlightRequests`) are those of every replica. Only the messages travel otherwise than in
`supervisor.ProcessReplica`, and the process is started again at once, without back-off.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from coterie.core.plan import Admitted, Assignment, Rejected
from coterie.workers.contract import Sink, WorkerCommand, WorkerReport, WorkerSpec
from coterie.workers.in_flight import InFlightRequests
from tests.cuda.suite import ROOT


class PipeReplica:
    def __init__(self, spec: WorkerSpec) -> None:
        self._spec, self._requests = spec, InFlightRequests()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._again: asyncio.Task[None] | None = None
        self.starts, self.start_s = 0, 0.0

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        begin = time.perf_counter()
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "tests.cuda.pipe_worker", str(theirs.fileno())]
        child = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        self._child, self.starts = child, self.starts + 1
        ours.send(self._spec)
        loaded = await asyncio.to_thread(ours.recv)
        assert loaded == "loaded", loaded
        self._pipe, self.start_s = ours, time.perf_counter() - begin
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read)

    async def submit(self, assignment: Assignment, sink: Sink) -> Admitted | Rejected:
        verdict = self._requests.open(assignment, sink)
        self._send(assignment)
        return await verdict

    def stats(self) -> dict[str, float]:
        return {**self._requests.stats(), "restarts": float(self.starts - 1)}

    async def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.send(WorkerCommand("stop"))
        if self._child is not None:
            await asyncio.to_thread(self._child.wait)
        if pipe is not None:
            pipe.close()

    def _send(self, assignment: Assignment) -> None:
        command = WorkerCommand("submit", assignment.request_id, assignment)
        try:
            if self._pipe is None:
                raise BrokenPipeError
            self._pipe.send(command)
        except OSError:
            self._requests.postpone(assignment.request_id)

    def _read(self) -> None:
        assert self._pipe is not None
        try:
            while self._pipe.poll():
                self._requests.take(self._pipe.recv())
        except (EOFError, OSError):
            self._died()

    def _died(self) -> None:
        assert self._pipe is not None and self._child is not None
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        self._pipe = None
        self._child.wait()
        self._requests.crashed()
        self._again = asyncio.ensure_future(self._start_again())

    async def _start_again(self) -> None:
        try:
            await self.start()
        except Exception as error:
            self._requests.fail_all("unavailable", f"the worker did not start again: {error}")
            raise
        for assignment in self._requests.resume():
            self._send(assignment)


def main(descriptor: int) -> None:
    """In the worker process."""
    from coterie.workers.host import build_engine
    from coterie.workers.loop import serve

    pipe: Connection[Any, Any] = Connection(descriptor)

    def receive(wait: bool) -> Sequence[WorkerCommand]:
        commands = [pipe.recv()] if wait else []
        while pipe.poll():
            commands.append(pipe.recv())
        return commands

    def publish(report: WorkerReport) -> None:
        pipe.send(report)

    # the other end is gone
    with suppress(EOFError, BrokenPipeError):
        host = build_engine(pipe.recv())
        try:
            pipe.send("loaded")
            serve(host, receive, publish)
        finally:
            host.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
