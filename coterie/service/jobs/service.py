"""Accepts, shows, follows and deletes jobs, and takes over the jobs of servers that crashed.

How it is connected (`build.py` makes it after the pipeline; `Pipeline` starts and closes it):

    pipeline.jobs = JobService(pipeline, JobStore(state_dir() / "jobs.db"), config.jobs)
    await jobs.start()     # at the end of Pipeline.start: takes over jobs of crashed servers
    jobs.pause()           # first in Pipeline.drain: no new job starts
    await jobs.close()     # first in Pipeline.close: open jobs wait for the next start

Callers (`Prefer: respond-async`): `job = await jobs.submit(JobSpec(request, explain))`,
with a new UUID as `request.id`; `api/native/jobs.py: accepted(job)` makes the 202 response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from coterie.core.errors import CoterieError, NotFound, Unavailable
from coterie.core.job import FAILED, PROCESSING, QUEUED, Job, JobError, JobPage, JobQuery, JobSpec
from coterie.core.plan import RoutePlan
from coterie.core.request import RouteHints
from coterie.core.sampling import draw_seed
from coterie.core.settings import JobSettings
from coterie.obs.log import log
from coterie.service.jobs.background import BackgroundWork
from coterie.service.jobs.codec import encode_spec
from coterie.service.jobs.dispatch import JobDispatcher, JobPipeline, LiveJob
from coterie.service.jobs.store import AbandonedJob, JobEnd, JobStore, NewJob, WaitingJob

# ended jobs that are kept on disk
MAX_ENDED = 100_000
MAX_ENDED_BYTES = 2 * 10**9
# how often to look for jobs of a killed server, and for cancellations by another server
SWEEP_S = 2.0
# a job that was running in this many servers when they died is given up as their cause
MAX_CRASHES = 10

Progress = RoutePlan | str | Job


class JobService:
    def __init__(self, pipeline: JobPipeline, store: JobStore, settings: JobSettings) -> None:
        self._pipeline, self._store, self._settings = pipeline, store, settings
        self._dispatcher = JobDispatcher(pipeline, store, settings)
        self._tasks: list[asyncio.Task[None]] = []
        # jobs that are being written to disk
        self._entering = 0
        # jobs of crashed servers that were taken over since start
        self.taken_up = 0

    def add_background(self, work: BackgroundWork, places: int) -> Callable[[], None]:
        """Run `work` beside the jobs; the dispatcher's method says more."""
        return self._dispatcher.add_background(work, places)

    async def start(self) -> None:
        """Does not raise without the database: then everything except jobs is served."""
        wait_s = await self._open()
        if wait_s != 0:
            self._tasks = [asyncio.create_task(self._open_later(wait_s))] if wait_s else []

    async def _open(self) -> float | None:
        """Open the database. Returns 0 if it worked, else the seconds until a retry may work; None
        if a retry cannot help."""
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
        """Accept and start no new job; running jobs may end."""
        self._dispatcher.pause()

    async def close(self) -> None:
        self.pause()
        dispatcher = self._dispatcher
        tasks = [*self._tasks, *dispatcher.running.values(), *dispatcher.background_running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        try:
            await self._store.close()
        except CoterieError as error:
            log("jobs_not_released", level="warning", reason=error.message)

    async def submit(self, spec: JobSpec) -> Job:
        """When this returns, the job is accepted: it will be answered exactly once, even if this
        process dies."""
        if self._dispatcher.is_paused:
            raise Unavailable("the server is shutting down")
        spec = replace(spec, request=self._pipeline.within_rights(spec.request))
        self._pipeline.resolve(spec.request.hints)
        await self._pipeline.check_format(spec.request)
        sampling = spec.request.sampling
        if sampling.seed is None:
            # so that a run after a crash produces the same text
            sampling = replace(sampling, seed=draw_seed())
            spec = replace(spec, request=replace(spec.request, sampling=sampling))
        raw = encode_spec(spec)
        with self._pipeline.count_request(spec.request):
            self._dispatcher.check_room(self._entering, len(raw))
        self._entering += 1
        # a job on disk is accepted, even if its caller has disconnected in the meantime
        return await asyncio.shield(self._accept(spec, raw))

    async def get(self, job_id: str, tenant: str) -> Job:
        job = await self._store.find(job_id, tenant)
        if job is None:
            raise NotFound(f"there is no job {job_id!r}", param="job_id")
        live = self._dispatcher.live.get(job_id)
        return replace(job, text=live.text) if live is not None and job.active else job

    async def page(self, query: JobQuery) -> JobPage:
        return await self._store.page(query)

    async def newest(self, limit: int, tenant: str | None) -> list[Job]:
        """Jobs without texts and results, newest first; of every tenant if `tenant` is None. Empty
        if the database cannot be used."""
        try:
            return await self._store.newest(limit, tenant)
        except CoterieError:
            return []

    async def cancel(self, job_id: str, tenant: str) -> tuple[Job, bool]:
        """Cancel an open job. Returns the job, and whether it was open."""
        job = await self.get(job_id, tenant)
        cancelled = job.active and await self._store.cancel(job_id, tenant, time.time(), job.text)
        if cancelled:
            self._dispatcher.stop(job_id)
        return await self.get(job_id, tenant), cancelled

    async def delete(self, job_id: str, tenant: str) -> tuple[Job, bool]:
        """Cancel an open job (False), or remove an ended job (True). Returns the job as it was."""
        job, cancelled = await self.cancel(job_id, tenant)
        if cancelled:
            return job, False
        return job, await self._store.remove(job_id, tenant)

    async def follow(self, job_id: str, tenant: str) -> AsyncGenerator[Progress, None]:
        """Yields the plan when the job runs, then pieces of text, and last the ended job."""
        job = await self.get(job_id, tenant)
        dispatcher = self._dispatcher
        live = dispatcher.live.setdefault(job_id, LiveJob()) if job.active else LiveJob()
        live.followers += 1
        plan_sent, parts = False, 0
        try:
            while job.active:
                if live.plan is not None and not plan_sent:
                    plan_sent = True
                    yield live.plan
                text, parts = live.since(parts)
                if text:
                    yield text
                if dispatcher.is_paused and job_id not in dispatcher.running:
                    raise Unavailable("the server is shutting down; the job is kept")
                if not await live.wait_for_change(SWEEP_S) or live.ended:
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
        """Take over the jobs of killed servers, remove old jobs, and stop jobs that another server
        with the same home folder has cancelled."""
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
        # read `running` first: a job that starts in the meantime is then not checked
        running = list(self._dispatcher.running)
        open_ids = await self._store.open_ids()
        for job_id in running:
            if job_id not in open_ids:
                self._dispatcher.stop(job_id)

    def _can_take(self, abandoned: AbandonedJob) -> bool:
        """Whether this server should take over the job. If it does not have the model, it leaves
        the job for a server that has, until the job is too old."""
        try:
            self._pipeline.resolve(RouteHints(abandoned.model or None))
        except NotFound:
            return abandoned.submitted_at < time.time() - self._settings.keep_s
        return True

    async def _give_up(self, entry: WaitingJob) -> None:
        message = f"{entry.crashes} servers died while this job ran in them"
        error = JobError("worker_crashed", message)
        await self._store.end(entry.id, JobEnd(FAILED, time.time(), error=error))
