"""The tables of batches and their requests. For one thread.

A request is `pending`, `running` or ended; its end and the counts of its batch change in one
transaction. Rows of requests are removed when the files with the results are complete.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from coterie.core.batch import (
    ENDED_STATES,
    OPEN_STATUSES,
    PENDING,
    RUNNING,
    Batch,
    BatchTokens,
    LineFault,
    NewBatch,
    StoredFile,
)
from coterie.core.errors import Overloaded
from coterie.packages.sqlite import transaction
from coterie.service.batches.file_table import FileTable

SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
  dialect TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL, status TEXT NOT NULL,
  owner TEXT NOT NULL, created_at REAL NOT NULL, expires_at REAL NOT NULL, ended_at REAL,
  total INTEGER NOT NULL, output_file TEXT, error_file TEXT, metadata BLOB, output_keep_s REAL,
  times TEXT NOT NULL DEFAULT '{}', faults BLOB,
  succeeded INTEGER NOT NULL DEFAULT 0, errored INTEGER NOT NULL DEFAULT 0,
  canceled INTEGER NOT NULL DEFAULT 0, expired INTEGER NOT NULL DEFAULT 0,
  prompt INTEGER NOT NULL DEFAULT 0, cached INTEGER NOT NULL DEFAULT 0,
  completion INTEGER NOT NULL DEFAULT 0, reasoning INTEGER NOT NULL DEFAULT 0,
  input_bytes INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS batches_listed ON batches (tenant, dialect, seq);
CREATE INDEX IF NOT EXISTS batches_open ON batches (owner) WHERE ended_at IS NULL;
CREATE INDEX IF NOT EXISTS batches_ended ON batches (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS requests (
  id INTEGER PRIMARY KEY AUTOINCREMENT, batch TEXT NOT NULL, line INTEGER NOT NULL,
  custom_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, state TEXT NOT NULL,
  crashes INTEGER NOT NULL DEFAULT 0, result BLOB);
CREATE UNIQUE INDEX IF NOT EXISTS requests_of_batch ON requests (batch, line);
CREATE INDEX IF NOT EXISTS requests_pending ON requests (batch, crashes, line)
  WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS requests_running ON requests (batch) WHERE state = 'running';
"""
# owner of a released batch: the next server that looks takes it
NOBODY = ""
_PLAIN = (
    "id", "tenant", "dialect", "endpoint", "input_file", "status", "created_at", "expires_at",
    "total", "output_file", "error_file",
)  # fmt: skip
_BATCH = (
    f"{', '.join(_PLAIN)}, metadata, output_keep_s, times, faults, "
    "succeeded, errored, canceled, expired, prompt, cached, completion, reasoning"
)
_OPEN = "ended_at IS NULL"
_UNENDED = f"state IN ('{PENDING}', '{RUNNING}')"
_encode = msgspec.json.Encoder().encode
_faults_decoder = msgspec.json.Decoder(tuple[LineFault, ...])
# open batches of all tenants
MAX_OPEN_IN_ALL = 10_000


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Where one request lies in the batch's input, in bytes."""

    line: int
    custom_id: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """A request that runs now. `crashes`: servers that died while it ran in them."""

    id: int
    line: int
    custom_id: str
    start: int
    length: int
    crashes: int


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A row for a file with results. `result` is None if the request was never answered."""

    id: int
    custom_id: str
    line: int
    state: str
    result: bytes | None


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a batch ended."""

    status: str
    at: float
    output: StoredFile | None = None
    error: StoredFile | None = None
    faults: Sequence[LineFault] = ()


