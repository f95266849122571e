"""service/records over real files: one outcome per job, verdicts, a bounded log, bad disks."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.core.errors import Conflict, NotFound, Unavailable
from coterie.core.events import InferenceMetrics
from coterie.packages import sqlite as locked
from coterie.service.receipts.store import ReceiptRow
from coterie.service.records import log as module
from coterie.service.records.log import InferenceRecords
from coterie.service.records.store import SLACK, InferenceRecord, RecordQuery, RecordStore

BASE = InferenceMetrics(
    job_id="",
    submitted_at=1000.0,
    router_latency_ms=0.5,
    expert_load_latency_ms=0.0,
    inference_latency_ms=10.0,
    total_latency_ms=12.0,
    experts_used=(),
    num_experts=0,
    vram_peak_mb=1.5,
    input_tokens=4,
    output_tokens=8,
    tokens_per_second=800.0,
    success=True,
    error=None,
    validation_passed=None,
)


def record(
    job_id: str,
    outcome: bool | None = None,
    *,
    digests: tuple[str, ...] = ("d1",),
    **fields: object,
) -> InferenceRecord:
    tenant = str(fields.pop("tenant", "t"))
    return InferenceRecord(replace(BASE, job_id=job_id, **fields), tenant, digests, outcome)  # type: ignore[arg-type]


def run(
    path: Path, test: Callable[[InferenceRecords], Awaitable[None]], max_records: int = 100_000
) -> InferenceRecords:
    async def main() -> InferenceRecords:
        records = InferenceRecords(path / "records.db", max_records)
        await records.start()
        try:
            await test(records)
        finally:
            await records.close()
        return records

    return asyncio.run(main())


async def rows(records: InferenceRecords, **asked: object) -> list[str]:
    page = await records.query(RecordQuery(**({"tenant": "t", "limit": 1000} | asked)))  # type: ignore[arg-type]
    return [row.job_id for row in page.rows]


async def settled(records: InferenceRecords) -> None:
    """Whatever was logged so far counts."""
    await rows(records)
    await asyncio.sleep(0)


def test_a_job_counts_once_however_often_it_runs(tmp_path: Path) -> None:
    async def first(records: InferenceRecords) -> None:
        records.log(record("a", None, success=False, error="unavailable"))
        records.log(record("a", True))
        records.log(record("a", False, output_tokens=99))
        await settled(records)
        assert records.rate("d1") == (1, 1)
        (row,) = (await records.query(RecordQuery("t"))).rows
        # the figures are those of the last run
        assert row.output_tokens == 99 and row.success

    async def after_a_restart(records: InferenceRecords) -> None:
        assert records.rate("d1") == (1, 1)
        records.log(record("a", True))
        records.log(record("b", False, digests=("d1", "d2")))
        await settled(records)
        assert records.rate("d1") == (1, 2) and records.rate("d2") == (0, 1)
        assert records.rate("unknown") == (0, 0)

    run(tmp_path, first)
    run(tmp_path, after_a_restart)


def test_a_verdict_is_given_once_by_whose_job_it_is(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        records.log(record("judged", True))
        # the row was only just told: a caller that has its answer may speak at once
        await records.feedback("judged", "t", False, "wrong column")
        assert records.rate("d1") == (0, 1)
        with pytest.raises(Conflict):
            await records.feedback("judged", "t", True)
        records.log(record("open"))
        with pytest.raises(NotFound):
            await records.feedback("open", "somebody else", True)
        with pytest.raises(NotFound):
            await records.feedback("nothing", "t", True)
        assert records.rate("d1") == (0, 1)
        await records.feedback("open", "t", True)
        assert records.rate("d1") == (1, 2)
        # a run after a crash does not undo what the caller said
        records.log(record("judged", True))
        records.log(record("open", False))
        await settled(records)
        assert records.rate("d1") == (1, 2)

    run(tmp_path, test)


def test_a_verdict_says_whether_its_answer_shows_the_specialist(tmp_path: Path) -> None:
    """Also in a database of an earlier release, whose answers all do."""
    path = tmp_path / "records.db"
    store = RecordStore(path, 100)
    store.add([record("before")])
    store._db.execute("ALTER TABLE inferences DROP COLUMN shows_specialist")
    store.close()
    store = RecordStore(path, 100)
    store.add([record("own"), replace(record("composed"), shows_specialist=False)])
    shown = {name: store.judge(name, "t", False, "") for name in ("before", "own", "composed")}
    assert [shown[name].shows_specialist for name in shown] == [True, True, False]
    store.close()


def test_rates_are_those_of_a_plain_count(tmp_path: Path) -> None:
    """Any order of runs, repeated runs and verdicts against a count by hand."""
    rng = random.Random(5)
    outcomes: dict[str, bool | None] = {}
    verdicts: dict[str, bool] = {}
    stacks = {f"j{i}": rng.choice([("d1",), ("d2",), ("d1", "d2"), ()]) for i in range(40)}

    async def test(records: InferenceRecords) -> None:
        for _ in range(400):
            job = rng.choice(list(stacks))
            if rng.random() < 0.3 and job in outcomes:
                good = rng.random() < 0.5
                try:
                    await records.feedback(job, "t", good)
                except Conflict:
                    assert job in verdicts
                else:
                    assert job not in verdicts
                    verdicts[job] = good
                continue
            outcome = rng.choice([True, False, None])
            records.log(record(job, outcome, digests=stacks[job]))
            if outcomes.get(job) is None and job not in verdicts:
                outcomes[job] = outcome
        await settled(records)
        for digest in ("d1", "d2"):
            told = [
                verdicts.get(job, outcome)
                for job, outcome in outcomes.items()
                if digest in stacks[job]
            ]
            judged = [value for value in told if value is not None]
            assert records.rate(digest) == (sum(judged), len(judged))

    run(tmp_path, test)


def test_the_log_is_asked_by_tenant_expert_time_and_page(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        for i in range(6):
            used = ("sql@1.0.0",) if i % 2 else ("sql-plus@1.0.0", "json@2.0.0")
            records.log(record(f"j{i}", experts_used=used, submitted_at=1000.0 + i))
        records.log(record("foreign", tenant="other"))
        assert await rows(records) == ["j5", "j4", "j3", "j2", "j1", "j0"]
        assert await rows(records, tenant="other") == ["foreign"]
        assert await rows(records, expert="sql") == ["j5", "j3", "j1"]
        assert await rows(records, expert="json@2.0.0") == ["j4", "j2", "j0"]
        assert await rows(records, expert="json@2.0") == []
        assert await rows(records, since=1003.0) == ["j5", "j4", "j3"]
        first = await records.query(RecordQuery("t", limit=4))
        assert first.has_more and [row.job_id for row in first.rows] == ["j5", "j4", "j3", "j2"]
        rest = await records.query(RecordQuery("t", limit=4, after="j2"))
        assert not rest.has_more and [row.job_id for row in rest.rows] == ["j1", "j0"]
        # another tenant's job is no place to go on from
        assert await rows(records, after="foreign") == []
        assert rest.rows[0] == replace(
            BASE, job_id="j1", experts_used=("sql@1.0.0",), submitted_at=1001.0
        )

    run(tmp_path, test)


def test_the_oldest_rows_go_and_their_outcomes_stay(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        for i in range(2 * SLACK):
            records.log(record(f"j{i}", True))
        await settled(records)
        records.log(record("last", True))
        names = await rows(records)
        assert names[0] == "last" and len(names) <= 10 + SLACK
        assert records.rate("d1") == (2 * SLACK + 1, 2 * SLACK + 1)

    run(tmp_path, test, max_records=10)


def test_two_servers_of_one_home_add_up(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        other = InferenceRecords(tmp_path / "records.db")
        await other.start()
        try:
            for i in range(20):
                records.log(record(f"a{i}", True))
                other.log(record(f"b{i}", False))
            await settled(records)
            await settled(other)
            records.log(record("end", True))
            await settled(records)
            assert records.rate("d1") == (21, 41)
        finally:
            await other.close()

    run(tmp_path, test)


def test_a_broken_file_costs_the_log_not_the_server(tmp_path: Path) -> None:
    (tmp_path / "records.db").write_bytes(b"not a database " * 1000)

    async def test(records: InferenceRecords) -> None:
        records.log(record("a", True))
        assert records.rate("d1") == (0, 0)
        with pytest.raises(Unavailable):
            await rows(records)

    run(tmp_path, test)


def test_rows_that_cannot_be_written_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(records: InferenceRecords) -> None:
        records.log(record("a", True))
        await settled(records)
        other = sqlite3.connect(tmp_path / "records.db")
        other.execute("DROP TABLE inferences")
        other.close()
        records.log(record("b", True))
        while not records.dropped:
            await asyncio.sleep(0.005)
        assert records.rate("d1") == (1, 1)
        monkeypatch.setattr(module, "MAX_WAITING", 0)
        records.log(record("c", True))

    assert run(tmp_path, test).dropped == 2


def test_a_locked_file_keeps_rows_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locked, "WAIT_S", 0.05)

    async def test(records: InferenceRecords) -> None:
        other = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        records.log(record("a", True))
        with pytest.raises(Unavailable, match="locked"):
            await records.feedback("a", "t", True)
        records.log(record("b", True))
        await asyncio.sleep(0.5)
        assert await rows(records) == []
        other.execute("ROLLBACK")
        other.close()
        while len(await rows(records)) < 2:
            await asyncio.sleep(0.01)
        await settled(records)
        assert records.rate("d1") == (2, 2) and records.dropped == 0

    run(tmp_path, test)
    assert [line.message for line in caplog.records] == ["records_unwritable"]


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        records.log(record("a", True))
        await settled(records)
        # SQLite says so when its limit of pages is reached
        await records._ask(lambda store: store._db.execute("PRAGMA max_page_count = 1"))
        with pytest.raises(Unavailable) as caught:
            await records.feedback("a", "t", True, "long " * 20_000)
        assert caught.value.retry_after_s
        await records._ask(lambda store: store._db.execute("PRAGMA max_page_count = 1000000"))
        # nothing of it was kept
        await records.feedback("a", "t", False)
        assert records.rate("d1") == (0, 1)

    run(tmp_path, test)


def test_what_was_logged_is_on_disk_after_close(tmp_path: Path) -> None:
    async def log_some(records: InferenceRecords) -> None:
        for i in range(50):
            records.log(record(f"j{i}", True))

    async def look(records: InferenceRecords) -> None:
        assert len(await rows(records)) == 50 and records.rate("d1") == (50, 50)

    run(tmp_path, log_some)
    run(tmp_path, look)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept and not any(path.stat().st_mode & 0o077 for path in kept)


def test_adding_costs_the_same_however_many_rows_there_are(tmp_path: Path) -> None:
    """Counted in steps of SQLite's virtual machine: a busy machine does not change them."""
    store = RecordStore(tmp_path / "records.db", 100_000, 100_000)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    def cost_of(first: int) -> int:
        nonlocal steps
        steps = 0
        names = [f"{number:06}" for number in range(first, first + SLACK)]
        store.add([record(name, True) for name in names], [_receipt(name) for name in names])
        return steps

    store._db.set_progress_handler(count, 1)
    cost_of(0)
    few = cost_of(SLACK)
    for turn in range(2, 12):
        cost_of(turn * SLACK)
    many = cost_of(12 * SLACK)
    store.close()
    assert many < 1.1 * few


def _receipt(name: str) -> ReceiptRow:
    return ReceiptRow(name, "t", "stop", b"{}", b"decision")
