"""The log of inferences, the receipts and the success rates of adapters, for the event loop.

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

import msgspec

from coterie.core.errors import CoterieError, NotFound, Unavailable, WeightsError
from coterie.obs.log import log
from coterie.service.receipts.journal import ReceiptJournal, left_behind
from coterie.service.receipts.store import ReceiptPage, ReceiptQuery, ReceiptRow
from coterie.service.records.store import (
    InferenceRecord,
    Rate,
    RecordPage,
    RecordQuery,
    RecordStore,
    VerdictEffect,
)

# rows are gathered this long before they are handed to the thread, unless a query arrives
GATHER_S = 0.05
# rows that may wait for the disk; further rows are dropped and counted
MAX_WAITING = 10_000
RETRY_S = 5.0

T = TypeVar("T")
Work = Callable[[RecordStore], None]
Row = InferenceRecord | ReceiptRow

_encode_row = msgspec.msgpack.Encoder().encode
_decode_row = msgspec.msgpack.Decoder(ReceiptRow).decode


class InferenceRecords:
    """`path` is the database file; with None nothing is stored. Used from one event loop."""

    def __init__(
        self, path: Path | None, max_records: int = 100_000, max_receipts: int = 100_000
    ) -> None:
        self._path, self._max_records, self._max_receipts = path, max_records, max_receipts
        self._rates: dict[str, Rate] = {}
        # rows since the last hand-over: waking the thread for each would take longer than the rest
        self._gathered: list[Row] = []
        # lists of rows, queries, and None for the end
        self._items: queue.SimpleQueue[list[Row] | Work | None] = queue.SimpleQueue()
        # rows handed over, counted by the loop; and of these the ones that the thread is done with
        self._num_handed = self._num_done = 0
        self._journal: ReceiptJournal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # the last write failed, and that was logged
        self._is_failing = False
        # for metrics, since start
        self.dropped = 0
        # receipts of servers that were killed
        self.recovered = 0
        self.verdicts = {"good": 0, "bad": 0}
        # called when a caller has judged an answer
        self.on_verdict: Callable[[VerdictEffect, bool], None] = _ignored

    async def start(self) -> None:
        if self._path is None:
            return
        self._loop = asyncio.get_running_loop()
        try:
            store = await asyncio.to_thread(self._open, self._path)
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
            self._hand_over()
            self._items.put(None)
            await asyncio.to_thread(thread.join)
            if self._journal is not None and not self._is_failing:
                self._journal.close()

    def _open(self, path: Path) -> RecordStore:
        store = RecordStore(path, self._max_records, self._max_receipts)
        if self._max_receipts:
            folder = path.parent / "receipts"
            try:
                self._journal = ReceiptJournal(folder)
                rows = [_decode_row(data) for data in left_behind(folder)]
                store.add_left_behind(rows)
                self.recovered = len(rows)
            except (OSError, msgspec.MsgspecError) as error:
                log("receipts_unreadable", level="warning", error=error)
        return store

    def rate(self, digest: str) -> Rate:
        """Answers of an adapter: (how many were valid, how many were validated)."""
        return self._rates.get(digest, (0, 0))

    def log(self, record: InferenceRecord) -> None:
        """Add a row. Never waits; a later query sees the row."""
        if self._thread is not None:
            self._add(record)

    def _add(self, row: Row) -> bool:
        """Whether there was a place for it."""
        if self._num_handed - self._num_done + len(self._gathered) >= MAX_WAITING:
            self.dropped += 1
            return False
        if not self._gathered and self._loop is not None:
            self._loop.call_later(GATHER_S, self._hand_over)
        self._gathered.append(row)
        return True

    def _hand_over(self) -> None:
        rows, self._gathered = self._gathered, []
        if rows:
            self._num_handed += len(rows)
            self._items.put(rows)

    def keep_receipt(self, row: ReceiptRow, is_open: bool) -> None:
        """Add or replace a receipt. If `is_open`, it is kept from now on even if the server is
        killed."""
        if self._thread is None or not self._max_receipts:
            return
        if self._add(row) and is_open and self._journal is not None:
            self._note(self._journal, row)

    def keep_context(self, digest: str, context: bytes) -> None:
        """Keep the settings that decisions with this digest were made with."""

        def keep(store: RecordStore) -> None:
            try:
                store.keep_context(digest, context)
            except CoterieError as error:
                self._failing(reason=error.message)

        if self._thread is not None and self._max_receipts:
            self._items.put(keep)

    def _note(self, journal: ReceiptJournal, row: ReceiptRow) -> None:
        try:
            journal.append(_encode_row(row))
            remove = journal.replaced()
        except OSError as error:
            # the disk is full: requests are served, as with rows that cannot be written
            self._failing(error=error)
            return
        if remove is not None:
            # the thread comes to it behind the rows that the file holds
            self._hand_over()
            self._items.put(lambda _: remove())

    async def receipt(self, receipt_id: str, tenant: str | None) -> bytes:
        """A receipt as JSON; of any tenant if `tenant` is None. Raises NotFound."""
        found = await self._ask(lambda store: store.receipt(receipt_id, tenant))
        if found is None:
            raise NotFound(f"no receipt `{receipt_id}` of yours is kept here", param="receipt_id")
        return found

    async def recent_receipts(self, limit: int, tenant: str | None) -> list[bytes]:
        """The newest receipts of ended requests as JSON, oldest first; none if they cannot be
        read."""
        if self._thread is None:
            return []
        return await self._ask(lambda store: store.recent_receipts(limit, tenant))

    async def receipts(self, query: ReceiptQuery) -> ReceiptPage:
        return await self._ask(lambda store: store.receipts_page(query))

    async def query(self, query: RecordQuery) -> RecordPage:
        return await self._ask(lambda store: store.query(query))

    async def feedback(self, job_id: str, tenant: str, good: bool, comment: str = "") -> None:
        """Store a caller's verdict on its own job, once. Raises NotFound or Conflict."""
        changed, effect = await self._ask(
            lambda store: _judged(store, job_id, tenant, good, comment)
        )
        self._rates.update(changed)
        self.verdicts["good" if good else "bad"] += 1
        self.on_verdict(effect, good)

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

        self._hand_over()
        self._items.put(work)
        try:
            return await asyncio.wrap_future(answer)
        except WeightsError as error:
            log("records_failed", level="warning", reason=error.message)
            raise Unavailable(
                "the log of inferences cannot be used now; see the server's log",
                retry_after_s=RETRY_S,
            ) from error

    def _run(self, store: RecordStore) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, list):
                self._write(store, item)
            else:
                item(store)
        store.close()

    def _write(self, store: RecordStore, rows: list[Row]) -> None:
        records = [row for row in rows if isinstance(row, InferenceRecord)]
        receipts = [row for row in rows if isinstance(row, ReceiptRow)]
        try:
            changed = store.rates(store.add(records, receipts))
        except Unavailable as error:
            # another process has locked it: write these rows with the next ones
            self._failing(reason=error.message)
            self._items.put(rows)
            return
        except CoterieError as error:
            self._lost(len(rows), reason=error.message)
            return
        except Exception as error:
            # the thread must go on after any error: queries wait for its answers
            self._lost(len(rows), error=error)
            return
        self._num_done += len(rows)
        self._is_failing = False
        loop = self._loop
        if changed and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._rates.update, changed)

    def _lost(self, count: int, **why: Any) -> None:
        self._num_done += count
        self.dropped += count
        self._failing(**why)

    def _failing(self, **why: Any) -> None:
        """Log the failure once, not for every row."""
        if not self._is_failing:
            self._is_failing = True
            log("records_unwritable", level="warning", **why)


def _judged(
    store: RecordStore, job_id: str, tenant: str, good: bool, comment: str
) -> tuple[dict[str, Rate], VerdictEffect]:
    effect = store.judge(job_id, tenant, good, comment)
    return store.rates(effect.digests), effect


def _ignored(effect: VerdictEffect, good: bool) -> None:
    """Without an ensemble nobody has to know."""
