"""Responses on disk: one SQLite file in WAL mode, one thread that reads and writes it.

A row holds the input of its own request and the answer; the conversation before it is found by
following `previous`. Rows are kept for a while after their last use, and up to a total size: above
it the oldest rows of the tenant with the most bytes go first, so that a busy tenant takes no other
tenant's place. One that has not ended goes last.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coterie.core.errors import CoterieError, RequestTooLarge, Unavailable
from coterie.core.settings import ResponseSettings
from coterie.obs.log import log
from coterie.packages.sqlite import connect, database_errors, transaction

T = TypeVar("T")
RETRY_S = 5.0
# responses of one conversation
MAX_CHAIN = 1000
# rows written before the bounds are applied again; also when that many bytes were written
TRIM_ROWS, TRIM_BYTES = 64, 16_000_000
# rows that are removed at once: a write lock is not held for long
REMOVED_AT_ONCE = 256
# how often the ends of open responses are written: less than the shortest time a job is kept
SWEEP_S = 30.0
SETTLED_AT_ONCE = 100
Settle = Callable[[str, str], Coroutine[Any, Any, None]]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    previous TEXT,
    used_at REAL NOT NULL,
    bytes INTEGER NOT NULL,
    items BLOB NOT NULL,
    response BLOB NOT NULL,
    request BLOB
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (tenant, used_at, bytes);
CREATE INDEX IF NOT EXISTS open_responses ON responses (number, id, tenant)
    WHERE request IS NOT NULL;
CREATE TABLE IF NOT EXISTS response_items (
    id TEXT NOT NULL,
    response INTEGER NOT NULL REFERENCES responses (number) ON DELETE CASCADE,
    PRIMARY KEY (id, response)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_response ON response_items (response);
"""
_COLUMNS = "id, tenant, previous, items, response, request"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One row. `items` and `response` are JSON: the input items of its own request, and the answer.
    `request` is the body of a response that has not ended."""

    id: str
    tenant: str
    previous: str | None
    items: bytes
    response: bytes
    request: bytes | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.items) + len(self.response) + len(self.request or b"")


class OpenResponse(NamedTuple):
    number: int
    id: str
    tenant: str


class ResponseTable:
    """For one thread."""

    def __init__(self, path: Path, settings: ResponseSettings) -> None:
        self._path, self._settings = path, settings
        # it holds prompts and answers
        self._db = connect(path)
        # the bounds are applied at the first write
        self._rows_since = TRIM_ROWS
        self._bytes_since = 0
        with database_errors(path):
            self._db.execute("PRAGMA foreign_keys = ON")
            # removed texts must not stay in free pages
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def add(self, row: StoredResponse, item_ids: Sequence[str], now: float) -> None:
        with database_errors(self._path), transaction(self._db) as db:
            cursor = db.execute(
                "INSERT INTO responses (id, tenant, previous, used_at, bytes, items, response, "
                "request) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.id, row.tenant, row.previous, now, row.num_bytes, row.items, row.response,
                    row.request,
                ),
            )  # fmt: skip
            self._index(db, int(cursor.lastrowid or 0), item_ids)
        self._trim_sometimes(row.num_bytes, now)

    def finish(self, row: StoredResponse, item_ids: Sequence[str], now: float) -> bool:
        """Write the end of an open response. False if it was written before, or is gone."""
        with database_errors(self._path), transaction(self._db) as db:
            found = db.execute(
                "UPDATE responses SET response = ?, request = NULL, bytes = ?, used_at = ? "
                "WHERE id = ? AND tenant = ? AND request IS NOT NULL RETURNING number",
                (row.response, row.num_bytes, now, row.id, row.tenant),
            ).fetchone()
            if found is not None:
                self._index(db, found[0], item_ids)
        self._trim_sometimes(row.num_bytes, now)
        return found is not None

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        with database_errors(self._path):
            row = self._db.execute(
                f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND tenant = ?",
                (response_id, tenant),
            ).fetchone()
        return None if row is None else StoredResponse(*row)

    def chain(
        self, response_id: str, tenant: str, max_bytes: int, now: float
    ) -> list[StoredResponse] | None:
        """The conversation that ends with this response, oldest first; None if a part of it is
        gone. All of it counts as used now. Stops when it is longer than `MAX_CHAIN` or larger than
        `max_bytes`: the caller refuses that."""
        rows: list[StoredResponse] = []
        total = 0
        following: str | None = response_id
        while following is not None and len(rows) <= MAX_CHAIN and total <= max_bytes:
            row = self.find(following, tenant)
            if row is None:
                return None
            rows.append(row)
            total += row.num_bytes
            following = row.previous
        with database_errors(self._path), transaction(self._db) as db:
            marks = [(now, row.id, tenant) for row in rows]
            db.executemany("UPDATE responses SET used_at = ? WHERE id = ? AND tenant = ?", marks)
        rows.reverse()
        return rows

    def open(self, after: int, limit: int) -> list[OpenResponse]:
        """Responses whose end is not written, oldest first."""
        with database_errors(self._path):
            rows = self._db.execute(
                "SELECT number, id, tenant FROM responses "
                "WHERE request IS NOT NULL AND number > ? ORDER BY number LIMIT ?",
                (after, limit),
            ).fetchall()
        return [OpenResponse(*row) for row in rows]

    def answers_with(self, item_ids: Sequence[str], tenant: str, max_bytes: int) -> list[bytes]:
        """The answers that have these items, each once; for an item that several have, the newest.
        Stops when they are larger than `max_bytes`: the caller refuses that."""
        numbers: dict[int, None] = {}
        answers: list[bytes] = []
        total = 0
        with database_errors(self._path):
            for item_id in dict.fromkeys(item_ids):
                found = self._db.execute(
                    "SELECT number FROM response_items JOIN responses "
                    "ON number = response_items.response WHERE response_items.id = ? "
                    "AND tenant = ? ORDER BY number DESC LIMIT 1",
                    (item_id, tenant),
                ).fetchone()
                if found is not None:
                    numbers[found[0]] = None
            for number in numbers:
                ask = "SELECT response FROM responses WHERE number = ?"
                answers.append(self._db.execute(ask, (number,)).fetchone()[0])
                total += len(answers[-1])
                if total > max_bytes:
                    break
        return answers

    def remove(self, response_id: str, tenant: str) -> bool:
        with database_errors(self._path):
            cursor = self._db.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant)
            )
        return cursor.rowcount == 1

    def size(self) -> tuple[int, int]:
        """Number of rows, and their bytes."""
        ask = "SELECT count(*), coalesce(sum(bytes), 0) FROM responses"
        rows, num_bytes = self._db.execute(ask).fetchone()
        return rows, num_bytes

    def trim(self, now: float) -> int:
        """Apply both bounds. Returns the number of removed rows."""
        self._rows_since = self._bytes_since = 0
        removed = 0
        with database_errors(self._path):
            while count := self._db.execute(
                "DELETE FROM responses WHERE number IN "
                "(SELECT number FROM responses WHERE used_at < ? LIMIT ?)",
                (now - self._settings.keep_s, REMOVED_AT_ONCE),
            ).rowcount:
                removed += count
            while (excess := self.size()[1] - self._settings.max_bytes) > 0:
                removed += self._remove_oldest(excess)
        return removed

    def _remove_oldest(self, excess: int) -> int:
        """Remove the oldest rows of the tenant with the most bytes, until `excess` bytes are gone
        or it has no more than the next tenant."""
        largest = self._db.execute(
            "SELECT tenant, sum(bytes) AS total FROM responses GROUP BY tenant "
            "ORDER BY total DESC LIMIT 2"
        ).fetchall()
        tenant, own = largest[0]
        other = largest[1][1] if len(largest) > 1 else 0
        goal = min(excess, max(own - other, 1))
        numbers, gone = list[tuple[int]](), 0
        for number, size in self._oldest(tenant):
            if gone >= goal:
                break
            numbers.append((number,))
            gone += size
        with transaction(self._db) as db:
            db.executemany("DELETE FROM responses WHERE number = ?", numbers)
        return len(numbers)

    def _oldest(self, tenant: str) -> list[tuple[int, int]]:
        """Numbers and sizes of rows that may go; open ones only if there are no others."""
        ask = "SELECT number, bytes FROM responses WHERE tenant = ?{} ORDER BY used_at, number "
        ended = " AND number NOT IN (SELECT number FROM responses WHERE request IS NOT NULL)"
        for condition in (ended, ""):
            found = self._db.execute(
                ask.format(condition) + "LIMIT ?", (tenant, REMOVED_AT_ONCE)
            ).fetchall()
            if found:
                break
        return found

    def _index(self, db: sqlite3.Connection, number: int, item_ids: Sequence[str]) -> None:
        db.executemany(
            "INSERT OR IGNORE INTO response_items (id, response) VALUES (?, ?)",
            [(item_id, number) for item_id in item_ids],
        )

    def _trim_sometimes(self, num_bytes: int, now: float) -> None:
        self._rows_since += 1
        self._bytes_since += num_bytes
        limit = min(TRIM_BYTES, self._settings.max_bytes // 8)
        if self._rows_since >= TRIM_ROWS or self._bytes_since > limit:
            self.trim(now)


class ResponseStore:
    """The table for the event loop. With `path` None or `max_bytes` 0 nothing is kept. Without the
    file a server still answers; only what needs a kept response is refused."""

    def __init__(self, path: Path | None, settings: ResponseSettings) -> None:
        self._path, self._settings = path, settings
        self._thread = ThreadPoolExecutor(1, "responses")
        self._table: ResponseTable | None = None
        self._settle: Settle | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._closed = False
        # responses that could not be kept since start, for metrics
        self.dropped = 0

    @property
    def keeps(self) -> bool:
        """Whether the settings allow to keep responses."""
        return self._path is not None and self._settings.max_bytes > 0

    def connect(self, settle: Settle) -> None:
        """`settle` is called now and then with the id and tenant of every open response."""
        self._settle = settle

    async def start(self) -> None:
        if not self.keeps:
            return
        try:
            await self._ask(lambda table: table.trim(time.time()))
        except CoterieError as error:
            log("responses_unreadable", level="warning", reason=error.message)
        self._sweeping = asyncio.create_task(self._sweeps())

    async def _sweeps(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except CoterieError as error:
                log("responses_not_swept", level="warning", reason=error.message)

    async def sweep(self) -> None:
        """Let the ends of open responses be written, and apply the bounds."""
        last = 0
        while self._settle is not None:
            found = await self._ask(partial(ResponseTable.open, after=last, limit=SETTLED_AT_ONCE))
            for one in found:
                await self._settle(one.id, one.tenant)
            if len(found) < SETTLED_AT_ONCE:
                break
            last = found[-1].number
        await self._ask(lambda table: table.trim(time.time()))

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        self._closed = True
        table, self._table = self._table, None
        if table is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, table.close)
        self._thread.shutdown(wait=False)

    async def keep(self, row: StoredResponse, item_ids: Sequence[str] = ()) -> bool:
        """When this returns True, the response is on disk. False if it could not be written: that
        is logged and counted, because the answer itself is good."""
        if row.num_bytes > self._settings.max_bytes:
            self.dropped += 1
            return False
        try:
            await self._ask(lambda table: table.add(row, item_ids, time.time()))
        except CoterieError as error:
            self.dropped += 1
            log("response_not_kept", level="warning", request_id=row.id, reason=error.message)
            return False
        return True

    async def add(self, row: StoredResponse) -> None:
        """The same, but raises: for a response that has not been answered yet."""
        if row.num_bytes > self._settings.max_bytes:
            raise RequestTooLarge("the response is larger than all that this server may keep")
        await self._ask(lambda table: table.add(row, (), time.time()))

    async def finish(self, row: StoredResponse, item_ids: Sequence[str]) -> bool:
        return await self._ask(lambda table: table.finish(row, item_ids, time.time()))

    async def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        return await self._ask(lambda table: table.find(response_id, tenant))

    async def chain(
        self, response_id: str, tenant: str, max_bytes: int
    ) -> list[StoredResponse] | None:
        return await self._ask(
            lambda table: table.chain(response_id, tenant, max_bytes, time.time())
        )

    async def answers_with(
        self, item_ids: Sequence[str], tenant: str, max_bytes: int
    ) -> list[bytes]:
        return await self._ask(lambda table: table.answers_with(item_ids, tenant, max_bytes))

    async def remove(self, response_id: str, tenant: str) -> bool:
        return await self._ask(lambda table: table.remove(response_id, tenant))

    async def _ask(self, question: Callable[[ResponseTable], T]) -> T:
        path = self._path
        if self._closed or path is None or not self.keeps:
            raise Unavailable("responses are not kept by this server")

        def work() -> T:
            if self._table is None:
                self._table = ResponseTable(path, self._settings)
            return question(self._table)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except CoterieError as error:
            log("responses_failed", level="error", reason=error.message)
            raise Unavailable(
                "kept responses cannot be used now; the server's log has the reason",
                retry_after_s=RETRY_S,
            ) from error
