"""An engine on a thread of this process, for tests and programs that embed Coterie.

It cannot be restarted: if the engine raises, its requests fail and the replica is unhealthy.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence

from coterie.core.errors import CoterieError, InternalError
from coterie.core.moe import MoeResidency
from coterie.core.plan import AdapterChoice, Admitted, Assignment, LaneState, Rejected
from coterie.obs.log import log
from coterie.workers.contract import (
    AdapterLoad,
    OnOutage,
    Replica,
    ReplicaInfo,
    ResidencyReports,
    Sink,
    WorkerCommand,
    WorkerReport,
    WorkerSpec,
    merged_states,
    never_moved,
)
from coterie.workers.in_flight import InFlightRequests
from coterie.workers.loop import first_report, serve

CLOSE_S = 30.0


class InprocReplica:
    def __init__(self, spec: WorkerSpec) -> None:
        self.name = spec.name
        self._spec = spec
        self._requests = InFlightRequests()
        self._commands: queue.SimpleQueue[WorkerCommand] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lanes: dict[str, LaneState] = {}
        self._stats: dict[str, float] = {}
        self._adapters: tuple[AdapterLoad, ...] = ()
        self._residency = ResidencyReports()
        self._running = False
        self._draining = False

    async def start(self) -> ReplicaInfo:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[ReplicaInfo] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(loop, ready), name=f"engine-{self.name}", daemon=True
        )
        self._thread.start()
        info = await ready
        self._running = True
        return info

    async def submit(
        self, assignment: Assignment, sink: Sink, on_outage: OnOutage = never_moved
    ) -> Admitted | Rejected:
        if not self.healthy():
            return Rejected("unavailable", f"replica {self.name} takes no requests", None)
        verdict = self._requests.open(assignment, sink)
        self._commands.put(WorkerCommand("submit", assignment.request_id, assignment))
        try:
            return await verdict
        except asyncio.CancelledError:
            await self.abort(assignment.request_id)
            raise

    def move(self, request_id: str, to: Replica) -> bool:
        # the thread of an engine is not started again: its requests have failed
        return False

    async def abort(self, request_id: str) -> None:
        if self._requests.drop(request_id):
            self._commands.put(WorkerCommand("abort", request_id))

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        self._commands.put(WorkerCommand("preload", adapters=tuple(adapters)))

    def lane_states(self) -> dict[str, LaneState]:
        return self._lanes

    def in_flight(self) -> int:
        return len(self._requests)

    def stats(self) -> dict[str, float]:
        return {**self._stats, **self._requests.stats(), "restarts": 0.0}

    def adapter_loads(self) -> tuple[AdapterLoad, ...]:
        return self._adapters

    def residency(self) -> MoeResidency | None:
        if self._running and self._residency.may_ask():
            self._commands.put(WorkerCommand("residency"))
        return self._residency.last

    def healthy(self) -> bool:
        return self.state() == "up"

    def state(self) -> str:
        if self._draining:
            return "draining"
        if self._running:
            return "up"
        # a thread that has ended is not started again
        return "starting" if self._thread is not None and self._thread.is_alive() else "failing"

    def retry_after_s(self) -> float:
        return 1.0

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        await self._requests.drain(self.name, timeout_s)

    async def close(self) -> None:
        self._draining = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(WorkerCommand("stop"))
            await asyncio.to_thread(thread.join, CLOSE_S)
        self._running = False
        self._requests.fail_all("unavailable", "the server was shut down")

    def _run(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[ReplicaInfo]) -> None:
        def publish(report: WorkerReport) -> None:
            loop.call_soon_threadsafe(self._take, report)

        try:
            from coterie.workers.host import build_engine

            host = build_engine(self._spec)
            loop.call_soon_threadsafe(self._loaded, ready, host.info, first_report(host))
            serve(host, self._receive, publish)
            host.close()
        except Exception as error:
            # if the loop was closed without close(), no one waits for the report
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._died, ready, error)

    def _receive(self, wait: bool) -> Sequence[WorkerCommand]:
        commands = [self._commands.get()] if wait else []
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                return commands

    def _loaded(
        self, ready: asyncio.Future[ReplicaInfo], info: ReplicaInfo, report: WorkerReport
    ) -> None:
        self._take(report)
        if not ready.done():
            ready.set_result(info)

    def _take(self, report: WorkerReport) -> None:
        self._lanes = merged_states(self._lanes, report.lanes)
        self._stats = report.stats
        if report.adapters is not None:
            self._adapters = report.adapters
        self._residency.take(report)
        for request_id in self._requests.take(report):
            self._commands.put(WorkerCommand("abort", request_id))

    def _died(self, ready: asyncio.Future[ReplicaInfo], error: Exception) -> None:
        self._running = False
        if not ready.done():
            ready.set_exception(_typed(error))
            return
        log("engine_died", level="error", error=error, replica=self.name)
        self._requests.fail_all("internal_error", "the engine failed; the log has the reason")


def _typed(error: Exception) -> CoterieError:
    if isinstance(error, CoterieError):
        return error
    failure = InternalError(f"the engine could not be built: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
