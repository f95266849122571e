"""A replica in its own process: starts, watches and restarts the process, and continues its
requests.

If a worker dies, its requests only pause: `InFlightRequests` knows what every client has, and the
next worker continues after that. Imports no torch; `child.py` runs inside the process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coterie.core.errors import CoterieError, InternalError, Unavailable
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
from coterie.workers.worker_process import (
    WorkerProcess,
    is_own_directory,
    remove_directory,
    socket_directory,
)

# after this many failed starts in a row, waiting requests fail
MAX_FAILED_STARTS = 5
# if the process has been silent for this long, nothing is sent to it
SILENT_S = 5.0
TICK_S = 1.0
# how often requests that no worker runs are offered to other replicas
OFFER_S = 0.25
# time for loading on a slow and busy machine: compiling kernels, reading, quantising
LOAD_BASE_S = 300.0
LOAD_BYTES_PER_S = 10e6


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The time limits of the supervisor."""

    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    # a worker with requests and without a report for this long hangs; 0 = never
    hang_s: float = 300.0
    # limit for loading; 0 = depends on the model's size
    load_timeout_s: float = 0.0

    def pause_s(self, failures: int) -> float:
        return float(min(self.max_backoff_s, self.backoff_s * 2 ** min(failures - 1, 30)))


class ModelChanged(Unavailable):
    """A restarted worker loaded another model than the one its requests started with."""


