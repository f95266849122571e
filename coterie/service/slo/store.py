"""State of the ensemble on disk: what must survive a restart, and the audit log.

One thread uses it at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.packages.sqlite import connect, database_errors, transaction
from coterie.service.breaker.watch import ControlChange
from coterie.service.slo.quantiles import SLICES

# changes that the audit log keeps; the oldest are removed
MAX_AUDIT = 10_000
# rows above the limit before the oldest are removed
SLACK = 256

_SCHEMA = """
CREATE TABLE IF NOT EXISTS state (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS latency (
    specialist TEXT NOT NULL,
    part INTEGER NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (specialist, part)
);
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    actor TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    details TEXT NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class StoredEnsemble:
    """State by key, and parts of latency windows by specialist and number."""

    state: dict[str, Any] = field(default_factory=dict)
    latency: dict[str, dict[int, Any]] = field(default_factory=dict)


class EnsembleStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._since_trim = SLACK
        self._db = connect(path)
        with database_errors(path):
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def read(self) -> StoredEnsemble:
        """A value that cannot be read is left out."""
        with database_errors(self._path):
            rows = self._db.execute("SELECT key, value FROM state").fetchall()
            parts = self._db.execute("SELECT specialist, part, value FROM latency").fetchall()
        found = StoredEnsemble()
        for key, text in rows:
            with suppress(ValueError):
                found.state[key] = json.loads(text)
        for specialist, part, text in parts:
            with suppress(ValueError):
                found.latency.setdefault(specialist, {})[part] = json.loads(text)
        return found

    def write(self, stored: StoredEnsemble, changes: Sequence[ControlChange] = ()) -> None:
        """All or nothing. Of each specialist in `latency` parts older than `SLICES` are removed."""
        # encoded one by one: the event loop cannot run meanwhile
        rows = [(key, json.dumps(value)) for key, value in stored.state.items()]
        parts = [
            (specialist, part, json.dumps(value))
            for specialist, found in stored.latency.items()
            for part, value in found.items()
        ]
        entries = [
            (item.at, item.actor, item.kind, item.subject, json.dumps(item.details))
            for item in changes
        ]
        with database_errors(self._path), transaction(self._db) as db:
            db.executemany("INSERT OR REPLACE INTO state (key, value) VALUES (?, ?)", rows)
            db.executemany(
                "INSERT OR REPLACE INTO latency (specialist, part, value) VALUES (?, ?, ?)", parts
            )
            db.executemany(
                "DELETE FROM latency WHERE specialist = ? AND part < ?",
                [(specialist, part - SLICES) for specialist, part, _ in parts],
            )
            db.executemany(
                "INSERT INTO audit (at, actor, kind, subject, details) VALUES (?, ?, ?, ?, ?)",
                entries,
            )
            self._since_trim += len(entries)
            if self._since_trim >= SLACK:
                self._since_trim = 0
                db.execute(
                    "DELETE FROM audit WHERE number <= "
                    "(SELECT number FROM audit ORDER BY number DESC LIMIT 1 OFFSET ?)",
                    (MAX_AUDIT,),
                )

    def audit(self, limit: int, before: int | None = None) -> list[dict[str, Any]]:
        """The newest entries first; `before`: only those with a lower number."""
        with database_errors(self._path):
            rows = self._db.execute(
                "SELECT number, at, actor, kind, subject, details FROM audit "
                "WHERE number < ? ORDER BY number DESC LIMIT ?",
                (2**62 if before is None else before, limit),
            ).fetchall()
        names = ("number", "at", "actor", "kind", "subject", "details")
        return [dict(zip(names, (*row[:5], json.loads(row[5])), strict=True)) for row in rows]
