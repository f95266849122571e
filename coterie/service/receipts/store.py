"""The receipts in the database of the log of inferences: at most so many, the oldest go first.

A row also holds what its decision was made from (`DecisionRecord`), and the prompt if its tenant
allows that.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from coterie.core.quick_init import quick_init
from coterie.core.receipt import OPEN, Receipt
from coterie.packages.sqlite import transaction

SCHEMA = """
CREATE TABLE IF NOT EXISTS receipts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    outcome TEXT NOT NULL,
    receipt BLOB NOT NULL,
    decision BLOB,
    prompt TEXT
);
CREATE TABLE IF NOT EXISTS contexts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest TEXT NOT NULL UNIQUE,
    context BLOB NOT NULL
);
"""
# columns that pages are filtered by, made of the receipt, so that no writer knows them
_FIELDS = {"specialist": ("TEXT", "$.plan.specialist"), "arrived_at": ("REAL", "$.arrived_at")}
# all that a page is filtered by, in its order: the receipts of other rows are not read
_INDEX = """
CREATE INDEX IF NOT EXISTS receipt_fields
ON receipts (number, tenant, outcome, specialist, arrived_at)
"""
# the rows that are looked at for the newest of one tenant
SEARCHED = 5000
# the rows that are looked at for one page
SCANNED = 20_000
# settings that are kept for decisions
MAX_CONTEXTS = 1000
# rows above the limit before the oldest are removed: removing at every row would be slow
SLACK = 256
# a later receipt of the same request replaces the first, but none that ended is opened again: rows
# that had to wait for the disk may come out of order. What was decided stays
_PUT = """
INSERT INTO receipts (id, tenant, outcome, receipt, decision, prompt) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    outcome = excluded.outcome, receipt = excluded.receipt,
    decision = coalesce(excluded.decision, decision), prompt = coalesce(excluded.prompt, prompt)
