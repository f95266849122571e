"""One job's way through the pipeline: read it, answer it, write how it ended.

What only says "not now" (a full queue, a restart, a shutdown) leaves the job as it was. Knows
neither the queue nor who else runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import msgspec

from coterie.core.errors import CoterieError, InternalError, NotFound, Overloaded, Unavailable
from coterie.core.events import Delta, Event
from coterie.core.job import FAILED, SUCCEEDED, JobError, JobSpec
from coterie.core.outcome import InferenceMetrics
from coterie.core.plan import RoutePlan, stack_key
from coterie.core.request import AdapterHint, InferenceRequest, RouteHints, Sampling
from coterie.obs.trace import log
from coterie.service.answer import AnswerBuilder
from coterie.service.deadline import Events, until_deadline
from coterie.service.jobs.codec import decode_plan, decode_spec, encode_plan, encode_result
from coterie.service.jobs.store import RETRY_S, JobStore
from coterie.service.jobs.tables import JobEnd

NOT_NOW = (Overloaded, Unavailable)


class JobPipeline(Protocol):
    """The part of `service.pipeline.Pipeline` that jobs use."""

    def resolve(self, hints: RouteHints) -> str: ...
    async def check_format(self, request: InferenceRequest) -> None: ...
    def within_rights(self, request: InferenceRequest) -> InferenceRequest: ...
    def expected_wait_s(self) -> float: ...
    def handle(
        self,
        request: InferenceRequest,
        vendor: Sampling = ...,
        tell: Callable[[RoutePlan], None] | None = None,
        left: Callable[[InferenceMetrics], None] | None = None,
    ) -> AsyncGenerator[Event, None]: ...


class JobRun:
    def __init__(self, answers: JobPipeline, store: JobStore, job_id: str, live: LiveJob) -> None:
        self._answers = answers
        self._store = store
        self._id = job_id
        self._live = live
        self._begun = False
        self._length = 0

    async def attempt(self) -> None:
        """Returns when the job has ended, here or by somebody else's hand. Raises what means
        "not now", and then the job waits again."""
        try:
            ending = await self._ending()
        except NOT_NOW:
            if self._begun:
                await self._store.requeue(self._id)
            raise
        if ending is not None:
            await self._write(ending)

    async def _ending(self) -> JobEnd | None:
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

    async def _answer(self, spec: JobSpec, stored: RoutePlan | None) -> JobEnd | None:
        plans, events = await self._events(spec, stored)
        async with aclosing(events):
            builder = AnswerBuilder(self._id, plans, explain=spec.explain)
            async for event in events:
                if not self._begun and not await self._begin(plans[-1]):
                    return None
                builder.take(event)
                if isinstance(event, Delta) and event.choice == 0:
                    self._live.feed(self._length, event.text)
                    self._length += len(event.text)
        result = builder.result()
        return JobEnd(SUCCEEDED, time.time(), result=encode_result(result))

    async def _events(
        self, spec: JobSpec, stored: RoutePlan | None
    ) -> tuple[list[RoutePlan], Events]:
        """A run that is repeated goes by the plan of the first one: what was installed or learnt
        meanwhile does not change its answer."""
        request, plans, left = spec.request, list[RoutePlan](), list[InferenceMetrics]()
        if stored is not None:
            again = replace(request, sampling=replace(stored.sampling, constraint=None))
            for asked in (again, pinned(again, stored)):
                try:
                    events = self._answers.handle(asked, spec.vendor, plans.append, left.append)
                except NotFound:
                    continue
                if _who(plans[-1]) == _who(stored):
                    return plans, until_deadline(events, asked, left)
                await events.aclose()
                left.clear()
        # the first run, or what it ran on is gone: it is answered as if it came now
        events = self._answers.handle(request, spec.vendor, plans.append, left.append)
        return plans, until_deadline(events, request, left)

    async def _begin(self, plan: RoutePlan) -> bool:
        """Before any of its text is seen: a run after a crash goes by the same plan."""
        self._begun = await self._store.begin(self._id, time.time(), encode_plan(plan))
        self._live.plan = plan
        self._live.tell()
        return self._begun

    def _failed(self, error: CoterieError) -> JobEnd:
        return JobEnd(
            FAILED, time.time(), self._live.text, error=JobError(error.code, error.message)
        )

    async def _write(self, ending: JobEnd) -> None:
        """An answer is not given up because the disk is full at the moment."""
        while True:
            try:
                await self._store.end(self._id, ending)
                return
            except Unavailable as error:
                log("job_not_written", level="warning", request_id=self._id, reason=error.message)
                await asyncio.sleep(error.retry_after_s or RETRY_S)


def pinned(request: InferenceRequest, plan: RoutePlan) -> InferenceRequest:
    """Asks for exactly what `plan` chose, by name and version."""
    adapters = tuple(AdapterHint(item.name, item.weight) for item in plan.adapters)
    hints = replace(request.hints, model=plan.specialist, adapters=adapters, exclude=())
    return replace(request, hints=hints)


def _who(plan: RoutePlan) -> tuple[str, str]:
    return plan.specialist, stack_key(plan.adapters)


class LiveJob:
    """A run that is repeated draws the same text: it only ever gets longer."""

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
        """What came behind the first `count` parts, and how many parts there are."""
        return "".join(self._parts[count:]), len(self._parts)

    def feed(self, offset: int, text: str) -> None:
        """`text` stands at this offset of the answer."""
        new = text[max(0, self._length - offset) :]
        if new:
            self._parts.append(new)
            self._length += len(new)
            self.tell()

    def tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> bool:
        """Whether anything is new; at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
