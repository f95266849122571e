"""The table of files: one row per file that is complete on disk. For one thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from coterie.core.batch import LISTED_PURPOSES, StoredFile
from coterie.core.errors import InvalidRequest, Overloaded, RequestTooLarge
from coterie.core.settings import FileSettings

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
  purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at REAL NOT NULL,
  expires_at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS files_listed ON files (tenant, seq);
CREATE INDEX IF NOT EXISTS files_aged ON files (expires_at);
CREATE INDEX IF NOT EXISTS files_sized ON files (tenant, bytes);
"""
_FILE = "id, tenant, purpose, filename, bytes, created_at, expires_at"
_LISTED = ", ".join(f"'{purpose}'" for purpose in LISTED_PURPOSES)
# files of one tenant
MAX_FILES = 10_000


class FileTable:
    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def add(self, file: StoredFile) -> None:
        self._sql.execute(
            f"INSERT INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                file.id, file.tenant, file.purpose, file.filename, file.num_bytes, file.created_at,
                file.expires_at,
            ),
        )  # fmt: skip

    def check_room(self, tenant: str, more: int, settings: FileSettings) -> None:
        """Raise if files of `more` bytes would be too much, for the tenant or in all. The inputs of
        open batches count too: they are on disk also if their file was deleted."""
        count, own, total = self._sql.execute(
            "SELECT coalesce(sum(is_file) FILTER (WHERE tenant = :tenant), 0), "
            "coalesce(sum(bytes) FILTER (WHERE tenant = :tenant), 0), coalesce(sum(bytes), 0) "
            "FROM (SELECT tenant, bytes, 1 AS is_file FROM files UNION ALL "
            "SELECT tenant, input_bytes, 0 FROM batches WHERE ended_at IS NULL "
            "AND NOT EXISTS (SELECT 1 FROM files WHERE files.id = batches.input_file))",
            {"tenant": tenant},
        ).fetchone()
        if count >= MAX_FILES:
            raise InvalidRequest(f"file: you have {count} files; delete some", param="file")
        if own + more > settings.max_tenant_bytes:
            raise RequestTooLarge(
                f"file: your files hold {own} bytes of {settings.max_tenant_bytes}; delete some",
                param="file",
            )
        if total + more > settings.max_total_bytes:
            raise Overloaded("the files of this server take all of their space", param="file")

    def find(self, file_id: str, tenant: str, now: float) -> StoredFile | None:
        row = self._sql.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND tenant = ? AND expires_at > ?",
            (file_id, tenant, now),
        ).fetchone()
        return None if row is None else StoredFile(*row)

    def page(
        self,
        tenant: str,
        purpose: str | None,
        after: str | None,
        limit: int,
        newest_first: bool,
        now: float,
    ) -> list[StoredFile] | None:
        """One more than `limit` if there are more; None if there is no file `after`."""
        seq = 0
        if after is not None:
            query = "SELECT seq FROM files WHERE id = ? AND tenant = ?"
            row = self._sql.execute(query, (after, tenant)).fetchone()
            if row is None:
                return None
            seq = row[0]
        compare, order = ("<", "DESC") if newest_first else (">", "ASC")
        rows: Sequence[Any] = self._sql.execute(
            f"SELECT {_FILE} FROM files WHERE tenant = :tenant AND purpose IN ({_LISTED}) "
            "AND (:purpose IS NULL OR purpose = :purpose) AND expires_at > :now "
            f"AND (:seq = 0 OR seq {compare} :seq) ORDER BY seq {order} LIMIT :limit",
            {
                "tenant": tenant, "purpose": purpose, "seq": seq, "limit": limit + 1, "now": now,
            },
        ).fetchall()  # fmt: skip
        return [StoredFile(*row) for row in rows]

    def remove(self, file_id: str, tenant: str) -> bool:
        query = f"DELETE FROM files WHERE id = ? AND tenant = ? AND purpose IN ({_LISTED})"
        return self._sql.execute(query, (file_id, tenant)).rowcount == 1

    def drop(self, file_id: str) -> None:
        self._sql.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expired(self, now: float, limit: int) -> list[str]:
        query = "SELECT id FROM files WHERE expires_at <= ? LIMIT ?"
        return [row[0] for row in self._sql.execute(query, (now, limit))]

    def holds(self, file_id: str) -> bool:
        query = "SELECT 1 FROM files WHERE id = ?"
        return self._sql.execute(query, (file_id,)).fetchone() is not None

    def num_bytes(self) -> int:
        query = "SELECT coalesce(sum(bytes), 0) FROM files"
        return int(self._sql.execute(query).fetchone()[0])
