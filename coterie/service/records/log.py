"""The log of inferences and the success rates of adapters, for use on the event loop.

One thread writes rows to the store, many in one commit; rates are read from memory. If the store is
locked, rows wait; if it fails, they are lost. In both cases no request fails.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from coterie.core.errors import CoterieError, Unavailable, WeightsError
from coterie.obs.log import log
from coterie.service.records.store import (
    InferenceRecord,
    Rate,
    RecordPage,
    RecordQuery,
    RecordStore,
)

# rows are collected this long before they are committed, unless a query arrives
GATHER_S = 0.05
# rows that may wait for the disk; further rows are dropped and counted
MAX_WAITING = 10_000
RETRY_S = 5.0

T = TypeVar("T")
Work = Callable[[RecordStore], None]


class InferenceRecords:
    """`path` is the database file; with None nothing is stored. Used from one event loop."""

    def __init__(self, path: Path | None, max_records: int = 100_000) -> None:
        self._path, self._max_records = path, max_records
        self._rates: dict[str, Rate] = {}
        # rows, queries, and None for the end
        self._items: queue.SimpleQueue[InferenceRecord | Work | None] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # the last write failed, and that was logged
        self._is_failing = False
        # for metrics, since start
        self.dropped = 0
        self.verdicts = {"good": 0, "bad": 0}

    async def start(self) -> None:
        if self._path is None:
            return
        self._loop = asyncio.get_running_loop()
        try:
            store = await asyncio.to_thread(RecordStore, self._path, self._max_records)
            self._rates = await asyncio.to_thread(store.rates)
        except CoterieError as error:
            # serve without the log rather than not at all
            log("records_unreadable", level="warning", reason=error.message)
            return
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="records", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """When this returns, everything that was logged is on disk."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._items.put(None)
            self._wake.set()
            await asyncio.to_thread(thread.join)

    def rate(self, digest: str) -> Rate:
        """Answers of an adapter: (how many were valid, how many were validated)."""
        return self._rates.get(digest, (0, 0))

    def log(self, record: InferenceRecord) -> None:
        """Add a row. Never waits; a later query sees the row."""
        if self._thread is None:
            return
        if self._items.qsize() >= MAX_WAITING:
            self.dropped += 1
        else:
            self._items.put(record)

    async def query(self, query: RecordQuery) -> RecordPage:
        return await self._ask(lambda store: store.query(query))

    async def feedback(self, job_id: str, tenant: str, good: bool, comment: str = "") -> None:
        """Store a caller's verdict on its own job, once. Raises NotFound or Conflict."""
        changed = await self._ask(lambda store: _judged(store, job_id, tenant, good, comment))
        self._rates.update(changed)
        self.verdicts["good" if good else "bad"] += 1

    async def _ask(self, question: Callable[[RecordStore], T]) -> T:
        if self._thread is None:
            raise Unavailable("the log of inferences cannot be opened; see the server's log")
        answer: Future[T] = Future()

        def work(store: RecordStore) -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question(store))
                except Exception as error:
                    answer.set_exception(error)

        self._items.put(work)
        self._wake.set()
        try:
            return await asyncio.wrap_future(answer)
        except WeightsError as error:
            log("records_failed", level="warning", reason=error.message)
            raise Unavailable(
                "the log of inferences cannot be used now; see the server's log",
                retry_after_s=RETRY_S,
            ) from error

    def _run(self, store: RecordStore) -> None:
        is_open = True
        while is_open:
            items = [self._items.get()]
            if isinstance(items[0], InferenceRecord):
                self._wake.wait(GATHER_S)
            self._wake.clear()
            items += [self._items.get() for _ in range(self._items.qsize())]
            self._write(store, [item for item in items if isinstance(item, InferenceRecord)])
            for item in items:
                if item is None:
                    is_open = False
                elif not isinstance(item, InferenceRecord):
                    item(store)
        store.close()

    def _write(self, store: RecordStore, rows: list[InferenceRecord]) -> None:
        if not rows:
            return
        try:
            changed = store.rates(store.add(rows))
        except Unavailable as error:
            # another process has locked it: write these rows with the next ones
            self._failing(reason=error.message)
            for row in rows:
                self._items.put(row)
            return
        except CoterieError as error:
            self.dropped += len(rows)
            self._failing(reason=error.message)
            return
        except Exception as error:
            # the thread must go on after any error: queries wait for its answers
            self.dropped += len(rows)
            self._failing(error=error)
            return
        self._is_failing = False
        loop = self._loop
        if changed and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._rates.update, changed)

    def _failing(self, **why: Any) -> None:
        """Log the failure once, not for every row."""
        if not self._is_failing:
            self._is_failing = True
            log("records_unwritable", level="warning", **why)


def _judged(
    store: RecordStore, job_id: str, tenant: str, good: bool, comment: str
) -> dict[str, Rate]:
    return store.rates(store.judge(job_id, tenant, good, comment))
