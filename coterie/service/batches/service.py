"""Accepts, shows, runs and ends batches, and takes over the batches of servers that crashed.

A batch is accepted when its row and its input are on disk. Each status is a row in the database
before the work of it begins, so a server that starts later continues where the last one stopped.

    pipeline.batches = BatchService(BatchParts(...), pipeline.jobs)   # in `Pipeline`
    pipeline.batches.connect(calls)                                   # `create_app`: the APIs
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from coterie.core.batch import (
    BATCH_CANCELLED,
    BATCH_FAILED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FINALIZING,
    IN_PROGRESS,
    REQUEST_CANCELED,
    REQUEST_EXPIRED,
    VALIDATING,
    Batch,
    BatchPage,
    NewBatch,
    StoredFile,
)
from coterie.core.errors import Conflict, CoterieError, InvalidRequest, NotFound, Unavailable
from coterie.core.settings import BatchSettings
from coterie.obs.log import log
from coterie.service.batches.batch_tables import BatchEnd, BatchLine
from coterie.service.batches.calls import BatchCalls
from coterie.service.batches.files import REMOVED_AT_ONCE, FileStore
from coterie.service.batches.folder import INPUT
from coterie.service.batches.lines import LineChecker, LineReader
from coterie.service.batches.results import ResultWriter
from coterie.service.batches.store import RETRY_S, BatchStore
from coterie.service.batches.work import BatchWork, OpenBatch
from coterie.service.jobs.service import JobService

# how often to look for batches of a killed server and cancellations by another one; for old files
SWEEP_S, CLEAN_S = 2.0, 60.0
# faults of a batch that it shows; the file with errors has more
MAX_SHOWN_FAULTS = 50
# its results are a file that only the batch names
MESSAGE_BATCH = "msgbatch_"
OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What batches are kept in."""

    store: BatchStore
    files: FileStore
    settings: BatchSettings


