"""Jobs on disk: one SQLite file in WAL mode, one thread that reads and writes it.

A change has reached the disk when its call returns. What is wrong with the file is told as a typed
error, and logged once: a server without it still answers everything but jobs.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from coterie.core.errors import CoterieError, InvalidRequest, Unavailable
from coterie.core.job import Job, JobPage, JobQuery
from coterie.obs.trace import log
from coterie.service.jobs.tables import (
    AbandonedJob,
    JobEnd,
    JobTables,
    NewJob,
    StoredRequest,
    WaitingJob,
)
from coterie.weights.lock import try_lock

T = TypeVar("T")
# how long another process may hold the file
BUSY_S = 10.0
RETRY_S = 5.0
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_OPENING = (
    "PRAGMA journal_mode = WAL",
    # a commit returns when its bytes are on the disk
    "PRAGMA synchronous = FULL",
    "PRAGMA journal_size_limit = 67108864",
    # prompts that were removed do not stay in free pages
    "PRAGMA secure_delete = ON",
)


class JobStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._sql: sqlite3.Connection | None = None
        self._tables: JobTables | None = None
        self._owner: JobOwner | None = None
        self._said: str | None = None
        self._closed = False

    async def open(self) -> None:
        """A second call does nothing, unless the first one failed."""
        if self._owner is None:
            await self._call(self._open)

    async def close(self) -> None:
        """Open jobs are left to the next server. A second call does nothing."""
        try:
            if self._owner is not None:
                await self._call(self._close)
        finally:
            self._closed = True
            self._thread.shutdown(wait=False)

    async def add(self, entry: NewJob) -> WaitingJob:
        """Accepts a job: when this returns it will be run, whatever happens to this process."""
        return await self._ask(lambda tables, owner: tables.add(entry, owner))

    async def find(self, job_id: str, tenant: str) -> Job | None:
        return await self._ask(lambda tables, _: tables.find(job_id, tenant))

    async def request(self, job_id: str) -> StoredRequest | None:
        return await self._ask(lambda tables, owner: tables.request(job_id, owner))

    async def begin(self, job_id: str, at: float, plan: bytes) -> bool:
        """False when the job is no longer ours to run: cancelled, or ended."""
        return await self._ask(lambda tables, owner: tables.begin(job_id, owner, at, plan))

    async def requeue(self, job_id: str) -> bool:
        return await self._ask(lambda tables, owner: tables.requeue(job_id, owner))

    async def end(self, job_id: str, ending: JobEnd) -> bool:
        """False when it had ended before."""
        return await self._ask(lambda tables, owner: tables.end(job_id, owner, ending))

    async def cancel(self, job_id: str, tenant: str, at: float, text: str | None) -> bool:
        return await self._ask(lambda tables, _: tables.cancel(job_id, tenant, at, text))

    async def remove(self, job_id: str, tenant: str) -> bool:
        return await self._ask(lambda tables, _: tables.remove(job_id, tenant))

    async def open_ids(self) -> set[str]:
        return await self._ask(lambda tables, owner: tables.open_ids(owner))

    async def expire(self, before: float, max_ended: int, max_bytes: int) -> int:
        return await self._ask(lambda tables, _: tables.expire(before, max_ended, max_bytes))

    async def page(self, query: JobQuery) -> JobPage:
        before = _cursor(query.after)
        jobs = await self._ask(lambda tables, _: tables.page(query, before))
        more, jobs = len(jobs) > query.limit, jobs[: query.limit]
        last = f"{jobs[-1].submitted_at!r}_{jobs[-1].id}" if more else None
        return JobPage(tuple(jobs), last)

    async def abandoned_jobs(self) -> Sequence[AbandonedJob]:
        """Open jobs of servers that are gone, which they never cease to be."""
        return await self._call(self._orphans)

    async def adopt(self, abandoned_jobs: Sequence[AbandonedJob]) -> Sequence[WaitingJob]:
        """These become ours, but for those that another server was quicker with."""

        def work(tables: JobTables, owner: str) -> list[WaitingJob]:
            taken = (tables.adopt(orphan.id, orphan.owner, owner) for orphan in abandoned_jobs)
            return [waiting for waiting in taken if waiting is not None]

        return await self._ask(work)

    def _orphans(self) -> list[AbandonedJob]:
        tables, owner = self._opened()
        found: list[AbandonedJob] = []
        for other in tables.owners():
            if other != owner.name:
                with owner.gone(other) as is_gone:
                    found += tables.abandoned_jobs(other) if is_gone else ()
        return found

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # it holds prompts: nobody else's to read
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        # each statement commits by itself
        sql = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            for pragma in _OPENING:
                sql.execute(pragma).fetchall()
            tables = JobTables(sql)
            if not tables.prepare():
                self._said = f"{self._path} was made by a newer Coterie; update this one"
                raise Unavailable(self._said)
            owner = JobOwner(self._path.with_suffix(".owners"))
        except BaseException:
            sql.close()
            raise
        self._sql, self._tables, self._owner = sql, tables, owner
        owner.clean()

    def _close(self) -> None:
        sql, tables, owner = self._sql, self._tables, self._owner
        self._sql = self._tables = self._owner = None
        try:
            if tables is not None and owner is not None:
                tables.release(owner.name)
        finally:
            if sql is not None:
                sql.close()
            if owner is not None:
                owner.close()

    def _opened(self) -> tuple[JobTables, JobOwner]:
        if self._tables is None or self._owner is None:
            reason = self._said or "the server has not started, or is shutting down"
            raise Unavailable(f"jobs cannot be kept now: {reason}", retry_after_s=RETRY_S)
        return self._tables, self._owner

    async def _ask(self, question: Callable[[JobTables, str], T]) -> T:
        def work() -> T:
            tables, owner = self._opened()
            return question(tables, owner.name)

        return await self._call(work)

    async def _call(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise Unavailable("the server is shutting down")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise self._told(error) from error

    def _told(self, error: sqlite3.Error | OSError) -> CoterieError:
        damaged = getattr(error, "sqlite_errorname", "").startswith(_DAMAGED)
        what = f"{self._path}: {error}"
        if damaged:
            what += (
                "; stop the servers of this home, move the file away (it holds the jobs) and start"
            )
        if what != self._said:
            self._said = what
            log("jobs_unreadable" if damaged else "jobs_failed", level="error", reason=what)
        message = "the job database is damaged" if damaged else "the job database cannot be used"
        return Unavailable(
            f"{message}; the server's log has the reason",
            retry_after_s=None if damaged else RETRY_S,
        )


def _cursor(after: str | None) -> tuple[float, str] | None:
    if after is None:
        return None
    at, _, job_id = after.partition("_")
    try:
        return float(at), job_id
    except ValueError:
        raise InvalidRequest("after: send a page's `next` as it came", param="after") from None


class JobOwner:
    """This server's name among those that share a home."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.name = uuid.uuid4().hex
        self._handle = self._take()

    def _take(self) -> int:
        path = self._path(self.name)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # somebody who cleans up may have removed the file before it was locked
            if try_lock(handle) and _is_same(handle, path):
                return handle
            os.close(handle)

    def close(self) -> None:
        self._path(self.name).unlink(missing_ok=True)
        os.close(self._handle)

    @contextmanager
    def gone(self, other: str) -> Iterator[bool]:
        """Whether `other` has ended. If so, nobody else is told the same inside the `with`."""
        path = self._path(other)
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            yield other != self.name
            return
        try:
            if not try_lock(handle):
                yield False
                return
            yield True
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)

    def clean(self) -> None:
        """Removes the files of servers that were killed."""
        for path in self._folder.glob("*.lock"):
            if not path.is_file():
                # somebody else's
                continue
            with self.gone(path.stem):
                continue

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.lock"


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
