"""Jobs on disk: one SQLite file in WAL mode, one thread that reads and writes it.

When a call returns, its change is on disk. A problem with the file raises a typed error and is
logged once: without the file a server still serves everything except jobs.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coterie.core.errors import CoterieError, InvalidRequest, Unavailable
from coterie.core.job import CANCELLED, PROCESSING, QUEUED, Job, JobError, JobPage, JobQuery
from coterie.core.private_files import private_folder
from coterie.obs.log import log
from coterie.service.jobs.codec import decode_result
from coterie.weights.files import try_lock

T = TypeVar("T")
# how long to wait while another process has locked the file
BUSY_S = 10.0
RETRY_S = 5.0
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_OPENING = (
    "PRAGMA journal_mode = WAL",
    # a commit returns when its bytes are on disk
    "PRAGMA synchronous = FULL",
    "PRAGMA journal_size_limit = 67108864",
    # removed prompts must not stay in free pages
    "PRAGMA secure_delete = ON",
)


class JobStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._sql: sqlite3.Connection | None = None
        self._tables: JobTables | None = None
        self._owner: JobOwner | None = None
        self._last_error: str | None = None
        self._closed = False

    async def open(self) -> None:
        """Open the file. A second call does nothing, unless the first one failed."""
        if self._owner is None:
            await self._call(self._open)

    async def close(self) -> None:
        """Release the open jobs for the next server. A second call does nothing."""
        try:
            if self._owner is not None:
                await self._call(self._close)
        finally:
            self._closed = True
            self._thread.shutdown(wait=False)

    async def add(self, entry: NewJob) -> WaitingJob:
        """Accept a job. When this returns, the job will run, even if this process dies."""
        return await self._ask(lambda tables, owner: tables.add(entry, owner))

    async def find(self, job_id: str, tenant: str) -> Job | None:
        return await self._ask(lambda tables, _: tables.find(job_id, tenant))

    async def request(self, job_id: str) -> StoredRequest | None:
        return await self._ask(lambda tables, owner: tables.request(job_id, owner))

    async def begin(self, job_id: str, at: float, plan: bytes) -> bool:
        """False if this server must not run the job any more: it was cancelled or has ended."""
        return await self._ask(lambda tables, owner: tables.begin(job_id, owner, at, plan))

    async def requeue(self, job_id: str) -> bool:
        return await self._ask(lambda tables, owner: tables.requeue(job_id, owner))

    async def end(self, job_id: str, ending: JobEnd) -> bool:
        """False if the job had already ended."""
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

    async def newest(self, limit: int, tenant: str | None) -> list[Job]:
        """Without texts and results; of every tenant if `tenant` is None."""
        return await self._ask(lambda tables, _: tables.newest(limit, tenant))

    async def abandoned_jobs(self) -> Sequence[AbandonedJob]:
        """Open jobs of servers that have ended. An ended server never comes back under its name."""
        return await self._call(self._abandoned_jobs)

    async def adopt(self, abandoned_jobs: Sequence[AbandonedJob]) -> Sequence[WaitingJob]:
        """Take over these jobs, except those that another server took first."""

        def work(tables: JobTables, owner: str) -> list[WaitingJob]:
            taken = (tables.adopt(job.id, job.owner, owner) for job in abandoned_jobs)
            return [waiting for waiting in taken if waiting is not None]

        return await self._ask(work)

    def _abandoned_jobs(self) -> list[AbandonedJob]:
        tables, owner = self._opened()
        abandoned: list[AbandonedJob] = []
        for other in tables.owners():
            if other != owner.name:
                with owner.gone(other) as is_gone:
                    abandoned += tables.abandoned_jobs(other) if is_gone else ()
        return abandoned

    def _open(self) -> None:
        private_folder(self._path.parent)
        # the file holds prompts: only this user may read it
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        # with isolation_level None each statement commits by itself
        sql = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            for pragma in _OPENING:
                sql.execute(pragma).fetchall()
            tables = JobTables(sql)
            if not tables.prepare():
                self._last_error = f"{self._path} was made by a newer Coterie; update this one"
                raise Unavailable(self._last_error)
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
            reason = self._last_error or "the server has not started, or is shutting down"
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
            raise self._typed_error(error) from error

    def _typed_error(self, error: sqlite3.Error | OSError) -> CoterieError:
        damaged = getattr(error, "sqlite_errorname", "").startswith(_DAMAGED)
        reason = f"{self._path}: {error}"
        if damaged:
            reason += (
                "; stop the servers of this home, move the file away (it holds the jobs) and start"
            )
        if reason != self._last_error:
            self._last_error = reason
            log("jobs_unreadable" if damaged else "jobs_failed", level="error", reason=reason)
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
    """The name of this server among the servers that share a home folder. A locked file shows that
    the server is alive."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        private_folder(folder)
        self.name = uuid.uuid4().hex
        self._handle = self._take()

    def _take(self) -> int:
        path = self._path(self.name)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # another server may have removed the file before it was locked
            if try_lock(handle) and _is_same(handle, path):
                return handle
            os.close(handle)

    def close(self) -> None:
        self._path(self.name).unlink(missing_ok=True)
        os.close(self._handle)

    @contextmanager
    def gone(self, other: str) -> Iterator[bool]:
        """Whether `other` has ended. If so, no other server gets True inside the `with` block."""
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
        """Remove the lock files of servers that were killed."""
        for path in self._folder.glob("*.lock"):
            if not path.is_file():
                # not a lock file of a server
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


SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
  user_id TEXT NOT NULL, model TEXT NOT NULL, priority INTEGER NOT NULL, status TEXT NOT NULL,
  owner TEXT NOT NULL, crashes INTEGER NOT NULL DEFAULT 0, submitted_at REAL NOT NULL,
  started_at REAL, finished_at REAL, bytes INTEGER NOT NULL, error BLOB, text TEXT, result BLOB,
  plan BLOB, request BLOB);
CREATE INDEX IF NOT EXISTS jobs_listed ON jobs (tenant, submitted_at, id);
CREATE INDEX IF NOT EXISTS jobs_owned ON jobs (owner, status) WHERE finished_at IS NULL;
CREATE INDEX IF NOT EXISTS jobs_ended ON jobs (finished_at, bytes) WHERE finished_at IS NOT NULL;
"""
FORMAT = 1
# owner of a released job: the next server that looks takes it
NOBODY = ""
_JOB = (
    "id, status, tenant, user_id, submitted_at, started_at, finished_at, coalesce(text, ''), "
    "result, error"
)
_OPEN = "finished_at IS NULL"
_error_decoder = msgspec.json.Decoder(JobError)
_error_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class NewJob:
    """One row, as it is stored when the job is accepted."""

    id: str
    tenant: str
    user_id: str
    model: str
    priority: int
    submitted_at: float
    request: bytes


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The request of a job, and its plan if it has started before."""

    request: bytes
    plan: bytes | None
    submitted_at: float


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """One entry of the queue. `crashes` counts servers that died while this job ran in them."""

    id: str
    seq: int
    priority: int
    crashes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AbandonedJob:
    """An open job whose server has ended."""

    id: str
    owner: str
    model: str
    submitted_at: float


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What is written when a job ends."""

    status: str
    at: float
    text: str | None = None
    result: bytes | None = None
    error: JobError | None = None


class JobTables:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection

    def prepare(self) -> bool:
        """Make the table if it is missing. False if a newer Coterie made it."""
        (version,) = self._sql.execute("PRAGMA user_version").fetchone()
        if version == 0:
            # a script commits by itself; running it twice does no harm
            self._sql.executescript(f"{SCHEMA} PRAGMA user_version = {FORMAT};")
        return bool(version <= FORMAT)

    def add(self, entry: NewJob, owner: str) -> WaitingJob:
        size = len(entry.request)
        cursor = self._sql.execute(
            "INSERT INTO jobs (id, tenant, user_id, model, priority, status, owner, submitted_at, "
            "bytes, request) VALUES (?,?,?,?,?,?,?,?,?,?)",
            (
                entry.id, entry.tenant, entry.user_id, entry.model, entry.priority, QUEUED, owner,
                entry.submitted_at, size, entry.request,
            ),
        )  # fmt: skip
        return WaitingJob(entry.id, int(cursor.lastrowid or 0), entry.priority, 0, size)

    def find(self, job_id: str, tenant: str) -> Job | None:
        query = f"SELECT {_JOB} FROM jobs WHERE id = ? AND tenant = ?"
        row = self._sql.execute(query, (job_id, tenant)).fetchone()
        return None if row is None else _job(row)

    def request(self, job_id: str, owner: str) -> StoredRequest | None:
        """The request of an open job of `owner`."""
        query = (
            f"SELECT request, plan, submitted_at FROM jobs WHERE id = ? AND owner = ? AND {_OPEN}"
        )
        row = self._sql.execute(query, (job_id, owner)).fetchone()
        return None if row is None else StoredRequest(*row)

    def begin(self, job_id: str, owner: str, at: float, plan: bytes) -> bool:
        """Mark the job as running. The plan of the first run stays: later runs repeat it."""
        return self._changed(
            f"UPDATE jobs SET status = '{PROCESSING}', started_at = ?, plan = coalesce(plan, ?) "
            f"WHERE id = ? AND owner = ? AND {_OPEN}",
            (at, plan, job_id, owner),
        )

    def requeue(self, job_id: str, owner: str) -> bool:
        return self._changed(
            f"UPDATE jobs SET status = '{QUEUED}', started_at = NULL "
            f"WHERE id = ? AND owner = ? AND {_OPEN}",
            (job_id, owner),
        )

    def end(self, job_id: str, owner: str, ending: JobEnd) -> bool:
        return self._end(f"id = ? AND owner = ? AND {_OPEN}", (job_id, owner), ending)

    def cancel(self, job_id: str, tenant: str, at: float, text: str | None) -> bool:
        ending = JobEnd(CANCELLED, at, text)
        return self._end(f"id = ? AND tenant = ? AND {_OPEN}", (job_id, tenant), ending)

    def remove(self, job_id: str, tenant: str) -> bool:
        query = "DELETE FROM jobs WHERE id = ? AND tenant = ? AND finished_at IS NOT NULL"
        return self._changed(query, (job_id, tenant))

    def release(self, owner: str) -> int:
        """Give up all open jobs of `owner`, which shuts down normally: this counts as no crash."""
        cursor = self._sql.execute(
            f"UPDATE jobs SET status = '{QUEUED}', started_at = NULL, owner = '{NOBODY}' "
            f"WHERE owner = ? AND {_OPEN}",
            (owner,),
        )
        return cursor.rowcount

    def owners(self) -> list[str]:
        return [
            row[0] for row in self._sql.execute(f"SELECT DISTINCT owner FROM jobs WHERE {_OPEN}")
        ]

    def abandoned_jobs(self, owner: str) -> list[AbandonedJob]:
        query = f"SELECT id, owner, model, submitted_at FROM jobs WHERE owner = ? AND {_OPEN}"
        return [AbandonedJob(*row) for row in self._sql.execute(query, (owner,))]

    def adopt(self, job_id: str, old: str, new: str) -> WaitingJob | None:
        """Take the job over from a server that has ended. If it was running, count a crash."""
        row = self._sql.execute(
            f"UPDATE jobs SET owner = ?, status = '{QUEUED}', started_at = NULL, "
            f"crashes = crashes + (status = '{PROCESSING}') "
            f"WHERE id = ? AND owner = ? AND {_OPEN} RETURNING id, seq, priority, crashes, bytes",
            (new, job_id, old),
        ).fetchone()
        return None if row is None else WaitingJob(*row)

    def open_ids(self, owner: str) -> set[str]:
        query = f"SELECT id FROM jobs WHERE owner = ? AND {_OPEN}"
        return {row[0] for row in self._sql.execute(query, (owner,))}

    def page(self, query: JobQuery, before: tuple[float, str] | None) -> list[Job]:
        """The rows of one page, and one more if there are more."""
        at, last = before or (None, None)
        rows = self._sql.execute(
            f"SELECT {_JOB} FROM jobs WHERE tenant = :tenant AND "
            "(:status IS NULL OR status = :status) AND (:user IS NULL OR user_id = :user) AND "
            "(:at IS NULL OR (submitted_at, id) < (:at, :last)) "
            "ORDER BY submitted_at DESC, id DESC LIMIT :limit",
            {
                "tenant": query.tenant,
                "status": query.status,
                "user": query.user_id,
                "at": at,
                "last": last,
                "limit": query.limit + 1,
            },
        )
        return [_job(row) for row in rows]

    def newest(self, limit: int, tenant: str | None) -> list[Job]:
        order = "ORDER BY seq DESC" if tenant is None else "ORDER BY submitted_at DESC"
        where = "" if tenant is None else "WHERE tenant = :tenant"
        rows = self._sql.execute(
            "SELECT id, status, tenant, user_id, submitted_at, started_at, finished_at "
            f"FROM jobs {where} {order} LIMIT :limit",
            {"tenant": tenant, "limit": limit},
        )
        return [Job(*row) for row in rows]

    def expire(self, before: float, max_ended: int, max_bytes: int) -> int:
        """Remove ended jobs that are too old, then the oldest ones above the other two limits."""
        cursor = self._sql.execute("DELETE FROM jobs WHERE finished_at < ?", (before,))
        removed = cursor.rowcount
        beyond = self._sql.execute(
            "SELECT finished_at FROM (SELECT finished_at, row_number() OVER newest AS place, "
            "sum(bytes) OVER newest AS total FROM jobs WHERE finished_at IS NOT NULL "
            "WINDOW newest AS (ORDER BY finished_at DESC ROWS UNBOUNDED PRECEDING)) "
            "WHERE place > ? OR total > ? ORDER BY finished_at DESC LIMIT 1",
            (max_ended, max_bytes),
        ).fetchone()
        if beyond is not None:
            cursor = self._sql.execute("DELETE FROM jobs WHERE finished_at <= ?", beyond)
            removed += cursor.rowcount
        return removed

    def _end(self, where: str, keys: Sequence[str], ending: JobEnd) -> bool:
        error = None if ending.error is None else _error_encoder.encode(ending.error)
        size = sum(len(part or "") for part in (ending.text, ending.result, error))
        return self._changed(
            "UPDATE jobs SET status = ?, finished_at = ?, text = ?, result = ?, error = ?, "
            f"bytes = ?, owner = '{NOBODY}', request = NULL, plan = NULL WHERE {where}",
            (ending.status, ending.at, ending.text, ending.result, error, size, *keys),
        )

    def _changed(self, query: str, values: Sequence[object]) -> bool:
        return self._sql.execute(query, values).rowcount == 1


def _job(row: Sequence[Any]) -> Job:
    *fields, text, result, error = row
    job = Job(*fields)
    try:
        if result is not None:
            decoded = decode_result(result)
            return replace(job, text=decoded.text, result=decoded)
        fault = None if error is None else _error_decoder.decode(error)
    except msgspec.MsgspecError:
        fault = JobError("internal_error", "what was stored of this job cannot be read")
    return replace(job, text=text, error=fault)