WHERE tenant = excluded.tenant AND (excluded.outcome != 'open' OR outcome = 'open')
"""
_KEEP = """
INSERT INTO receipts (id, tenant, outcome, receipt, decision, prompt) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO NOTHING
"""

_encode = msgspec.json.Encoder().encode


@quick_init
@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """A receipt as it is stored: JSON, a `DecisionRecord`, the prompt as JSON. The last two are
    None if they do not change."""

    id: str
    tenant: str
    outcome: str
    receipt: bytes
    decision: bytes | None = None
    prompt: str | None = None


def receipt_row(
    receipt: Receipt, decision: bytes | None = None, prompt: str | None = None
) -> ReceiptRow:
    return ReceiptRow(
        receipt.request_id, receipt.tenant, receipt.outcome, _encode(receipt), decision, prompt
    )


@dataclass(frozen=True, slots=True)
class ReceiptQuery:
    """None = any."""

    tenant: str | None
    limit: int
    # a page's `following`
    before: int | None = None
    specialist: str | None = None
    outcome: str | None = None
    # seconds since 1970, of the arrival
    since: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class ReceiptPage:
    # as JSON
    receipts: tuple[bytes, ...]
    # None = there are no older ones
    following: int | None


class ReceiptTable:
    """For one thread. The caller opens transactions."""

    def __init__(self, db: sqlite3.Connection, max_receipts: int) -> None:
        self._db, self._max = db, max_receipts
        self._since_trim = SLACK
        self._add_fields()

    def _add_fields(self) -> None:
        """A table of an earlier release has not the columns, and no index."""
        with transaction(self._db) as db:
            known = [row[1] for row in db.execute("PRAGMA table_xinfo(receipts)")]
            for name, (kind, path) in _FIELDS.items():
                if name not in known:
                    text = "CAST(receipt AS TEXT)"
                    value = f"CASE WHEN json_valid({text}) THEN json_extract({text}, '{path}') END"
                    db.execute(
                        f"ALTER TABLE receipts ADD COLUMN {name} {kind} "
                        f"GENERATED ALWAYS AS ({value}) VIRTUAL"
                    )
            db.execute(_INDEX)

    def put(self, rows: Sequence[ReceiptRow]) -> None:
        """Of several receipts of one request only the last is written."""
        if self._max:
            self._write(_PUT, _last_of_each(rows))

    def keep(self, rows: Iterable[ReceiptRow]) -> None:
        """Add those that are not there."""
        if self._max:
            self._write(_KEEP, rows)

    def find(self, receipt_id: str, tenant: str | None) -> bytes | None:
        """The receipt as JSON; of any tenant if `tenant` is None. Its own tenant also gets the
        prompt, if that was kept."""
        row = self._db.execute(
            "SELECT receipt, tenant, prompt FROM receipts WHERE id = ?", (receipt_id,)
        ).fetchone()
        if row is None or tenant not in (None, row[1]):
            return None
        receipt: bytes = row[0]
        if row[2] is None or tenant is None:
            return receipt
        asked: str = row[2]
        return receipt[:-1] + b',"asked":' + asked.encode() + b"}"

    def recent(self, limit: int, tenant: str | None) -> list[bytes]:
        """The newest receipts of requests that have ended, oldest first; of any tenant if `tenant`
        is None. Of a tenant only those among the newest `SEARCHED` of all."""
        rows = self._db.execute(
            "SELECT receipt FROM receipts WHERE outcome != ? AND (? IS NULL OR tenant = ?) AND "
            "number > (SELECT coalesce(max(number), 0) - ? FROM receipts) "
            "ORDER BY number DESC LIMIT ?",
            (OPEN, tenant, tenant, SEARCHED, limit),
        ).fetchall()
        return [row[0] for row in reversed(rows)]

    def page(self, query: ReceiptQuery) -> ReceiptPage:
        """The newest receipts first. Looks at `SCANNED` rows at most: a page may have fewer
        receipts than the limit, and `following` where to go on."""
        (newest,) = self._db.execute("SELECT coalesce(max(number), 0) + 1 FROM receipts").fetchone()
        before = newest if query.before is None else min(query.before, newest)
        rows = self._db.execute(
            "SELECT number, receipt FROM receipts WHERE number IN ("
            "SELECT number FROM receipts INDEXED BY receipt_fields "
            "WHERE number < :before AND number >= :before - :scanned "
            "AND (:tenant IS NULL OR tenant = :tenant) "
            "AND (:outcome IS NULL OR outcome = :outcome) "
            "AND (:specialist IS NULL OR specialist = :specialist) "
            "AND (:since IS NULL OR arrived_at >= :since) "
            "AND (:until IS NULL OR arrived_at < :until) "
            "ORDER BY number DESC LIMIT :limit) ORDER BY number DESC",
            {
                "before": before,
                "scanned": SCANNED,
                "tenant": query.tenant,
                "outcome": query.outcome,
                "specialist": query.specialist,
                "since": query.since,
                "until": query.until,
                "limit": query.limit,
            },
        ).fetchall()
        end: int = rows[-1][0] if len(rows) == query.limit else before - SCANNED
        left = "SELECT 1 FROM receipts WHERE number < ? LIMIT 1"
        more = self._db.execute(left, (end,)).fetchone() is not None
        return ReceiptPage(tuple(row[1] for row in rows), end if more else None)

    def put_context(self, digest: str, context: bytes) -> None:
        self._db.execute(
            "INSERT INTO contexts (digest, context) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING",
            (digest, context),
        )
        self._db.execute(
            "DELETE FROM contexts WHERE number <= "
            "(SELECT number FROM contexts ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (MAX_CONTEXTS,),
        )

    def contexts(self) -> dict[str, bytes]:
        """Settings by their digest."""
        return dict(self._db.execute("SELECT digest, context FROM contexts").fetchall())

    def decisions(self, limit: int) -> Iterator[bytes]:
        """The newest ones, in the order in which they were made."""
        ask = (
            "SELECT decision FROM (SELECT number, decision FROM receipts WHERE decision IS NOT NULL"
            " ORDER BY number DESC LIMIT ?) ORDER BY number"
        )
        for (decision,) in self._db.execute(ask, (limit,)):
            yield decision

    def _write(self, statement: str, rows: Iterable[ReceiptRow]) -> None:
        values = [(r.id, r.tenant, r.outcome, r.receipt, r.decision, r.prompt) for r in rows]
        self._db.executemany(statement, values)
        self._since_trim += len(values)
        if self._since_trim >= SLACK:
            self._since_trim = 0
            # by numbers, of which few are missing: to count rows takes longer the more there are
            self._db.execute(
                "DELETE FROM receipts WHERE number <= (SELECT max(number) FROM receipts) - ?",
                (self._max,),
            )


def _last_of_each(rows: Iterable[ReceiptRow]) -> Iterable[ReceiptRow]:
    last: dict[str, ReceiptRow] = {}
    for row in rows:
        before = last.get(row.id)
        if before is not None and row.outcome == OPEN != before.outcome:
            continue
        if before is not None and row.decision is None:
            row = ReceiptRow(
                row.id, row.tenant, row.outcome, row.receipt, before.decision, before.prompt
            )
        last[row.id] = row
    return last.values()
