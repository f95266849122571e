"""Batches and the list of files on disk: one SQLite file, one thread that reads and writes it.

When a call returns, its change is on disk. A problem with the file raises `Unavailable`: without it
a server still serves everything except batches and files.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from coterie.core.errors import CoterieError, Unavailable, WeightsError
from coterie.obs.log import log
from coterie.packages.sqlite import connect, database_errors
from coterie.service.batches import batch_tables, file_table
from coterie.service.batches.batch_tables import BatchTables
from coterie.service.batches.file_table import FileTable
from coterie.service.jobs.store import JobOwner

T = TypeVar("T")
RETRY_S = 5.0
FORMAT = 1


class BatchDatabase:
    """The open file. For one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # it holds custom ids and answers
        self._sql = connect(path)
        try:
            with database_errors(path):
                # a commit returns when its bytes are on disk
                self._sql.execute("PRAGMA synchronous = FULL")
                # removed answers must not stay in free pages
                self._sql.execute("PRAGMA secure_delete = ON")
                if self._sql.execute("PRAGMA user_version").fetchone()[0] > FORMAT:
                    raise Unavailable(f"{path} was made by a newer Coterie; update this one")
                self._sql.executescript(batch_tables.SCHEMA + file_table.SCHEMA)
                self._add_column("batches", "input_bytes INTEGER NOT NULL DEFAULT 0")
                self._sql.execute(f"PRAGMA user_version = {FORMAT}")
            self.owner = JobOwner(path.with_suffix(".owners"))
        except BaseException:
            self._sql.close()
            raise
        self.batches, self.files = BatchTables(self._sql), FileTable(self._sql)
        self.owner.clean()

    def _add_column(self, table: str, column: str) -> None:
        """To a file of an earlier release."""
        known = [row[1] for row in self._sql.execute(f"PRAGMA table_info({table})")]
        if column.split()[0] not in known:
            self._sql.execute(f"ALTER TABLE {table} ADD COLUMN {column}")

    def adopt(self) -> int:
        """Take over the open batches of servers that have ended."""
        taken = 0
        for other in self.batches.owners():
            if other != self.owner.name:
                with self.owner.gone(other) as is_gone:
                    taken += self.batches.adopt(other, self.owner.name) if is_gone else 0
        return taken

    def close(self) -> None:
        try:
            self.batches.release(self.owner.name)
        finally:
            self._sql.close()
            self.owner.close()


class BatchStore:
    """The database for the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "batches")
        self._database: BatchDatabase | None = None
        self._last_error: str | None = None
        self._closed = False

    async def ask(self, question: Callable[[BatchDatabase], T]) -> T:
        """Run `question` on the thread. The file is opened by the first call that can."""

        def work() -> T:
            if self._database is None:
                self._database = BatchDatabase(self._path)
            with database_errors(self._path):
                return question(self._database)

        if self._closed:
            raise Unavailable("the server is shutting down")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (WeightsError, Unavailable, OSError, sqlite3.Error) as error:
            raise self._typed_error(error) from error

    async def close(self) -> None:
        """Release the open batches for the next server. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        database, self._database = self._database, None
        if database is not None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._thread, database.close)
            except (sqlite3.Error, OSError) as error:
                log("batches_not_released", level="warning", reason=str(error))
        self._thread.shutdown(wait=False)

    def _typed_error(self, error: Exception) -> CoterieError:
        reason = str(error)
        if reason != self._last_error:
            self._last_error = reason
            log("batches_failed", level="error", reason=reason)
        return Unavailable(
            "batches and files cannot be used now; the server's log has the reason",
            retry_after_s=RETRY_S,
        )