class BatchService:
    def __init__(self, parts: BatchParts, jobs: JobService) -> None:
        self._store, self.files, self.settings = parts.store, parts.files, parts.settings
        # ended requests by state, since start
        self.ended: Counter[str] = Counter()
        self.work = BatchWork(self._store, self.files.folder, self._count)
        self.work.wake = jobs.add_background(self.work, self.settings.concurrency)
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self._open: dict[str, OpenBatch] = {}
        self._statuses: Counter[str] = Counter()
        self._sweeper: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        # input is checked, and results are written, for one batch at a time
        self._one_at_a_time = asyncio.Lock()
        self._is_paused = False
        # batches of crashed servers that were taken over since start
        self.taken_up = 0

    def connect(self, calls: BatchCalls) -> None:
        """The APIs that answer the requests. Nothing runs before."""
        self.work.calls = calls
        self._connected.set()
        self.work.wake()

    async def start(self) -> None:
        """Does not raise without the database: then everything except batches is served."""
        self._sweeper = asyncio.create_task(self._sweeps())

    def pause(self) -> None:
        """Accept no new batch."""
        self._is_paused = True

    async def close(self) -> None:
        """Open batches wait for the next start."""
        self.pause()
        tasks = [task for task in (self._sweeper, *self._drivers.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for opened in list(self._open.values()):
            await self.work.stop(opened)
        await self._store.close()
        self.files.folder.close()

    # what callers ask for

    def check_endpoint(self, endpoint: str) -> None:
        known = () if self.work.calls is None else self.work.calls.endpoints
        if endpoint not in known:
            listed = ", ".join(known)
            raise InvalidRequest(f"endpoint: must be one of {listed}", param="endpoint")

    async def create(self, new: NewBatch, input_file: StoredFile | None = None) -> Batch:
        """When this returns, the batch is accepted. Without `input_file` the input is in the folder
        already, under the batch's name."""
        if self._is_paused:
            raise Unavailable("the server is shutting down")
        folder = self.files.folder
        if input_file is not None:
            await folder.link(input_file.id, new.id + INPUT)
        # a batch on disk is accepted, even if its caller has disconnected in the meantime
        return await asyncio.shield(self._accept(new))

    async def _accept(self, new: NewBatch) -> Batch:
        max_open = self.settings.max_open
        try:
            await self._store.ask(
                lambda db: db.batches.add(new, VALIDATING, db.owner.name, max_open)
            )
        except CoterieError:
            await self.files.folder.remove(new.id + INPUT)
            raise
        batch = await self.find(new.id, new.tenant, new.dialect)
        self._drive_later(batch)
        return batch

    async def find(self, batch_id: str, tenant: str, dialect: str) -> Batch:
        batch = await self._store.ask(lambda db: db.batches.find(batch_id, tenant, dialect))
        if batch is None:
            raise NotFound("there is no batch with this id", param="batch_id")
        return batch

    async def page(
        self, tenant: str, dialect: str, cursor: str | None, limit: int, before: bool = False
    ) -> BatchPage:
        """Newest first. `before`: the page before the cursor, not after it."""
        found = await self._store.ask(
            lambda db: db.batches.page(tenant, dialect, cursor, limit, before)
        )
        if found is None:
            cursor_name = "after" if dialect == OPENAI else "after_id"
            name = "before_id" if before else cursor_name
            raise InvalidRequest(f"{name}: no batch has this id", param=name)
        batches = tuple(found[:limit])
        return BatchPage(batches[::-1] if before else batches, len(found) > limit)

    async def cancel(self, batch_id: str, tenant: str, dialect: str) -> Batch:
        """Stop a batch that has not ended; what was answered is kept."""
        batch = await self.find(batch_id, tenant, dialect)
        sources = (VALIDATING, IN_PROGRESS)
        moved = batch.status in sources and await self._store.ask(
            lambda db: db.batches.move(batch_id, sources, CANCELLING, time.time())
        )
        batch = await self.find(batch_id, tenant, dialect)
        if not moved and batch.status != CANCELLING:
            raise Conflict(f"a batch that is {batch.status} cannot be cancelled", param="batch_id")
        opened = self._open.get(batch_id)
        if opened is not None:
            opened.done.set()
        return batch

    async def delete(self, batch_id: str, tenant: str, dialect: str) -> None:
        """Remove an ended batch and its results."""
        batch = await self.find(batch_id, tenant, dialect)
        if batch.is_open:
            raise InvalidRequest(
                "a batch that has not ended cannot be deleted; cancel it first", param="batch_id"
            )
        await self._remove(batch_id)

    async def results(self, batch: Batch) -> StoredFile:
        """The file with the results of an ended batch."""
        if batch.output_file is None:
            raise NotFound("this batch has no results yet", param="batch_id")
        return await self.files.find(batch.output_file, batch.tenant)

    def counts(self) -> dict[str, int]:
        """This server's open batches by status, as of the last sweep."""
        return dict(self._statuses)

    # running

    def _count(self, state: str, count: int) -> None:
        self.ended[state] += count

    def _drive_later(self, batch: Batch) -> None:
        if batch.id not in self._drivers and not self._is_paused:
            task = asyncio.create_task(self._drive(batch))
            self._drivers[batch.id] = task
            task.add_done_callback(lambda _: self._drivers.pop(batch.id, None))

    async def _drive(self, batch: Batch) -> None:
        """Bring the batch to its end. A fault of the disk, or of ours, is tried again."""
        await self._connected.wait()
        while True:
            try:
                await self._to_the_end(batch)
                return
            except CoterieError as error:
                log("batch_delayed", level="warning", request_id=batch.id, reason=error.message)
            except Exception as error:
                log("batch_fault", level="error", request_id=batch.id, error=error)
            await asyncio.sleep(RETRY_S)
            found = await self._current(batch)
            if found is None:
                return
            batch = found

    async def _current(self, batch: Batch) -> Batch | None:
        """The batch as it is stored; None if it has ended."""
        while True:
            try:
                found = await self._store.ask(
                    lambda db: db.batches.find(batch.id, batch.tenant, batch.dialect)
                )
                return found if found is not None and found.is_open else None
            except CoterieError as error:
                await asyncio.sleep(error.retry_after_s or RETRY_S)

    async def _to_the_end(self, batch: Batch) -> None:
        if batch.status == VALIDATING:
            async with self._one_at_a_time:
                is_good = await self._validate(batch)
            if not is_good:
                return
        now = await self._current(batch)
        if now is None:
            return
        if now.status == IN_PROGRESS:
            await self._run(now)
        await self._finalize(now)

    async def _validate(self, batch: Batch) -> bool:
        """Check every line. False if the batch has ended in failure."""
        calls, folder, store = self.work.calls, self.files.folder, self._store
        assert calls is not None
        # the requests of a message batch were counted when it was accepted
        checker = LineChecker(batch, calls, max(self.settings.max_requests, batch.total))
        await store.ask(lambda db: db.batches.clear_requests(batch.id))
        path = folder.path(batch.id + INPUT)
        file: BinaryIO = await folder.aside(lambda: path.open("rb", 0))
        try:
            reader = LineReader(file, calls.max_line_bytes)
            while not checker.has_enough:
                lines = await folder.aside(reader.part)
                if not lines:
                    break
                found = await folder.aside(partial(checker.check, lines))
                await self._add_requests(batch, found)
        finally:
            file.close()
        checker.end()
        if checker.faults:
            await self._fail(batch, checker)
            return False
        sources = (VALIDATING,)
        await store.ask(lambda db: db.batches.begin(batch.id, sources, IN_PROGRESS, time.time()))
        return True

    async def _add_requests(self, batch: Batch, lines: Sequence[BatchLine]) -> None:
        if lines:
            await self._store.ask(lambda db: db.batches.add_requests(batch.id, lines))

    async def _fail(self, batch: Batch, checker: LineChecker) -> None:
        assert self.work.calls is not None
        writer = ResultWriter(self._store, self.files, self.work.calls, batch)
        error = await writer.write_faults(checker.faults)
        shown = checker.faults[:MAX_SHOWN_FAULTS]
        await self._finish(batch, BatchEnd(BATCH_FAILED, time.time(), error=error, faults=shown))

    async def _run(self, batch: Batch) -> None:
        """Until every request has ended, the time is over, or the batch is cancelled."""
        left = await self._store.ask(lambda db: db.batches.num_pending(batch.id))
        opened = self._open[batch.id] = self.work.add(batch, left)
        # taken once: a clock that is set later neither ends a batch early nor keeps it
        left_s = min(batch.expires_at - time.time(), batch.expires_at - batch.created_at)
        try:
            async with asyncio.timeout(left_s):
                await opened.done.wait()
        except TimeoutError:
            pass
        finally:
            self._open.pop(batch.id, None)
            await self.work.stop(opened)

    async def _finalize(self, batch: Batch) -> None:
        """Write the files with results, then the end."""
        assert self.work.calls is not None
        now = await self._current(batch)
        if now is None:
            return
        is_cancelled = now.status == CANCELLING
        state = REQUEST_CANCELED if is_cancelled else REQUEST_EXPIRED
        cut = await self._store.ask(lambda db: db.batches.cut_off(batch.id, state))
        self._count(state, cut)
        if not is_cancelled:
            sources = (IN_PROGRESS, FINALIZING)
            moved = await self._store.ask(
                lambda db: db.batches.move(batch.id, sources, FINALIZING, time.time())
            )
            if not moved:
                # it was cancelled at the last moment
                raise Unavailable("the batch has changed", retry_after_s=RETRY_S)
        async with self._one_at_a_time:
            writer = ResultWriter(self._store, self.files, self.work.calls, now)
            output, error = await writer.write()
        now = await self._current(batch)
        if now is None:
            return
        status = COMPLETED
        if is_cancelled:
            status = BATCH_CANCELLED
        elif now.counts[REQUEST_EXPIRED]:
            status = EXPIRED
        await self._finish(now, BatchEnd(status, time.time(), output, error))

    async def _finish(self, batch: Batch, end: BatchEnd) -> None:
        if not await self._store.ask(lambda db: db.batches.finish(batch.id, end)):
            files = [file.id for file in (end.output, end.error) if file is not None]
            await self.files.folder.remove(*files)
        await self.files.folder.remove(batch.id + INPUT)
        log("batch_ended", request_id=batch.id, status=end.status)

    # what is looked at from time to time

    async def _sweeps(self) -> None:
        cleaned_at = 0.0
        while True:
            try:
                await self._sweep()
                if time.monotonic() - cleaned_at > CLEAN_S or not cleaned_at:
                    await self._clean()
                    cleaned_at = time.monotonic()
            except CoterieError as error:
                log("batches_not_swept", level="warning", reason=error.message)
            except Exception as error:
                log("batches_fault", level="error", error=error)
            await asyncio.sleep(SWEEP_S)

    async def _sweep(self) -> None:
        """Take over the batches of killed servers, and stop those that another server with the same
        home folder has cancelled."""
        taken = await self._store.ask(lambda db: db.adopt())
        if taken:
            self.taken_up += taken
            log("batches_adopted", pending=taken)
        owned = await self._store.ask(lambda db: db.batches.owned(db.owner.name))
        self._statuses = Counter(batch.status for batch in owned)
        for batch in owned:
            opened = self._open.get(batch.id)
            if opened is not None and batch.status == CANCELLING:
                opened.done.set()
            self._drive_later(batch)

    async def _clean(self) -> None:
        await self.files.expire()
        await self.files.remove_orphans()
        before = time.time() - self.files.settings.keep_s
        for batch_id, _ in await self._store.ask(
            lambda db: db.batches.ended_before(before, REMOVED_AT_ONCE)
        ):
            await self._remove(batch_id)

    async def _remove(self, batch_id: str) -> None:
        """Remove an ended batch. Files of its tenant stay until they are too old themselves."""
        file_id = await self._store.ask(lambda db: db.batches.remove(batch_id))
        if file_id is not None and batch_id.startswith(MESSAGE_BATCH):
            await self.files.drop(file_id)
