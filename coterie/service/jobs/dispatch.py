"""Starts waiting jobs while fewer than the allowed number run, and ends the running ones.

When the engine is full, no job starts until the engine may have room again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import msgspec

from coterie.core.errors import (
    CoterieError,
    Drained,
    InternalError,
    NotFound,
    Overloaded,
    Unavailable,
)
from coterie.core.events import Delta, Event, InferenceMetrics, Started
from coterie.core.job import FAILED, SUCCEEDED, JobError, JobSpec
from coterie.core.plan import RoutePlan, stack_key
from coterie.core.request import AdapterHint, InferenceRequest, RouteHints, Sampling
from coterie.core.settings import JobSettings
from coterie.obs.log import log
from coterie.service.answer import AnswerBuilder
from coterie.service.jobs.background import BackgroundPlaces, BackgroundWork
from coterie.service.jobs.codec import (
    PlannedRun,
    decode_plan,
    decode_spec,
    encode_plan,
    encode_result,
)
from coterie.service.jobs.queue import JobQueue, is_suspect
from coterie.service.jobs.store import RETRY_S, JobEnd, JobStore, WaitingJob
from coterie.service.quotas import QuotaUse
from coterie.service.request_limits import Events, until_deadline

# size of all waiting requests on disk
MAX_QUEUED_BYTES = 512 * 10**6
# weight of the newest duration in the moving average
NEWEST = 0.1
MAX_PAUSE_S = 30.0
MAX_ESTIMATE_S = 24 * 3600.0


class JobDispatcher:
    def __init__(self, pipeline: JobPipeline, store: JobStore, settings: JobSettings) -> None:
        self._pipeline, self._store, self._settings = pipeline, store, settings
        self.running: dict[str, asyncio.Task[None]] = {}
        self.live: dict[str, LiveJob] = {}
        self.queue = JobQueue()
        self.is_paused = False
        # no job starts before this time.monotonic()
        self.not_before = 0.0
        self._wake = asyncio.Event()
        self._alone = False
        # moving average of a run's duration
        self._run_s = 1.0
        self._background: BackgroundPlaces | None = None

    def add_background(self, work: BackgroundWork, places: int) -> Callable[[], None]:
        """Start work of `work` in `places` of its own while no job could start instead. Returns
        what is to be called when there is new work."""
        self._background = BackgroundPlaces(work, places)
        return self._wake.set

    @property
    def background_running(self) -> Collection[asyncio.Task[None]]:
        return () if self._background is None else tuple(self._background.running)

    def push(self, entry: WaitingJob) -> None:
        self.queue.push(entry)
        self._wake.set()

    def pause(self) -> None:
        """Start no new job; running jobs may end."""
        self.is_paused = True
        for live in self.live.values():
            live.notify()

    def stop(self, job_id: str) -> None:
        """Stop computing a job that has ended on disk."""
        task = self.running.get(job_id)
        if task is not None:
            task.cancel()
        elif self.queue.drop(job_id) is not None:
            self._end(job_id)

    def forget(self, job_id: str) -> None:
        """Remove the live state of a job that neither runs nor is followed by a client."""
        live = self.live.get(job_id)
        if live is not None and not live.followers and job_id not in self.running:
            del self.live[job_id]

    def check_room(self, entering: int, nbytes: int) -> None:
        """Raise if the queue is full. `entering`: jobs that are being written to disk."""
        count, limit = len(self.queue) + entering, self._settings.max_queued
        if count >= limit or self.queue.nbytes + nbytes > MAX_QUEUED_BYTES:
            what = f"{count} jobs wait, and {limit} may"
            if count < limit:
                what = f"the jobs that wait hold {self.queue.nbytes} bytes"
            wait_s = min(max(self._run_s, 1.0), MAX_PAUSE_S)
            raise Overloaded(f"{what}; ask again later", retry_after_s=wait_s)

    def expected_wait_s(self, priority: int) -> float:
        """Estimated time until a job of this priority would start if it came now."""
        ahead = self.queue.ahead(priority) + len(self.running)
        places = self._settings.concurrency
        # each place becomes free after one run
        rounds = max(0, ahead + 1 - places) / places
        paused_s = max(0.0, self.not_before - time.monotonic())
        wait_s = paused_s + rounds * self._run_s + self._pipeline.expected_wait_s()
        return min(wait_s, MAX_ESTIMATE_S)

    async def loop(self) -> None:
        while True:
            entry = self._next()
            if entry is not None:
                self.queue.drop(entry.id)
                self._alone = is_suspect(entry)
                self.running[entry.id] = asyncio.create_task(self._run(entry))
                continue
            if self._starts_background():
                continue
            self._wake.clear()
            try:
                # not asyncio.wait_for: it can lose a cancellation
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _pause_s(self) -> float | None:
        """Seconds until something may start without a wake-up."""
        paused_s = self.not_before - time.monotonic()
        if paused_s > 0:
            return paused_s
        others_s = None if self._background is None else self._background.pause_s()
        due_at = self.queue.due_at()
        if due_at is None:
            return others_s
        due_s = max(due_at - time.monotonic(), 0.0)
        return due_s if others_s is None else min(due_s, others_s)

    def _starts_background(self) -> bool:
        """Start background work, if it may start now. Jobs that could start were started before."""
        is_delayed = time.monotonic() < self.not_before or (self._alone and bool(self.running))
        if self._background is None or self.is_paused or is_delayed:
            return False
        return self._background.start(self._wake.set)

    def _next(self) -> WaitingJob | None:
        """The job that may start now, if any."""
        self.queue.release()
        places = 1 if self._alone else self._settings.concurrency
        full = bool(self.running) and len(self.running) >= places
        if self.is_paused or full or time.monotonic() < self.not_before:
            return None
        entry = self.queue.peek()
        if entry is not None and is_suspect(entry) and self.running:
            return None
        return entry

    async def _run(self, entry: WaitingJob) -> None:
        live = self.live.setdefault(entry.id, LiveJob())
        began = time.monotonic()
        must_retry, deferred_s = False, 0.0
        try:
            await JobRun(self._pipeline, self._store, entry.id, live).attempt()
            self._run_s += NEWEST * (time.monotonic() - began - self._run_s)
        except Drained as error:
            deferred_s = error.retry_after_s or RETRY_S
        except NOT_NOW as error:
            must_retry = True
            self._delay_starts(error)
        finally:
            del self.running[entry.id]
            if deferred_s:
                # jobs of other specialists go on meanwhile
                self.queue.defer(entry, time.monotonic() + deferred_s)
            elif must_retry:
                self.queue.push(entry)
            else:
                self._end(entry.id)
            self._wake.set()

    def _delay_starts(self, error: CoterieError) -> None:
        wait_s = min(error.retry_after_s or RETRY_S, MAX_PAUSE_S)
        self.not_before = max(self.not_before, time.monotonic() + wait_s)

    def _end(self, job_id: str) -> None:
        live = self.live.get(job_id)
        if live is not None:
            live.ended = True
            live.notify()
            self.forget(job_id)


NOT_NOW = (Overloaded, Unavailable)


class JobPipeline(Protocol):
    """The part of `service.pipeline.Pipeline` that jobs use."""

    def resolve(self, hints: RouteHints) -> str: ...
    async def check_format(self, request: InferenceRequest) -> None: ...
    def within_rights(self, request: InferenceRequest) -> InferenceRequest: ...
    def count_request(self, request: InferenceRequest) -> QuotaUse: ...
    def expected_wait_s(self) -> float: ...
    def handle(
        self,
        request: InferenceRequest,
        vendor: Sampling = ...,
        on_plan: Callable[[RoutePlan], None] | None = None,
        on_abort: Callable[[InferenceMetrics], None] | None = None,
    ) -> AsyncGenerator[Event, None]: ...


class JobRun:
    def __init__(self, pipeline: JobPipeline, store: JobStore, job_id: str, live: LiveJob) -> None:
        self._pipeline = pipeline
        self._store = store
        self._id = job_id
        self._live = live
        self._started = False
        self._length = 0

    async def attempt(self) -> None:
        """Run the job once. Returns when it has ended, here or because someone cancelled it. Raises
        Overloaded or Unavailable if it cannot run now; then the job waits again."""
        try:
            ending = await self._run_to_end()
        except NOT_NOW:
            if self._started:
                await self._store.requeue(self._id)
            raise
        if ending is not None:
            await self._write(ending)

    async def _run_to_end(self) -> JobEnd | None:
        stored = await self._store.request(self._id)
        if stored is None:
            return None
        try:
            spec = decode_spec(stored.request, time.monotonic(), stored.submitted_at)
            plan = None if stored.plan is None else decode_plan(stored.plan)
            return await self._answer(spec, plan)
        except NOT_NOW:
            raise
        except msgspec.MsgspecError as error:
            log("job_unreadable", level="error", error=error, request_id=self._id)
            return self._failed(InternalError("what was stored of this job cannot be read"))
        except CoterieError as error:
            return self._failed(error)
        except Exception as error:
            log("job_fault", level="error", error=error, request_id=self._id)
            return self._failed(
                InternalError("the server failed to answer; the log has the job id")
            )

    async def _answer(self, spec: JobSpec, stored: PlannedRun | None) -> JobEnd | None:
        plans, events = await self._events(spec, stored)
        async with aclosing(events):
            builder = AnswerBuilder(
                self._id, plans, explain=spec.explain, keeps_deltas=spec.keeps_deltas
            )
            async for event in events:
                if not self._started and not await self._begin(plans[-1], event):
                    return None
                builder.take(event)
                if isinstance(event, Delta) and event.choice == 0:
                    self._live.feed(self._length, event.text)
                    self._length += len(event.text)
        result = builder.result()
        return JobEnd(SUCCEEDED, time.time(), result=encode_result(result))

    async def _events(
        self, spec: JobSpec, stored: PlannedRun | None
    ) -> tuple[list[RoutePlan], Events]:
        """The plans and events of this run. A repeated run follows the plan of the first run: what
        was installed or learnt in the meantime does not change its answer."""
        request, plans, metrics = spec.request, list[RoutePlan](), list[InferenceMetrics]()
        if stored is not None:
            repeated = replace(request, sampling=replace(stored.sampling, constraint=None))
            for candidate in (repeated, pinned(repeated, stored)):
                try:
                    events = self._pipeline.handle(
                        candidate, spec.vendor, plans.append, metrics.append
                    )
                except NotFound:
                    continue
                if _models_of(plans[-1]) == _models_of(stored):
                    return plans, until_deadline(events, candidate, metrics)
                await events.aclose()
                metrics.clear()
        # the first run, or its model is gone: answer the request as if it came now
        events = self._pipeline.handle(request, spec.vendor, plans.append, metrics.append)
        return plans, until_deadline(events, request, metrics)

    async def _begin(self, plan: RoutePlan, event: Event) -> bool:
        """Store the plan before any text is shown: a run after a crash follows the same plan.
        `event` is its first one, which often comes with the first token."""
        at = time.time()
        if isinstance(event, Started) and event.at:
            at -= max(time.monotonic() - event.at, 0.0)
        self._started = await self._store.begin(self._id, at, encode_plan(plan))
        self._live.plan = plan
        self._live.notify()
        return self._started

    def _failed(self, error: CoterieError) -> JobEnd:
        return JobEnd(
            FAILED, time.time(), self._live.text, error=JobError(error.code, error.message)
        )

    async def _write(self, ending: JobEnd) -> None:
        """Write the result. Retries while the database cannot be used (full disk)."""
        while True:
            try:
                await self._store.end(self._id, ending)
                return
            except Unavailable as error:
                log("job_not_written", level="warning", request_id=self._id, reason=error.message)
                await asyncio.sleep(error.retry_after_s or RETRY_S)


def pinned(request: InferenceRequest, plan: PlannedRun) -> InferenceRequest:
    """The request with hints for exactly the specialist and adapters that `plan` chose."""
    adapters = tuple(AdapterHint(item.name, item.weight) for item in plan.adapters)
    hints = replace(request.hints, model=plan.specialist, adapters=adapters, exclude=())
    return replace(request, hints=hints)


def _models_of(plan: RoutePlan | PlannedRun) -> tuple[str, str]:
    return plan.specialist, stack_key(plan.adapters)


class LiveJob:
    """The text of a job so far, for the clients that follow it. A repeated run produces the same
    text, so the text only grows."""

    def __init__(self) -> None:
        self.plan: RoutePlan | None = None
        self.ended = False
        self.followers = 0
        self._parts: list[str] = []
        self._length = 0
        self._changed = asyncio.Event()

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def since(self, count: int) -> tuple[str, int]:
        """The text after the first `count` parts, and the number of parts."""
        return "".join(self._parts[count:]), len(self._parts)

    def feed(self, offset: int, text: str) -> None:
        """Add `text`, which is at `offset` in the answer."""
        new = text[max(0, self._length - offset) :]
        if new:
            self._parts.append(new)
            self._length += len(new)
            self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until something is new. False if nothing changed within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
