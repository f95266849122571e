"""Jobs: accepted when they are on disk, run when there is room, ended exactly once.

Wiring (`build.py`, after the pipeline is made; `Pipeline` starts and ends it):

    pipeline.jobs = JobService(pipeline, JobStore(state_dir() / "jobs.db"), config.jobs)
    await jobs.start()     # at the end of Pipeline.start: takes over what a crash left, begins
    jobs.pause()           # first thing in Pipeline.drain: nothing new begins
    await jobs.close()     # first thing in Pipeline.close: open jobs wait for the next start

Callers (`Prefer: respond-async`): `job = await jobs.submit(JobSpec(request, user_id, explain))`,
with `request.id` a new UUID's text; `api/jobs.py: accepted(job)` is the 202. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from coterie.core.errors import CoterieError, NotFound, Overloaded, Unavailable
from coterie.core.job import FAILED, QUEUED, Job, JobError, JobPage, JobQuery, JobSpec
from coterie.core.pipeline_settings import JobSettings
from coterie.core.plan import RoutePlan
from coterie.core.request import RouteHints
from coterie.obs.trace import log
from coterie.service.jobs_codec import encode_spec
from coterie.service.jobs_live import LiveJob
from coterie.service.jobs_queue import JobQueue, is_suspect
from coterie.service.jobs_run import NOT_NOW, Answers, JobRun
from coterie.service.jobs_store import RETRY_S, JobStore
from coterie.service.jobs_tables import Ending, Entry, Orphan, Waiting

# requests that wait, and answers that can still be asked for, on disk
MAX_QUEUED_BYTES = 512 * 10**6
MAX_ENDED = 100_000
MAX_ENDED_BYTES = 2 * 10**9
# how soon jobs of a killed server are taken over, and cancellations by another one are seen
SWEEP_S = 2.0
# a job that ran alone in this many servers when they died is what kills them
MAX_CRASHES = 10
# weight of the newest duration
NEWEST = 0.1
MAX_PAUSE_S = 30.0

Progress = RoutePlan | str | Job


class JobService:
    def __init__(self, answers: Answers, store: JobStore, settings: JobSettings) -> None:
        self._answers = answers
        self._store = store
        self._settings = settings
        self._queue = JobQueue()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._alone = False
        self._live: dict[str, LiveJob] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._not_before = 0.0
        self._paused = False
        self._run_s = 1.0

    async def start(self) -> None:
        """Never fails for the database's sake: without it everything but jobs is served."""
        try:
            await self._store.open()
            await self._sweep()
        except CoterieError as error:
            log("jobs_disabled", level="error", reason=error.message)
            return
        self._tasks = [asyncio.create_task(self._dispatch()), asyncio.create_task(self._sweeps())]

    def pause(self) -> None:
        """Nothing new is accepted or begun; what runs may end."""
        self._paused = True
        for live in self._live.values():
            live.tell()

    async def close(self) -> None:
        self._paused = True
        tasks = [*self._tasks, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        try:
            await self._store.close()
        except CoterieError as error:
            log("jobs_not_released", level="warning", reason=error.message)

    async def submit(self, spec: JobSpec) -> Job:
        """Accepted when this returns: it will run, once, whatever happens to this process."""
        if self._paused:
            raise Unavailable("the server is shutting down")
        self._answers.resolve(spec.request.hints)
        sampling = spec.request.sampling
        if sampling.seed is None:
            # a run after a crash draws the same
            sampling = replace(sampling, seed=secrets.randbits(63))
            spec = replace(spec, request=replace(spec.request, sampling=sampling))
        raw = encode_spec(spec)
        self._check_room(len(raw))
        # on disk means accepted, whether or not the caller is still there to hear of it
        return await asyncio.shield(self._accept(spec, raw))

    async def get(self, job_id: str, tenant: str) -> Job:
        job = await self._store.find(job_id, tenant)
        if job is None:
            raise NotFound(f"there is no job {job_id!r}", param="job_id")
        live = self._live.get(job_id)
        return replace(job, text=live.text) if live is not None and job.active else job

    async def page(self, query: JobQuery) -> JobPage:
        return await self._store.page(query)

    async def delete(self, job_id: str, tenant: str) -> Job:
        """Cancels an open job; removes one that has ended. As it stands afterwards, or stood."""
        job = await self.get(job_id, tenant)
        if job.active:
            if await self._store.cancel(job_id, tenant, time.time(), job.text):
                self._stop(job_id)
            return await self.get(job_id, tenant)
        await self._store.remove(job_id, tenant)
        return job

    async def follow(self, job_id: str, tenant: str) -> AsyncGenerator[Progress, None]:
        """The plan once it runs, pieces of text, and at last the job as it ended."""
        job = await self.get(job_id, tenant)
        live = self._live.setdefault(job_id, LiveJob()) if job.active else LiveJob()
        live.followers += 1
        told, parts = False, 0
        try:
            while job.active:
                if live.plan is not None and not told:
                    told = True
                    yield live.plan
                text, parts = live.since(parts)
                if text:
                    yield text
                if self._paused and job_id not in self._running:
                    raise Unavailable("the server is shutting down; the job is kept")
                if not await live.change(SWEEP_S) or live.ended:
                    job = await self.get(job_id, tenant)
            text, _ = live.since(parts) if parts else (job.text, 0)
            if text:
                yield text
            yield job
        finally:
            live.followers -= 1
            self._forget(job_id)

    def waiting(self) -> tuple[int, int]:
        """Jobs in line and running, for metrics."""
        return len(self._queue), len(self._running)

    async def _accept(self, spec: JobSpec, raw: bytes) -> Job:
        request = spec.request
        wait_ms = self._expected_wait_ms(request.limits.priority)
        entry = Entry(
            request.id,
            request.tenant,
            spec.user_id,
            request.hints.model or "",
            request.limits.priority,
            time.time(),
            raw,
        )
        self._push(await self._store.add(entry))
        return Job(
            entry.id,
            QUEUED,
            entry.tenant,
            entry.user_id,
            entry.submitted_at,
            estimated_wait_ms=wait_ms,
        )

    def _check_room(self, nbytes: int) -> None:
        limit = self._settings.max_queued
        if len(self._queue) >= limit or self._queue.nbytes + nbytes > MAX_QUEUED_BYTES:
            what = f"{len(self._queue)} jobs wait, and {limit} may"
            if len(self._queue) < limit:
                what = f"the jobs that wait hold {self._queue.nbytes} bytes"
            wait_s = min(max(self._run_s, 1.0), MAX_PAUSE_S)
            raise Overloaded(f"{what}; ask again later", retry_after_s=wait_s)

    def _expected_wait_ms(self, priority: int) -> float:
        ahead = self._queue.ahead(priority) + len(self._running)
        places = self._settings.concurrency
        # each place is free again after a run
        rounds = max(0, ahead + 1 - places) / places
        held_s = max(0.0, self._not_before - time.monotonic())
        engine_s = self._answers.expected_wait_s()
        return round(1000 * (held_s + rounds * self._run_s + engine_s), 1)

    def _push(self, entry: Waiting) -> None:
        self._queue.push(entry)
        self._wake.set()

    async def _dispatch(self) -> None:
        while True:
            entry = self._next()
            if entry is not None:
                self._queue.drop(entry.id)
                self._alone = is_suspect(entry)
                self._running[entry.id] = asyncio.create_task(self._run(entry))
                continue
            self._wake.clear()
            held_s = self._not_before - time.monotonic()
            try:
                # not wait_for, which may swallow a cancellation
                async with asyncio.timeout(held_s if held_s > 0 else None):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _next(self) -> Waiting | None:
        """The job that may begin now."""
        full = len(self._running) >= (1 if self._alone else self._settings.concurrency)
        if self._paused or (self._running and full) or time.monotonic() < self._not_before:
            return None
        entry = self._queue.peek()
        if entry is not None and is_suspect(entry) and self._running:
            return None
        return entry

    async def _run(self, entry: Waiting) -> None:
        live = self._live.setdefault(entry.id, LiveJob())
        began = time.monotonic()
        again = False
        try:
            await JobRun(self._answers, self._store, entry.id, live).attempt()
            self._run_s += NEWEST * (time.monotonic() - began - self._run_s)
        except NOT_NOW as error:
            again = True
            self._hold(error)
        finally:
            del self._running[entry.id]
            if again:
                self._queue.push(entry)
            else:
                self._end(entry.id)
            self._wake.set()

    def _hold(self, error: CoterieError) -> None:
        """Nobody begins before the engine may have room again."""
        wait_s = min(error.retry_after_s or RETRY_S, MAX_PAUSE_S)
        self._not_before = max(self._not_before, time.monotonic() + wait_s)

    def _stop(self, job_id: str) -> None:
        """It has ended on disk: nothing more is computed for it."""
        task = self._running.get(job_id)
        if task is not None:
            task.cancel()
        elif self._queue.drop(job_id) is not None:
            self._end(job_id)

    def _end(self, job_id: str) -> None:
        live = self._live.get(job_id)
        if live is not None:
            live.ended = True
            live.tell()
            self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        live = self._live.get(job_id)
        if live is not None and not live.followers and job_id not in self._running:
            del self._live[job_id]

    async def _sweeps(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._sweep()
            except CoterieError as error:
                log("jobs_not_swept", level="warning", reason=error.message)

    async def _sweep(self) -> None:
        """Takes over what killed servers left, removes what is too old, stops what was cancelled
        by another server of this home."""
        ours = await self._store.adopt(self._can_take)
        for entry in ours:
            if entry.crashes >= MAX_CRASHES:
                await self._give_up(entry)
            else:
                self._push(entry)
        if ours:
            log("jobs_adopted", pending=len(ours))
        await self._store.expire(time.time() - self._settings.keep_s, MAX_ENDED, MAX_ENDED_BYTES)
        # in this order: what begins meanwhile is open and not looked at
        running = list(self._running)
        still = await self._store.open_ids()
        for job_id in running:
            if job_id not in still:
                self._stop(job_id)

    def _can_take(self, orphan: Orphan) -> bool:
        """Not where this server has no such model, as long as another one may come that has."""
        try:
            self._answers.resolve(RouteHints(orphan.model or None))
        except NotFound:
            return orphan.submitted_at < time.time() - self._settings.keep_s
        return True

    async def _give_up(self, entry: Waiting) -> None:
        message = f"{entry.crashes} servers died while this job ran in them"
        error = JobError("worker_crashed", message)
        await self._store.end(entry.id, Ending(FAILED, time.time(), error=error))