class ProcessReplica:
    def __init__(self, spec: WorkerSpec, restart: RestartPolicy | None = None) -> None:
        self.name = spec.name
        self._spec = spec
        self._restart = restart or RestartPolicy()
        self._requests = InFlightRequests()
        self._child: WorkerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._directory: Path | None = None
        self._lanes: dict[str, LaneState] = {}
        self._stats: dict[str, float] = {}
        self._adapters: tuple[AdapterLoad, ...] = ()
        self._residency = ResidencyReports()
        self._fingerprint: str | None = None
        # number of started processes, including those that failed to load
        self._starts = 0
        self._load_s = 1.0
        self._next_start_at = 0.0
        self._reported_at = 0.0
        self._draining = False
        self._failures = 0
        self._silent_s = 0.0
        # until requests that wait are offered to other replicas again
        self._offering: asyncio.TimerHandle | None = None
        self._counts = {"failed_starts": 0.0, "silences": 0.0, "socket_folders_lost": 0.0}

    @property
    def pid(self) -> int | None:
        """The process id of the running worker."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> ReplicaInfo:
        self._directory = socket_directory()
        if not self._restart.load_timeout_s:
            limit_s = LOAD_BASE_S + await asyncio.to_thread(_bytes, self._spec) / LOAD_BYTES_PER_S
            self._restart = replace(self._restart, load_timeout_s=limit_s)
        try:
            child, info = await self._spawn()
        except BaseException:
            self._remove_directory()
            raise
        # a restart must use the same KV size, independent of the free memory at that time
        self._spec = replace(self._spec, kv_bytes=info.kv_budget or info.kv_bytes)
        self._fingerprint = info.fingerprint
        self._supervisor = asyncio.create_task(self._supervise(child), name=f"worker-{self.name}")
        return info

    async def submit(
        self, assignment: Assignment, sink: Sink, on_outage: OnOutage = never_moved
    ) -> Admitted | Rejected:
        child = self._child
        if child is None or not self.healthy():
            reason = f"replica {self.name} takes no requests now"
            return Rejected("unavailable", reason, self.retry_after_s())
        self._mark_busy()
        verdict = self._requests.open(assignment, sink, on_outage)
        try:
            if not child.send(WorkerCommand("submit", assignment.request_id, assignment)):
                self._requests.postpone(assignment.request_id)
        except InternalError as error:
            self._requests.refused(assignment.request_id, str(error.__cause__))
            self._requests.drop(assignment.request_id)
            return Rejected(error.code, error.message, None)
        try:
            return await verdict
        except asyncio.CancelledError:
            await self.abort(assignment.request_id)
            raise

    def move(self, request_id: str, to: Replica) -> bool:
        if not isinstance(to, ProcessReplica) or to is self or not to.healthy():
            return False
        if to._requests.holds(request_id):
            return False
        entry = self._requests.release(request_id, to._child, is_silent=self._is_silent)
        if entry is None:
            return False
        if entry.present:
            # if the worker is heard again, it must not go on
            entry.left.add(self._child)
            self._send(WorkerCommand("abort", request_id))
        to._requests.adopt(entry)
        to._hand_over()
        log("request_moved", level="warning", request_id=request_id, replica=to.name)
        return True

    async def abort(self, request_id: str) -> None:
        if self._requests.drop(request_id):
            self._send(WorkerCommand("abort", request_id))
        self._hand_over()

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        self._send(WorkerCommand("preload", adapters=tuple(adapters)))

    def lane_states(self) -> dict[str, LaneState]:
        return self._lanes

    def in_flight(self) -> int:
        return len(self._requests)

    def stats(self) -> dict[str, float]:
        starts = {"restarts": float(max(0, self._starts - 1))}
        return {**self._stats, **self._requests.stats(), **self._counts, **starts}

    def adapter_loads(self) -> tuple[AdapterLoad, ...]:
        return self._adapters

    def residency(self) -> MoeResidency | None:
        if self._child is not None and self._residency.may_ask():
            self._send(WorkerCommand("residency"))
        return self._residency.last

    def healthy(self) -> bool:
        return self.state() == "up"

    def state(self) -> str:
        if self._draining:
            return "draining"
        if self._child is None:
            return "failing" if self._failures > MAX_FAILED_STARTS else "starting"
        if self._is_silent:
            return "silent"
        return "quarantined" if self._requests.quarantined else "up"

    def retry_after_s(self) -> float:
        return max(1.0, self._next_start_at - time.monotonic() + self._load_s)

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        await self._requests.drain(self.name, timeout_s)

    async def close(self) -> None:
        self._draining = True
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            # an error of the supervisor must not keep the requests from failing
            await asyncio.wait({supervisor})
            if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
                log("supervisor_failed", level="error", error=error, replica=self.name)
        if self._offering is not None:
            self._offering.cancel()
        child, self._child = self._child, None
        if child is not None:
            await child.stop()
        self._requests.fail_all("unavailable", "the server was shut down")
        self._remove_directory()

    async def _supervise(self, child: WorkerProcess) -> None:
        """Until close(): wait until the worker ends, pause, start the next one."""
        while True:
            born_at = time.monotonic()
            code = await self._watch(child)
            self._child = None
            lived_s = time.monotonic() - born_at
            self._failures = 1 if lived_s > self._restart.max_backoff_s else self._failures + 1
            log(
                "worker_died", level="error", replica=self.name, exit_code=code,
                pending=len(self._requests), attempt=self._failures,
            )  # fmt: skip
            self._requests.crashed()
            self._offer()
            child = await self._start_again()

    async def _start_again(self) -> WorkerProcess:
        while True:
            pause_s = self._restart.pause_s(self._failures)
            self._next_start_at = time.monotonic() + pause_s
            await asyncio.sleep(pause_s)
            try:
                child, _ = await self._spawn()
            except Exception as error:
                self._failures += 1
                self._counts["failed_starts"] += 1
                # an error while loading contains no text of a caller, so it may be logged
                reason = error.message if isinstance(error, CoterieError) else None
                log("worker_failed_to_start", level="error", error=error, replica=self.name,
                    attempt=self._failures, reason=reason)  # fmt: skip
                if self._failures > MAX_FAILED_STARTS or isinstance(error, ModelChanged):
                    self._requests.fail_all(
                        "unavailable", _message_for_client(error), self.retry_after_s()
                    )
                continue
            log("worker_restarted", replica=self.name, pid=child.pid, pending=len(self._requests))
            self._hand_over()
            return child

    async def _spawn(self) -> tuple[WorkerProcess, ReplicaInfo]:
        if self._directory is None:
            raise Unavailable(f"replica {self.name} was closed")
        if not is_own_directory(self._directory):
            self._directory = socket_directory()
            self._counts["socket_folders_lost"] += 1
            log("socket_folder_lost", level="error", replica=self.name)
        begun_at = time.monotonic()
        self._starts += 1
        # a short name, because a socket address has few characters
        path = self._directory / f"{self._starts}.sock"
        limit_s = self._restart.load_timeout_s
        try:
            async with asyncio.timeout(limit_s or None):
                child, info = await WorkerProcess.spawn(self._spec, path, self._take)
        except TimeoutError as error:
            raise Unavailable(
                f"worker {self.name} did not load its model in {limit_s:.0f} s and was killed; "
                "where loading takes longer, set engine.load_timeout_s"
            ) from error
        if self._fingerprint not in (None, info.fingerprint):
            await child.kill()
            raise ModelChanged("the model's file changed since the server was started; restart it")
        self._child = child
        self._residency = ResidencyReports()
        self._reported_at = time.monotonic()
        self._load_s = self._reported_at - begun_at
        return child, info

    async def _watch(self, child: WorkerProcess) -> int:
        """Wait for the exit status. Kills a worker that is silent, or that has requests and reports
        nothing."""
        exited = asyncio.ensure_future(child.exited())
        hang_s = self._restart.hang_s
        tick_s = min(TICK_S, hang_s / 4) if hang_s else TICK_S
        try:
            while True:
                beats = child.beats
                await asyncio.wait({exited}, timeout=tick_s)
                if exited.done():
                    return exited.result()
                # count ticks instead of time: a pause of this process is not the worker's silence
                self._note_silence(0.0 if child.beats != beats else self._silent_s + tick_s)
                unreported_s = (
                    time.monotonic() - self._reported_at if self._requests.working else 0.0
                )
                if hang_s and (unreported_s > hang_s or self._silent_s > max(hang_s, 2 * SILENT_S)):
                    wait_s = round(max(unreported_s, self._silent_s), 3)
                    log("worker_hung", level="error", replica=self.name, wait_s=wait_s)
                    await child.kill()
        finally:
            self._silent_s = 0.0
            exited.cancel()

    def _note_silence(self, silent_s: float) -> None:
        was_silent = self._is_silent
        before_s, self._silent_s = self._silent_s, silent_s
        if self._is_silent and not was_silent:
            self._counts["silences"] += 1
            log("worker_silent", level="error", replica=self.name, wait_s=round(silent_s, 3))
            self._offer()
        elif was_silent and not self._is_silent:
            log("worker_heard_again", level="warning", replica=self.name, wait_s=round(before_s, 3))

    def _take(self, report: WorkerReport) -> None:
        self._reported_at = time.monotonic()
        self._lanes = merged_states(self._lanes, report.lanes)
        self._stats = report.stats
        if report.adapters is not None:
            self._adapters = report.adapters
        self._residency.take(report)
        for request_id in self._requests.take(report):
            self._send(WorkerCommand("abort", request_id))
        self._hand_over()

    @property
    def _is_silent(self) -> bool:
        return self._silent_s >= SILENT_S

    def _offer(self) -> None:
        """Let other replicas take the requests that no worker runs, as long as there are some."""
        self._offering = None
        self._requests.offer(is_silent=self._is_silent)
        self._offer_later()

    def _offer_later(self) -> None:
        if self._offering is None and (self._requests.waiting or self._is_silent):
            self._offering = asyncio.get_running_loop().call_later(OFFER_S, self._offer)

    def _hand_over(self) -> None:
        """Send the waiting requests to the worker, as far as they may run now."""
        if not self._requests.waiting or self._child is None:
            return
        self._offer_later()
        self._mark_busy()
        for assignment in self._requests.resume():
            if not self._send(WorkerCommand("submit", assignment.request_id, assignment)):
                self._requests.postpone(assignment.request_id)
                return

    def _mark_busy(self) -> None:
        """Silence counts from the moment when the worker has requests."""
        if not self._requests.working:
            self._reported_at = time.monotonic()

    def _send(self, command: WorkerCommand) -> bool:
        return self._child is not None and self._child.send(command)

    def _remove_directory(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            remove_directory(directory)


def _message_for_client(error: Exception) -> str:
    """The error for clients, without paths of the server."""
    if isinstance(error, ModelChanged):
        return error.message
    return "the worker cannot be started; the server's log says why"


def _bytes(spec: WorkerSpec) -> int:
    """Bytes of all files of a model; unreadable files count 0."""
    if os.path.isfile(spec.model):
        return os.path.getsize(spec.model)
    total = 0
    for folder, _, names in os.walk(spec.model):
        paths = (os.path.join(folder, name) for name in names)
        total += sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    return total
