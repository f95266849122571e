"""The outcomes of requests on disk: a bounded log, per adapter digest how many were valid, and the
receipts.

One thread uses it at a time. A job counts once, even if it is reported several times: the caller's
verdict overrides the result of a validator. Stores no prompt and no answer.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coterie.core.errors import Conflict, NotFound
from coterie.core.events import InferenceMetrics
from coterie.core.quick_init import quick_init
from coterie.packages.sqlite import connect, database_errors, transaction
from coterie.service.receipts.store import SCHEMA as RECEIPTS
from coterie.service.receipts.store import ReceiptPage, ReceiptQuery, ReceiptRow, ReceiptTable

# outcomes of this many adapters are kept; the ones that changed longest ago are removed
MAX_DIGESTS = 100_000
# rows above the limit before the oldest are removed: removing at every row would be slow
SLACK = 256

# pages that SQLite moves from its log to the database at one time: its own 1,000 take many
# milliseconds, in which requests wait on a machine with one core
CHECKPOINT_PAGES = 200

_SCHEMA = """
CREATE TABLE IF NOT EXISTS inferences (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    experts TEXT NOT NULL,
    digests TEXT NOT NULL,
    outcome INTEGER,
    verdict INTEGER,
    comment TEXT,
    metrics BLOB NOT NULL,
    shows_specialist INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX IF NOT EXISTS by_tenant ON inferences (tenant, number);
CREATE TABLE IF NOT EXISTS outcomes (
    digest TEXT PRIMARY KEY,
    valid INTEGER NOT NULL,
    judged INTEGER NOT NULL,
    changed_at REAL NOT NULL
);
"""

_ADD = """
INSERT INTO inferences
    (job_id, tenant, submitted_at, experts, digests, outcome, metrics, shows_specialist)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (job_id) DO UPDATE SET
    submitted_at = excluded.submitted_at, experts = excluded.experts,
    digests = excluded.digests, outcome = excluded.outcome, metrics = excluded.metrics,
    shows_specialist = excluded.shows_specialist
"""

# of a job that was not reported before
_ADD_NEW = _ADD.partition("ON CONFLICT")[0] + "ON CONFLICT (job_id) DO NOTHING"

_COUNT = """
INSERT INTO outcomes (digest, valid, judged, changed_at) VALUES (?, ?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET
    valid = valid + excluded.valid, judged = judged + excluded.judged,
    changed_at = excluded.changed_at
"""

Rate = tuple[int, int]


@quick_init
@dataclass(frozen=True, slots=True)
class InferenceRecord:
    """One request that ended. `outcome`: whether its answer is valid; None if that is not known.
    `shows_specialist`: it says something about its specialist (see `RequestRun`)."""

    metrics: InferenceMetrics
    tenant: str
    digests: tuple[str, ...] = ()
    outcome: bool | None = None
    shows_specialist: bool = True


@dataclass(frozen=True, slots=True)
class VerdictEffect:
    """What a caller's verdict changed."""

    # adapters whose rates have changed
    digests: tuple[str, ...]
    specialist: str
    # seconds since 1970
    finished_at: float
    # a check had judged the answer
    is_checked: bool
    tenant: str = ""
    # the tokens at which a limit cut the answer; 0 = it ended by itself
    cut_at: int = 0
    # the answer says something about its specialist
    shows_specialist: bool = True


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """A query for the rows of one tenant, newest first. `expert` is a name or name@version; `after`
    is a job's id."""

    tenant: str
    limit: int = 20
    after: str | None = None
    expert: str | None = None
    # seconds since 1970
    since: float | None = None


@dataclass(frozen=True, slots=True)
class RecordPage:
    rows: tuple[InferenceMetrics, ...]
    has_more: bool


class RecordStore:
    def __init__(self, path: Path, max_records: int, max_receipts: int = 0) -> None:
        self._path, self._max_records = path, max_records
        self._since_trim = SLACK
        self._decode = msgspec.json.Decoder(InferenceMetrics)
        # it holds comments of callers
        self._db = connect(path)
        with database_errors(path):
            self._db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
            self._db.executescript(_SCHEMA + RECEIPTS)
            self._add_missing()
            self._receipts = ReceiptTable(self._db, max_receipts)
            with transaction(self._db) as db:
                db.execute(
                    "DELETE FROM outcomes WHERE digest NOT IN "
                    "(SELECT digest FROM outcomes ORDER BY changed_at DESC LIMIT ?)",
                    (MAX_DIGESTS,),
                )

    def _add_missing(self) -> None:
        """Add the column that a database of an earlier release has not."""
        column = "shows_specialist"
        with transaction(self._db) as db:
            known = [row[1] for row in db.execute("PRAGMA table_info(inferences)")]
            if column not in known:
                db.execute(f"ALTER TABLE inferences ADD COLUMN {column} INTEGER NOT NULL DEFAULT 1")

    def close(self) -> None:
        self._db.close()

    def rates(self, digests: Collection[str] | None = None) -> dict[str, Rate]:
        """(valid, validated) counts of these adapters, or of all."""
        with database_errors(self._path):
            if digests is None:
                rows = self._db.execute("SELECT digest, valid, judged FROM outcomes").fetchall()
            else:
                ask = "SELECT digest, valid, judged FROM outcomes WHERE digest = ?"
                rows = [row for d in digests if (row := self._db.execute(ask, (d,)).fetchone())]
        return {digest: (valid, judged) for digest, valid, judged in rows}

    def add(
        self, records: Sequence[InferenceRecord], receipts: Sequence[ReceiptRow] = ()
    ) -> set[str]:
        """Add all rows or none. Returns the digests whose rates have changed."""
        with database_errors(self._path), transaction(self._db) as db:
            counts: dict[str, list[int]] = {}
            for record in records:
                outcome = self._add(db, record)
                for digest in record.digests if outcome is not None else ():
                    count = counts.setdefault(digest, [0, 0])
                    count[0] += int(bool(outcome))
                    count[1] += 1
            _count(db, counts)
            self._since_trim += len(records)
            if self._since_trim >= SLACK:
                self._trim(db)
            if receipts:
                self._receipts.put(receipts)
        return set(counts)

    def add_left_behind(self, receipts: Iterable[ReceiptRow]) -> None:
        """Add the receipts of a server that was killed, if they are not here yet."""
        with database_errors(self._path), transaction(self._db):
            self._receipts.keep(receipts)

    def receipt(self, receipt_id: str, tenant: str | None) -> bytes | None:
        """As JSON; of any tenant if `tenant` is None."""
        with database_errors(self._path):
            return self._receipts.find(receipt_id, tenant)

    def recent_receipts(self, limit: int, tenant: str | None) -> list[bytes]:
        """As JSON, oldest first; of any tenant if `tenant` is None."""
        with database_errors(self._path):
            return self._receipts.recent(limit, tenant)

    def receipts_page(self, query: ReceiptQuery) -> ReceiptPage:
        with database_errors(self._path):
            return self._receipts.page(query)

    def keep_context(self, digest: str, context: bytes) -> None:
        """The settings that decisions with this digest were made with."""
        with database_errors(self._path), transaction(self._db):
            self._receipts.put_context(digest, context)

    def contexts(self) -> dict[str, bytes]:
        with database_errors(self._path):
            return self._receipts.contexts()

    def decisions(self, limit: int) -> list[bytes]:
        """The newest `limit` decisions, in the order in which they were made."""
        with database_errors(self._path):
            return list(self._receipts.decisions(limit))

    def _add(self, db: sqlite3.Connection, record: InferenceRecord) -> bool | None:
        """Returns the outcome that counts now; None if none does."""
        job_id, outcome = record.metrics.job_id, record.outcome
        names = "\n".join(("", *record.metrics.experts_used, ""))
        values = (
            job_id, record.tenant, record.metrics.submitted_at, names, " ".join(record.digests),
            None if outcome is None else int(outcome), msgspec.json.encode(record.metrics),
            int(record.shows_specialist),
        )  # fmt: skip
        if self._max_records and db.execute(_ADD_NEW, values).rowcount == 1:
            return outcome
        ask = "SELECT tenant, digests, outcome, verdict FROM inferences WHERE job_id = ?"
        known = db.execute(ask, (job_id,)).fetchone()
        if known is not None and known[0] != record.tenant:
            return None
        before = None if known is None else known[3] if known[3] is not None else known[2]
        if before is not None:
            # a job that ran again counts as it did the first time
            outcome = None if known[2] is None else bool(known[2])
        if self._max_records:
            digests = values[4] if before is None else known[1]
            kept = None if outcome is None else int(outcome)
            db.execute(_ADD, (*values[:4], digests, kept, *values[6:]))
        return outcome if before is None else None

    def judge(self, job_id: str, tenant: str, good: bool, comment: str) -> VerdictEffect:
        """Store a caller's verdict on its own job."""
        fields = "digests, outcome, verdict, metrics, shows_specialist"
        with database_errors(self._path), transaction(self._db) as db:
            ask = f"SELECT {fields} FROM inferences WHERE job_id = ? AND tenant = ?"
            row = db.execute(ask, (job_id, tenant)).fetchone()
            if row is None:
                raise NotFound(f"no job `{job_id}` of yours has ended here", param="job_id")
            if row[2] is not None:
                raise Conflict(f"the job `{job_id}` has its verdict already", param="job_id")
            db.execute(
                "UPDATE inferences SET verdict = ?, comment = ? WHERE job_id = ?",
                (int(good), comment, job_id),
            )
            digests = row[0].split()
            if row[1] is None:
                _count(db, dict.fromkeys(digests, (int(good), 1)))
            else:
                _count(db, dict.fromkeys(digests, (int(good) - row[1], 0)))
        metrics = self._decode.decode(row[3])
        return VerdictEffect(
            tuple(digests),
            metrics.specialist,
            metrics.finished_at,
            row[1] is not None,
            tenant,
            metrics.output_tokens if metrics.finish_reason == "length" else 0,
            bool(row[4]),
        )

    def query(self, query: RecordQuery) -> RecordPage:
        where, values = ["tenant = ?"], [query.tenant]
        if query.after is not None:
            where.append("number < (SELECT number FROM inferences WHERE job_id = ? AND tenant = ?)")
            values += [query.after, query.tenant]
        if query.expert is not None:
            where.append("instr(experts, ?)")
            whole = "@" in query.expert
            values.append(f"\n{query.expert}" + ("\n" if whole else "@"))
        parameters: list[str | float] = [*values]
        if query.since is not None:
            where.append("submitted_at >= ?")
            parameters.append(query.since)
        text = f"SELECT metrics FROM inferences WHERE {' AND '.join(where)}"
        with database_errors(self._path):
            rows = self._db.execute(
                f"{text} ORDER BY number DESC LIMIT ?", (*parameters, query.limit + 1)
            ).fetchall()
        records = tuple(self._decode.decode(row[0]) for row in rows[: query.limit])
        return RecordPage(records, len(rows) > query.limit)

    def _trim(self, db: sqlite3.Connection) -> None:
        self._since_trim = 0
        # by numbers, of which few are missing: to count the rows takes longer the more there are
        db.execute(
            "DELETE FROM inferences WHERE number <= (SELECT max(number) FROM inferences) - ?",
            (self._max_records,),
        )


def _count(db: sqlite3.Connection, counts: Mapping[str, Sequence[int]]) -> None:
    """By digest: valid answers, and judged ones, that are added."""
    now = time.time()
    db.executemany(_COUNT, [(digest, *count, now) for digest, count in counts.items()])
