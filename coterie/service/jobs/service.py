"""Jobs: accepted when they are on disk, run when there is room, ended exactly once.

Wiring (`build.py`, after the pipeline is made; `Pipeline` starts and ends it):

    pipeline.jobs = JobService(pipeline, JobStore(state_dir() / "jobs.db"), config.jobs)
    await jobs.start()     # at the end of Pipeline.start: takes over what a crash left, begins
    jobs.pause()           # first thing in Pipeline.drain: nothing new begins
    await jobs.close()     # first thing in Pipeline.close: open jobs wait for the next start

Callers (`Prefer: respond-async`): `job = await jobs.submit(JobSpec(request, explain))`,
with `request.id` a new UUID's text; `api/native/jobs.py: accepted(job)` is the 202.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from coterie.core.errors import CoterieError, NotFound, Unavailable
from coterie.core.job import FAILED, PROCESSING, QUEUED, Job, JobError, JobPage, JobQuery, JobSpec
from coterie.core.plan import RoutePlan
from coterie.core.request import RouteHints
from coterie.core.sampling import draw_seed
from coterie.core.settings import JobSettings
from coterie.obs.log import log
from coterie.service.jobs.codec import encode_spec
from coterie.service.jobs.dispatch import JobDispatcher, JobPipeline, LiveJob
from coterie.service.jobs.store import AbandonedJob, JobEnd, JobStore, NewJob, WaitingJob

# answers that can still be asked for, on disk
MAX_ENDED = 100_000
MAX_ENDED_BYTES = 2 * 10**9
# how soon jobs of a killed server are taken over, and cancellations by another one are seen
SWEEP_S = 2.0
# a job that ran alone in this many servers when they died is what kills them
MAX_CRASHES = 10

Progress = RoutePlan | str | Job


class JobService:
    def __init__(self, answers: JobPipeline, store: JobStore, settings: JobSettings) -> None:
        self._answers, self._store, self._settings = answers, store, settings
        self._dispatcher = JobDispatcher(answers, store, settings)
        self._tasks: list[asyncio.Task[None]] = []
        # jobs on their way to the disk
        self._entering = 0
        # of servers that were killed, since start
        self.taken_up = 0

    async def start(self) -> None:
        """Never fails for the database's sake: without it everything but jobs is served."""
        wait_s = await self._open()
        if wait_s != 0:
            self._tasks = [asyncio.create_task(self._open_later(wait_s))] if wait_s else []

    async def _open(self) -> float | None:
        """Seconds until it may work: 0 = it did, None = never by itself."""
        try:
            await self._store.open()
            await self._sweep()
        except CoterieError as error:
            log("jobs_disabled", level="error", reason=error.message)
            return error.retry_after_s
        self._tasks += [
            asyncio.create_task(self._dispatcher.loop()),
            asyncio.create_task(self._sweeps()),
        ]
        return 0.0

    async def _open_later(self, wait_s: float | None) -> None:
        while wait_s:
            await asyncio.sleep(wait_s)
            wait_s = await self._open()

    def pause(self) -> None:
        """Nothing new is accepted or begun; what runs may end."""
        self._dispatcher.pause()

    async def close(self) -> None:
        self.pause()
        tasks = [*self._tasks, *self._dispatcher.running.values()]
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
        if self._dispatcher.is_paused:
            raise Unavailable("the server is shutting down")
        self._answers.resolve(spec.request.hints)
        await self._answers.check_format(spec.request)
        spec = replace(spec, request=self._answers.within_rights(spec.request))
        sampling = spec.request.sampling
        if sampling.seed is None:
            # a run after a crash draws the same
            sampling = replace(sampling, seed=draw_seed())
            spec = replace(spec, request=replace(spec.request, sampling=sampling))
        raw = encode_spec(spec)
        self._dispatcher.check_room(self._entering, len(raw))
        self._entering += 1
        # on disk means accepted, whether or not the caller is still there to hear of it
        return await asyncio.shield(self._accept(spec, raw))

    async def get(self, job_id: str, tenant: str) -> Job:
        job = await self._store.find(job_id, tenant)
        if job is None:
            raise NotFound(f"there is no job {job_id!r}", param="job_id")
        live = self._dispatcher.live.get(job_id)
        return replace(job, text=live.text) if live is not None and job.active else job

    async def page(self, query: JobQuery) -> JobPage:
        return await self._store.page(query)

    async def delete(self, job_id: str, tenant: str) -> tuple[Job, bool]:
        """Cancels an open job (False); removes one that has ended (True), told as it was."""
        job = await self.get(job_id, tenant)
        if job.active and await self._store.cancel(job_id, tenant, time.time(), job.text):
            self._dispatcher.stop(job_id)
            return await self.get(job_id, tenant), False
        job = await self.get(job_id, tenant)
        return job, await self._store.remove(job_id, tenant)

    async def follow(self, job_id: str, tenant: str) -> AsyncGenerator[Progress, None]:
        """The plan once it runs, pieces of text, and at last the job as it ended."""
        job = await self.get(job_id, tenant)
        dispatcher = self._dispatcher
        live = dispatcher.live.setdefault(job_id, LiveJob()) if job.active else LiveJob()
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
                if dispatcher.is_paused and job_id not in dispatcher.running:
                    raise Unavailable("the server is shutting down; the job is kept")
                if not await live.change(SWEEP_S) or live.ended:
                    job = await self.get(job_id, tenant)
            text, _ = live.since(parts) if parts else (job.text, 0)
            if text:
                yield text
            yield job
        finally:
            live.followers -= 1
            dispatcher.forget(job_id)

    def counts(self) -> dict[str, int]:
        """This server's open jobs by status, for metrics."""
        return {QUEUED: len(self._dispatcher.queue), PROCESSING: len(self._dispatcher.running)}

    async def _accept(self, spec: JobSpec, raw: bytes) -> Job:
        request = spec.request
        wait_s = self._dispatcher.expected_wait_s(request.limits.priority)
        entry = NewJob(
            request.id,
            request.tenant,
            request.user_id,
            request.hints.model or "",
            request.limits.priority,
            time.time(),
            raw,
        )
        try:
            self._dispatcher.push(await self._store.add(entry))
        finally:
            self._entering -= 1
        return Job(
            entry.id,
            QUEUED,
            entry.tenant,
            entry.user_id,
            entry.submitted_at,
            estimated_wait_ms=round(1000 * wait_s, 1),
        )

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
        abandoned_jobs = await self._store.abandoned_jobs()
        ours = await self._store.adopt([item for item in abandoned_jobs if self._can_take(item)])
        for entry in ours:
            if entry.crashes >= MAX_CRASHES:
                await self._give_up(entry)
            else:
                self._dispatcher.push(entry)
        if ours:
            self.taken_up += len(ours)
            log("jobs_adopted", pending=len(ours))
        await self._store.expire(time.time() - self._settings.keep_s, MAX_ENDED, MAX_ENDED_BYTES)
        # in this order: what begins meanwhile is open and not looked at
        running = list(self._dispatcher.running)
        still = await self._store.open_ids()
        for job_id in running:
            if job_id not in still:
                self._dispatcher.stop(job_id)

    def _can_take(self, orphan: AbandonedJob) -> bool:
        """Not where this server has no such model, as long as another one may come that has."""
        try:
            self._answers.resolve(RouteHints(orphan.model or None))
        except NotFound:
            return orphan.submitted_at < time.time() - self._settings.keep_s
        return True

    async def _give_up(self, entry: WaitingJob) -> None:
        message = f"{entry.crashes} servers died while this job ran in them"
        error = JobError("worker_crashed", message)
        await self._store.end(entry.id, JobEnd(FAILED, time.time(), error=error))
