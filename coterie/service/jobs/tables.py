"""The job database's one table, and every statement on it.

SQL only, on the connection of one thread. Each change of state is a single statement with its
condition inside, so that whoever comes second changes nothing: a job ends once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from coterie.core.job import CANCELLED, PROCESSING, QUEUED, Job, JobError, JobQuery
from coterie.service.jobs.codec import decode_result

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
# nobody's: the next server that looks takes it
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
    """One row at acceptance."""

    id: str
    tenant: str
    user_id: str
    model: str
    priority: int
    submitted_at: float
    request: bytes


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """What a job asks, and its plan where it has begun before."""

    request: bytes
    plan: bytes | None
    submitted_at: float


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A place in line. `crashes` counts servers that died while this job ran in them."""

    id: str
    seq: int
    priority: int
    crashes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AbandonedJob:
    """An open job whose server is gone."""

    id: str
    owner: str
    model: str
    submitted_at: float


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What a job's last transition writes."""

    status: str
    at: float
    text: str | None = None
    result: bytes | None = None
    error: JobError | None = None


class JobTables:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection

    def prepare(self) -> bool:
        """Makes the table where there is none. False when a newer Coterie made it."""
        (found,) = self._sql.execute("PRAGMA user_version").fetchone()
        if found == 0:
            # a script commits by itself, and nothing in it fails when done twice
            self._sql.executescript(f"{SCHEMA} PRAGMA user_version = {FORMAT};")
        return bool(found <= FORMAT)

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
        """Of an open job of `owner`."""
        query = (
            f"SELECT request, plan, submitted_at FROM jobs WHERE id = ? AND owner = ? AND {_OPEN}"
        )
        row = self._sql.execute(query, (job_id, owner)).fetchone()
        return None if row is None else StoredRequest(*row)

    def begin(self, job_id: str, owner: str, at: float, plan: bytes) -> bool:
        """The plan of the first run stays: later ones repeat it."""
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
        """`owner` stops in good order: nothing of it counts as a crash."""
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
        """From a server that is gone; what it had begun was in a crash."""
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
        """One more than the limit, where there is one."""
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

    def expire(self, before: float, max_ended: int, max_bytes: int) -> int:
        """Removes the ended jobs that are too old, then the oldest beyond the other two limits."""
        cursor = self._sql.execute("DELETE FROM jobs WHERE finished_at < ?", (before,))
        gone = cursor.rowcount
        beyond = self._sql.execute(
            "SELECT finished_at FROM (SELECT finished_at, row_number() OVER newest AS place, "
            "sum(bytes) OVER newest AS total FROM jobs WHERE finished_at IS NOT NULL "
            "WINDOW newest AS (ORDER BY finished_at DESC ROWS UNBOUNDED PRECEDING)) "
            "WHERE place > ? OR total > ? ORDER BY finished_at DESC LIMIT 1",
            (max_ended, max_bytes),
        ).fetchone()
        if beyond is not None:
            cursor = self._sql.execute("DELETE FROM jobs WHERE finished_at <= ?", beyond)
            gone += cursor.rowcount
        return gone

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
    *facts, text, result, error = row
    job = Job(*facts)
    try:
        if result is not None:
            found = decode_result(result)
            return replace(job, text=found.text, result=found)
        fault = None if error is None else _error_decoder.decode(error)
    except msgspec.MsgspecError:
        fault = JobError("internal_error", "what was stored of this job cannot be read")
    return replace(job, text=text, error=fault)