class BatchTables:
    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def add(self, new: NewBatch, status: str, owner: str, max_open: int) -> None:
        with transaction(self._sql) as sql:
            own, total = sql.execute(
                f"SELECT count(*) FILTER (WHERE tenant = ?), count(*) FROM batches WHERE {_OPEN}",
                (new.tenant,),
            ).fetchone()
            if own >= max_open or total >= MAX_OPEN_IN_ALL:
                what = (
                    f"{own} batches of yours have" if own >= max_open else "too many batches have"
                )
                raise Overloaded(f"{what} not ended; wait for one, or cancel it", retry_after_s=30)
            sql.execute(
                "INSERT INTO batches (id, tenant, dialect, endpoint, input_file, status, owner, "
                "created_at, expires_at, total, input_bytes, metadata, output_keep_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    new.id, new.tenant, new.dialect, new.endpoint, new.input_file, status, owner,
                    new.created_at, new.expires_at, new.total, new.input_bytes,
                    None if new.metadata is None else _encode(new.metadata), new.output_keep_s,
                ),
            )  # fmt: skip

    def find(self, batch_id: str, tenant: str, dialect: str) -> Batch | None:
        query = f"SELECT {_BATCH} FROM batches WHERE id = ? AND tenant = ? AND dialect = ?"
        row = self._sql.execute(query, (batch_id, tenant, dialect)).fetchone()
        return None if row is None else _batch(row)

    def page(
        self, tenant: str, dialect: str, cursor: str | None, limit: int, before: bool
    ) -> list[Batch] | None:
        """Newest first; one more than `limit` if there are more. `before`: those just newer than
        the cursor, oldest of them first. None if the cursor is no batch of the tenant."""
        seq = 0
        if cursor is not None:
            query = "SELECT seq FROM batches WHERE id = ? AND tenant = ? AND dialect = ?"
            row = self._sql.execute(query, (cursor, tenant, dialect)).fetchone()
            if row is None:
                return None
            seq = row[0]
        compare, order = (">", "ASC") if before else ("<", "DESC")
        rows = self._sql.execute(
            f"SELECT {_BATCH} FROM batches WHERE tenant = :tenant AND dialect = :dialect "
            f"AND (:seq = 0 OR seq {compare} :seq) ORDER BY seq {order} LIMIT :limit",
            {"tenant": tenant, "dialect": dialect, "seq": seq, "limit": limit + 1},
        )
        return [_batch(row) for row in rows]

    def move(self, batch_id: str, sources: Sequence[str], status: str, at: float) -> bool:
        """Change the status if it is one of `sources`."""
        known = ", ".join(f"'{source}'" for source in sources)
        cursor = self._sql.execute(
            "UPDATE batches SET status = ?, times = json_set(times, '$.' || ?, ?) "
            f"WHERE id = ? AND {_OPEN} AND status IN ({known})",
            (status, status, at, batch_id),
        )
        return cursor.rowcount == 1

    def remove(self, batch_id: str) -> str | None:
        """Remove an ended batch. Returns its file with results."""
        row = self._sql.execute(
            "DELETE FROM batches WHERE id = ? AND ended_at IS NOT NULL RETURNING output_file",
            (batch_id,),
        ).fetchone()
        return None if row is None else row[0]

    def ended_before(self, at: float, limit: int) -> list[tuple[str, str]]:
        """(id, dialect) of batches that ended before `at`."""
        query = "SELECT id, dialect FROM batches WHERE ended_at < ? LIMIT ?"
        return [(row[0], row[1]) for row in self._sql.execute(query, (at, limit))]

    def holds_open(self, batch_id: str) -> bool:
        query = f"SELECT 1 FROM batches WHERE id = ? AND {_OPEN}"
        return self._sql.execute(query, (batch_id,)).fetchone() is not None

    # ownership

    def owners(self) -> list[str]:
        query = f"SELECT DISTINCT owner FROM batches WHERE {_OPEN}"
        return [row[0] for row in self._sql.execute(query)]

    def owned(self, owner: str) -> list[Batch]:
        query = f"SELECT {_BATCH} FROM batches WHERE owner = ? AND {_OPEN} ORDER BY seq"
        return [_batch(row) for row in self._sql.execute(query, (owner,))]

    def adopt(self, old: str, new: str) -> int:
        """Take over all open batches of a server that has ended; count a crash for each request
        that ran in it."""
        with transaction(self._sql) as sql:
            crash = int(old != NOBODY)
            sql.execute(
                f"UPDATE requests SET state = '{PENDING}', crashes = crashes + ? "
                f"WHERE state = '{RUNNING}' AND batch IN "
                f"(SELECT id FROM batches WHERE owner = ? AND {_OPEN})",
                (crash, old),
            )
            cursor = sql.execute(
                f"UPDATE batches SET owner = ? WHERE owner = ? AND {_OPEN}", (new, old)
            )
            return cursor.rowcount

    def release(self, owner: str) -> None:
        """Give up all batches of `owner`, which shuts down normally: this counts as no crash."""
        with transaction(self._sql) as sql:
            sql.execute(
                f"UPDATE requests SET state = '{PENDING}' WHERE state = '{RUNNING}' AND batch IN "
                f"(SELECT id FROM batches WHERE owner = ? AND {_OPEN})",
                (owner,),
            )
            sql.execute(
                f"UPDATE batches SET owner = '{NOBODY}' WHERE owner = ? AND {_OPEN}", (owner,)
            )

    # requests

    def clear_requests(self, batch_id: str) -> None:
        self._sql.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))

    def add_requests(self, batch_id: str, lines: Sequence[BatchLine]) -> None:
        with transaction(self._sql) as sql:
            sql.executemany(
                "INSERT INTO requests (batch, line, custom_id, start, length, state) "
                f"VALUES (?, ?, ?, ?, ?, '{PENDING}')",
                [(batch_id, x.line, x.custom_id, x.start, x.length) for x in lines],
            )

    def begin(self, batch_id: str, sources: Sequence[str], status: str, at: float) -> bool:
        """All requests are known: the batch runs, unless it was cancelled."""
        with transaction(self._sql) as sql:
            sql.execute(
                "UPDATE batches SET total = (SELECT count(*) FROM requests WHERE batch = ?) "
                "WHERE id = ?",
                (batch_id, batch_id),
            )
            return self.move(batch_id, sources, status, at)

    def num_pending(self, batch_id: str) -> int:
        query = f"SELECT count(*) FROM requests WHERE batch = ? AND state = '{PENDING}'"
        return int(self._sql.execute(query, (batch_id,)).fetchone()[0])

    def claim(self, batch_id: str, status: str, after: int = 0) -> ClaimedRequest | None:
        """The next request, in the order of lines; those that were in crashes come last. `after`:
        those behind this line first."""
        row = self._sql.execute(
            f"UPDATE requests SET state = '{RUNNING}' WHERE id = (SELECT id FROM requests "
            f"WHERE batch = ? AND state = '{PENDING}' AND line > ? ORDER BY crashes, line LIMIT 1) "
            "AND EXISTS (SELECT 1 FROM batches WHERE id = ? AND status = ?) "
            "RETURNING id, line, custom_id, start, length, crashes",
            (batch_id, after, batch_id, status),
        ).fetchone()
        if row is None and after:
            return self.claim(batch_id, status)
        return None if row is None else ClaimedRequest(*row)

    def requeue(self, request_id: int) -> bool:
        cursor = self._sql.execute(
            f"UPDATE requests SET state = '{PENDING}' WHERE id = ? AND state = '{RUNNING}'",
            (request_id,),
        )
        return cursor.rowcount == 1

    def end_request(
        self, batch_id: str, request_id: int, state: str, result: bytes, tokens: BatchTokens
    ) -> bool:
        """False if the request has ended in the meantime."""
        assert state in ENDED_STATES
        with transaction(self._sql) as sql:
            cursor = sql.execute(
                f"UPDATE requests SET state = ?, result = ? WHERE id = ? AND state = '{RUNNING}'",
                (state, result, request_id),
            )
            if cursor.rowcount != 1:
                return False
            sql.execute(
                f"UPDATE batches SET {state} = {state} + 1, prompt = prompt + ?, "
                "cached = cached + ?, completion = completion + ?, reasoning = reasoning + ? "
                "WHERE id = ?",
                (tokens.prompt, tokens.cached, tokens.completion, tokens.reasoning, batch_id),
            )
        return True

    def cut_off(self, batch_id: str, state: str) -> int:
        """End every request that has not ended."""
        assert state in ENDED_STATES
        with transaction(self._sql) as sql:
            cursor = sql.execute(
                f"UPDATE requests SET state = ? WHERE batch = ? AND {_UNENDED}", (state, batch_id)
            )
            sql.execute(
                f"UPDATE batches SET {state} = {state} + ? WHERE id = ?",
                (cursor.rowcount, batch_id),
            )
            return cursor.rowcount

    def ended(self, batch_id: str, after_line: int, limit: int) -> list[EndedRequest]:
        rows = self._sql.execute(
            "SELECT id, custom_id, line, state, result FROM requests "
            "WHERE batch = ? AND line > ? ORDER BY line LIMIT ?",
            (batch_id, after_line, limit),
        )
        return [EndedRequest(*row) for row in rows]

    def finish(self, batch_id: str, end: BatchEnd) -> bool:
        """Write how the batch ended with its files, and remove its requests. False if it had
        ended."""
        output, error = end.output, end.error
        with transaction(self._sql) as sql:
            cursor = sql.execute(
                "UPDATE batches SET status = ?, ended_at = ?, output_file = ?, error_file = ?, "
                f"faults = ?, owner = '{NOBODY}', times = json_set(times, '$.' || ?, ?) "
                f"WHERE id = ? AND {_OPEN}",
                (
                    end.status, end.at, None if output is None else output.id,
                    None if error is None else error.id,
                    _encode(list(end.faults)) if end.faults else None, end.status, end.at, batch_id,
                ),
            )  # fmt: skip
            if cursor.rowcount != 1:
                return False
            for file in (output, error):
                if file is not None:
                    FileTable(sql).add(file)
            sql.execute("DELETE FROM requests WHERE batch = ?", (batch_id,))
        return True

    def open_counts(self, owner: str) -> dict[str, int]:
        """Open batches of `owner` by status."""
        counts = dict.fromkeys(OPEN_STATUSES, 0)
        query = f"SELECT status, count(*) FROM batches WHERE owner = ? AND {_OPEN} GROUP BY status"
        return counts | dict(self._sql.execute(query, (owner,)).fetchall())


def _batch(row: Sequence[Any]) -> Batch:
    plain, (metadata, keep_s, times, faults) = row[:11], row[11:15]
    fields = dict(zip(_PLAIN, plain, strict=True))
    return Batch(
        **fields,
        metadata=None if metadata is None else msgspec.json.decode(metadata),
        output_keep_s=keep_s,
        times=msgspec.json.decode(times),
        counts=dict(zip(ENDED_STATES, row[15:19], strict=True)),
        tokens=BatchTokens(*row[19:]),
        faults=() if faults is None else _faults_decoder.decode(faults),
    )
