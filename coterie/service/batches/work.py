"""The requests of open batches as work for the job dispatcher: which one starts next, and running
it.

Tenants with fewer running requests come first, then the batch that was served longest ago. A
request that cannot run now waits again, behind the others of its batch. A batch whose requests are
refused waits alone: its model may be the only one that cannot answer. So does a tenant whose quota
is used up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from coterie.core.batch import IN_PROGRESS, REQUEST_ERRORED, Batch
from coterie.core.errors import CoterieError, Drained, Overloaded, Unavailable, WorkerCrashed
from coterie.obs.log import log
from coterie.service.batches.batch_tables import ClaimedRequest
from coterie.service.batches.calls import BatchCalls, RequestAnswer
from coterie.service.batches.folder import INPUT, FileFolder
from coterie.service.batches.store import RETRY_S, BatchStore
from coterie.service.quotas import QuotaExceeded

# a request that ran in this many servers when they died is given up as their cause
MAX_CRASHES = 10
MAX_TENANT_PAUSE_S = 60.0
# a batch waits after a refusal of a full queue, if none of its requests runs that could make room;
# or after so many in a row of models without a worker. Longer each time
MAX_REFUSED, FIRST_PAUSE_S, MAX_PAUSE_S = 8, 1.0, 30.0


@dataclass(slots=True)
class OpenBatch:
    """A batch of this server that has requests to run."""

    batch: Batch
    # requests that no run has taken
    left: int
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    # runs that were given to the dispatcher and have not ended
    num_taken: int = 0
    # time.monotonic()
    served_at: float = 0.0
    not_before: float = 0.0
    # the request that was refused last: those behind it are tried first
    refused_line: int = 0
    # refusals and pauses since the last answer
    num_refused: int = 0
    num_pauses: int = 0
    # set when every request has ended, or none may run any more
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def refused(self, line: int, error: CoterieError) -> None:
        self.refused_line = line
        self.num_refused += 1
        is_full = isinstance(error, Overloaded) and self.num_taken <= 1
        if is_full or self.num_refused >= MAX_REFUSED:
            wait_s = max(error.retry_after_s or 0.0, FIRST_PAUSE_S * 2.0**self.num_pauses)
            self.not_before = time.monotonic() + min(wait_s, MAX_PAUSE_S)
            self.num_refused, self.num_pauses = 0, min(self.num_pauses + 1, 8)

    def answered(self) -> None:
        self.num_refused = self.num_pauses = 0


class RequestCounter(Protocol):
    """Counts ended requests by state."""

    def __call__(self, state: str, count: int, /) -> None: ...


class BatchWork:
    """`take` is called by the job dispatcher when it has a place."""

    def __init__(self, store: BatchStore, folder: FileFolder, on_end: RequestCounter) -> None:
        self._store, self._folder, self._on_end = store, folder, on_end
        self._batches: dict[str, OpenBatch] = {}
        # tenant -> time.monotonic() before which none of its requests starts
        self._not_before: dict[str, float] = {}
        self.calls: BatchCalls | None = None
        self.wake = _nothing

    def add(self, batch: Batch, left: int) -> OpenBatch:
        opened = OpenBatch(batch, left)
        self._batches[batch.id] = opened
        if not left:
            opened.done.set()
        self.wake()
        return opened

    async def stop(self, opened: OpenBatch) -> None:
        """Start no more of its requests, and stop those that run."""
        self._batches.pop(opened.batch.id, None)
        tasks = list(opened.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def counts(self) -> dict[str, int]:
        """Requests of this server's batches, for metrics."""
        batches = self._batches.values()
        return {
            "waiting": sum(item.left for item in batches),
            "running": sum(item.num_taken for item in batches),
        }

    def take(self) -> Coroutine[Any, Any, None] | None:
        """The next request to run; None if there is none."""
        opened = self._choose() if self.calls is not None else None
        if opened is None:
            return None
        opened.left -= 1
        opened.num_taken += 1
        opened.served_at = time.monotonic()
        return self._run(opened)

    def next_start_s(self) -> float | None:
        """Seconds until a batch that waits, or a tenant that waits for its quota, may start
        again."""
        now = time.monotonic()
        starts = [self._start_of(item) for item in self._batches.values() if item.left]
        waiting = [at - now for at in starts if at > now]
        return max(min(waiting), 0.01) if waiting else None

    def _start_of(self, item: OpenBatch) -> float:
        return max(item.not_before, self._not_before.get(item.batch.tenant, 0.0))

    def _choose(self) -> OpenBatch | None:
        now = time.monotonic()
        self._not_before = {t: at for t, at in self._not_before.items() if at > now}
        loads: dict[str, int] = {}
        for item in self._batches.values():
            loads[item.batch.tenant] = loads.get(item.batch.tenant, 0) + item.num_taken
        ready = [
            item for item in self._batches.values() if item.left > 0 and self._start_of(item) <= now
        ]
        return min(ready, key=lambda item: (loads[item.batch.tenant], item.served_at), default=None)

    async def _run(self, opened: OpenBatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        opened.running.add(task)
        try:
            await self._run_next(opened)
        finally:
            opened.running.discard(task)
            opened.num_taken -= 1
            if not opened.left and not opened.num_taken:
                opened.done.set()

    async def _run_next(self, opened: OpenBatch) -> None:
        batch = opened.batch
        try:
            after = opened.refused_line
            request = await self._store.ask(
                lambda db: db.batches.claim(batch.id, IN_PROGRESS, after)
            )
        except Unavailable:
            opened.left += 1
            raise
        if request is None:
            # it is being cancelled
            opened.left = 0
            return
        try:
            answer = await self._answer(batch, request)
        except (Overloaded, Unavailable) as error:
            await self._requeue(request)
            opened.left += 1
            if isinstance(error, QuotaExceeded):
                wait_s = min(error.retry_after_s or RETRY_S, MAX_TENANT_PAUSE_S)
                self._not_before[batch.tenant] = time.monotonic() + wait_s
                return
            opened.refused(request.line, error)
            if isinstance(error, Overloaded) and not isinstance(error, Drained):
                raise
            return
        opened.answered()
        await self._write(batch, request, answer)

    async def _answer(self, batch: Batch, request: ClaimedRequest) -> RequestAnswer:
        calls = self.calls
        assert calls is not None
        if request.crashes >= MAX_CRASHES:
            error = WorkerCrashed(f"{request.crashes} servers died while this request ran in them")
            return RequestAnswer(calls.error_line(batch, request, error), REQUEST_ERRORED)
        raw = await self._folder.read(batch.id + INPUT, request.start, request.length)
        return await calls.answer(batch, request, raw)

    async def _write(self, batch: Batch, request: ClaimedRequest, answer: RequestAnswer) -> None:
        """Write the answer. Retries while the database cannot be used (full disk)."""
        while True:
            try:
                written = await self._store.ask(
                    lambda db: db.batches.end_request(
                        batch.id, request.id, answer.state, answer.line, answer.tokens
                    )
                )
                break
            except Unavailable as error:
                log("batch_not_written", level="warning", request_id=batch.id, reason=error.message)
                await asyncio.sleep(error.retry_after_s or RETRY_S)
        if written:
            self._on_end(answer.state, 1)

    async def _requeue(self, request: ClaimedRequest) -> None:
        while True:
            try:
                await self._store.ask(lambda db: db.batches.requeue(request.id))
                return
            except CoterieError as error:
                await asyncio.sleep(error.retry_after_s or RETRY_S)


def _nothing() -> None:
    """The default of `wake`: nobody waits for work yet."""
