"""An encoder in its own process: starts, watches and restarts the process, and sends its jobs
again.

If the process dies, its jobs only pause. They may be the reason, so the next process gets each of
them alone; a job that is alone when a process dies fails with a typed error, and the others go on.
No torch here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError, Unavailable, WorkerCrashed
from coterie.obs.log import log
from coterie.workers.encoder.contract import (
    ENCODER_PROGRAM,
    EncodeCommand,
    EncodeJob,
    EncodeReport,
    EncoderInfo,
    EncoderSpec,
)
from coterie.workers.supervisor import (
    LOAD_BASE_S,
    MAX_FAILED_STARTS,
    SILENT_S,
    TICK_S,
    ModelChanged,
    RestartPolicy,
)
from coterie.workers.worker_process import WorkerProcess, remove_directory, socket_directory


@dataclass(frozen=True, slots=True)
class ComputedVectors:
    """One row for each input, and how long they were computed, without the wait before."""

    rows: NDArray[np.float32]
    compute_s: float


@dataclass(slots=True)
class _Pending:
    job: EncodeJob
    answer: asyncio.Future[ComputedVectors]
    num_inputs: int


class EncoderReplica:
    """For one event loop."""

    def __init__(self, spec: EncoderSpec, restart: RestartPolicy | None = None) -> None:
        self.name = spec.name
        self._spec, self._restart = spec, restart or RestartPolicy()
        self._child: WorkerProcess | None = None
        self._directory: Path | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._info: EncoderInfo | None = None
        # jobs that the process has, those that wait for it, those that were there when it died
        self._sent: dict[str, _Pending] = {}
        self._waiting: dict[str, _Pending] = {}
        self._suspects: deque[_Pending] = deque()
        self._alone = False
        self._stats: dict[str, float] = {}
        self._starts = self._failures = 0
        self._silent_s = 0.0
        self._reported_at = 0.0
        self._load_s = 1.0
        self._resent = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    async def start(self) -> EncoderInfo:
        self._directory = socket_directory()
        try:
            child, info = await self._spawn()
        except BaseException:
            self._remove_directory()
            raise
        self._info = info
        self._supervisor = asyncio.create_task(self._supervise(child), name=f"worker-{self.name}")
        return info

    async def encode(self, job: EncodeJob) -> ComputedVectors:
        """One row for each input. If the caller is cancelled, the job is dropped."""
        if self._closed:
            raise Unavailable("the server is shutting down")
        answer: asyncio.Future[ComputedVectors] = asyncio.get_running_loop().create_future()
        pending = _Pending(job, answer, len(job.lengths) // 4)
        if self.state() == "failing":
            raise _unavailable(self._retry_after_s())
        self._waiting[job.job_id] = pending
        self._hand_over()
        try:
            return await answer
        finally:
            self._forget(pending)

    def healthy(self) -> bool:
        return self.state() == "up"

    def state(self) -> str:
        if self._closed:
            return "draining"
        if self._child is None:
            return "failing" if self._failures > MAX_FAILED_STARTS else "starting"
        return "silent" if self._silent_s >= SILENT_S else "up"

    def stats(self) -> dict[str, float]:
        return {
            **self._stats,
            "requests_continued": float(self._resent),
            "restarts": float(max(0, self._starts - 1)),
        }

    def in_flight(self) -> int:
        return len(self._sent) + len(self._waiting) + len(self._suspects)

    async def drain(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.in_flight() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        self._closed = True
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait({supervisor})
        child, self._child = self._child, None
        if child is not None:
            await child.stop()
        self._fail_all(Unavailable("the server was shut down"))
        self._remove_directory()

    async def _supervise(self, child: WorkerProcess) -> None:
        """Until close(): wait until the process ends, pause, start the next one."""
        while True:
            born_at = time.monotonic()
            code = await self._watch(child)
            self._child = None
            lived_s = time.monotonic() - born_at
            self._failures = 1 if lived_s > self._restart.max_backoff_s else self._failures + 1
            log(
                "worker_died", level="error", replica=self.name, exit_code=code,
                pending=self.in_flight(), attempt=self._failures,
            )  # fmt: skip
            self._crashed()
            child = await self._start_again()

    async def _start_again(self) -> WorkerProcess:
        while True:
            await asyncio.sleep(self._restart.pause_s(self._failures))
            try:
                child, info = await self._spawn()
                if self._info is not None and info.fingerprint != self._info.fingerprint:
                    # no job may reach it
                    self._child = None
                    await child.kill()
                    raise ModelChanged("the encoder's file changed; restart the server")
            except Exception as error:
                self._failures += 1
                reason = error.message if isinstance(error, CoterieError) else None
                log("worker_failed_to_start", level="error", error=error, replica=self.name,
                    attempt=self._failures, reason=reason)  # fmt: skip
                if self._failures > MAX_FAILED_STARTS or isinstance(error, ModelChanged):
                    self._fail_all(_unavailable(self._retry_after_s()))
                continue
            log("worker_restarted", replica=self.name, pid=child.pid, pending=self.in_flight())
            self._hand_over()
            return child

    async def _spawn(self) -> tuple[WorkerProcess, EncoderInfo]:
        assert self._directory is not None
        begun_at = time.monotonic()
        self._starts += 1
        path = self._directory / f"{self._starts}.sock"
        limit_s = self._restart.load_timeout_s or LOAD_BASE_S
        try:
            async with asyncio.timeout(limit_s):
                child, info = await WorkerProcess.launch(
                    self._spec, path, self._take, ENCODER_PROGRAM
                )
        except TimeoutError as error:
            raise Unavailable(
                f"encoder {self.name} did not load in {limit_s:.0f} s and was killed; where "
                "loading takes longer, set engine.load_timeout_s"
            ) from error
        self._child = child
        self._reported_at = time.monotonic()
        self._load_s = self._reported_at - begun_at
        return child, info

    async def _watch(self, child: WorkerProcess) -> int:
        """Wait for the exit status. Kills a process that is silent, or that has jobs and reports
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
                self._silent_s = 0.0 if child.beats != beats else self._silent_s + tick_s
                idle_s = time.monotonic() - self._reported_at if self._sent else 0.0
                if hang_s and (idle_s > hang_s or self._silent_s > max(hang_s, 2 * SILENT_S)):
                    log("worker_hung", level="error", replica=self.name, wait_s=round(idle_s, 3))
                    await child.kill()
        finally:
            self._silent_s = 0.0
            exited.cancel()

    def _take(self, report: EncodeReport) -> None:
        self._reported_at = time.monotonic()
        self._stats = report.stats
        for result in report.results:
            pending = self._sent.pop(result.job_id, None)
            if pending is None or pending.answer.done():
                continue
            rows = np.frombuffer(result.vectors, np.float32).reshape(pending.num_inputs, -1)
            pending.answer.set_result(ComputedVectors(rows, result.compute_s))
        self._hand_over()

    def _hand_over(self) -> None:
        """Send the waiting jobs; after a crash, first those that may be its reason, one by one."""
        if self._child is None:
            return
        if not self._sent:
            self._reported_at = time.monotonic()
            self._alone = False
            while self._suspects and not self._sent:
                self._send(self._suspects.popleft())
                self._alone = bool(self._sent)
        if self._alone:
            return
        for job_id, pending in list(self._waiting.items()):
            del self._waiting[job_id]
            if not self._send(pending):
                return

    def _send(self, pending: _Pending) -> bool:
        """False if there is no process at the other end; then the job waits."""
        job = pending.job
        if pending.answer.done():
            return True
        if self._child is not None and self._child.send(EncodeCommand("encode", job.job_id, job)):
            self._sent[job.job_id] = pending
            return True
        self._waiting = {job.job_id: pending, **self._waiting}
        return False

    def _crashed(self) -> None:
        lost, was_alone = list(self._sent.values()), self._alone
        self._sent.clear()
        self._alone = False
        for pending in lost:
            if was_alone and not pending.answer.done():
                text = "the encoder died twice while it computed this request"
                pending.answer.set_exception(
                    WorkerCrashed(text, retry_after_s=self._retry_after_s())
                )
            else:
                self._suspects.append(pending)
                self._resent += 1

    def _forget(self, pending: _Pending) -> None:
        job_id = pending.job.job_id
        self._waiting.pop(job_id, None)
        if pending in self._suspects:
            self._suspects.remove(pending)
        if self._sent.pop(job_id, None) is not None and self._child is not None:
            self._child.send(EncodeCommand("abort", job_id))
        self._hand_over()

    def _fail_all(self, error: CoterieError) -> None:
        for pending in [*self._sent.values(), *self._waiting.values(), *self._suspects]:
            if not pending.answer.done():
                pending.answer.set_exception(error)

    def _retry_after_s(self) -> float:
        return max(1.0, self._restart.pause_s(max(self._failures, 1)) + self._load_s)

    def _remove_directory(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            remove_directory(directory)


def _unavailable(retry_after_s: float) -> Unavailable:
    return Unavailable(
        "the encoder cannot be started; the server's log says why", retry_after_s=retry_after_s
    )
