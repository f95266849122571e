"""service/receipts over real files: what outlives a killed process, a bounded table, its order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coterie.core.errors import InvalidRequest, NotFound
from coterie.core.receipt import OPEN, Receipt, ReceiptPlan, ReceiptTimings
from coterie.packages.sqlite import connect
from coterie.service.receipts import journal as journals
from coterie.service.receipts.journal import ReceiptJournal, left_behind
from coterie.service.receipts.stamp import ReceiptWriter, slowest
from coterie.service.receipts.store import SCHEMA, SLACK, ReceiptQuery, receipt_row
from coterie.service.records import log as module
from coterie.service.records.log import InferenceRecords
from coterie.service.records.store import RecordStore

ROOT = Path(__file__).resolve().parents[2]
PLAN = ReceiptPlan("auto", "sql", "e0r0", (), "sql", 0.9, ("declared",), "closed", "", "3", "ab12")
BASE = Receipt("r", "t", 1000.0, PLAN, "admitted")


def run(
    path: Path, test: Callable[[InferenceRecords], Awaitable[None]], max_receipts: int = 100_000
) -> InferenceRecords:
    async def main() -> InferenceRecords:
        records = InferenceRecords(path / "records.db", 100, max_receipts)
        await records.start()
        try:
            await test(records)
        finally:
            await records.close()
        return records

    return asyncio.run(main())


def keep(records: InferenceRecords, name: str, outcome: str = OPEN, tenant: str = "t") -> None:
    receipt = replace(BASE, request_id=name, outcome=outcome, tenant=tenant)
    decision = b"inputs of " + name.encode() if outcome == OPEN else None
    records.keep_receipt(receipt_row(receipt, decision), outcome == OPEN)


async def outcome(records: InferenceRecords, name: str, tenant: str | None = "t") -> str:
    found = msgspec.json.decode(await records.receipt(name, tenant), type=Receipt)
    return found.outcome


def test_a_receipt_is_readable_at_once_and_only_by_its_tenant(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        keep(records, "a")
        assert await outcome(records, "a") == OPEN
        keep(records, "a", "stop")
        assert await outcome(records, "a") == await outcome(records, "a", None) == "stop"
        for name, tenant in (("a", "u"), ("b", "t"), ("b", None)):
            with pytest.raises(NotFound):
                await records.receipt(name, tenant)
        # nobody overwrites the receipt of another, and no receipt that ended is opened again
        keep(records, "a", "length", tenant="u")
        keep(records, "a")
        assert await outcome(records, "a") == "stop"

    run(tmp_path, test)


def test_a_prompt_that_may_be_kept_is_shown_to_its_tenant_alone(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        asked = '{"prompt":"what is a fjord?"}'
        records.keep_receipt(receipt_row(BASE, None, asked), True)
        records.keep_receipt(receipt_row(replace(BASE, outcome="stop")), False)
        mine = msgspec.json.decode(await records.receipt("r", "t"))
        assert mine["asked"] == {"prompt": "what is a fjord?"} and mine["outcome"] == "stop"
        assert b"fjord" not in await records.receipt("r", None)

    run(tmp_path, test)


def test_the_oldest_go_first(tmp_path: Path) -> None:
    names = [f"n{index}" for index in range(2 * SLACK + 50)]

    async def test(records: InferenceRecords) -> None:
        for name in names:
            keep(records, name)
            keep(records, name, "stop")
        assert await outcome(records, names[-1]) == "stop"
        with pytest.raises(NotFound):
            await records.receipt(names[0], "t")

    run(tmp_path, test, max_receipts=40)
    with sqlite3.connect(tmp_path / "records.db") as db:
        (count,) = db.execute("SELECT count(*) FROM receipts").fetchone()
        assert 40 <= count <= 40 + SLACK
        # the inputs of a decision stay beside the completed receipt
        rows = db.execute("SELECT id, decision FROM receipts").fetchall()
        assert all(decision == b"inputs of " + name.encode() for name, decision in rows)


def test_a_page_reads_no_receipt_that_it_does_not_show(tmp_path: Path) -> None:
    """Also of a database of an earlier release, in which rows are that nothing can read."""
    plans = [replace(PLAN, specialist=name) for name in ("sql", "json")]
    rows = [
        receipt_row(
            replace(
                BASE, request_id=f"r{n}", outcome="stop", arrived_at=float(n), plan=plans[n % 2]
            )
        )
        for n in range(300)
    ]
    with contextlib.closing(connect(tmp_path / "records.db")) as db:
        db.executescript(SCHEMA)
        ask = "INSERT INTO receipts (id, tenant, outcome, receipt) VALUES (?, ?, ?, ?)"
        db.executemany(ask, [(row.id, row.tenant, row.outcome, row.receipt) for row in rows[:100]])
        db.execute(ask, ("damaged", "t", "stop", b"\xff{"))
    RecordStore(tmp_path / "records.db", 10, 1000).close()
    store = RecordStore(tmp_path / "records.db", 10, 1000)
    store.add((), rows[100:])
    read = []
    store._db.create_function(
        "json_extract", 2, lambda text, path: read.append(path), deterministic=True
    )

    def page(**wanted: Any) -> list[str]:
        found = store.receipts_page(ReceiptQuery("t", 3, **wanted)).receipts
        return [msgspec.json.decode(item, type=Receipt).request_id for item in found]

    assert page(specialist="sql") == ["r298", "r296", "r294"]
    assert page(specialist="json", until=40.0) == ["r39", "r37", "r35"]
    assert page(since=298.0, outcome="stop") == ["r299", "r298"]
    assert page(specialist="nobody") == page(since=1e9) == page(outcome="open") == []
    assert not read
    store.close()


def test_nothing_is_kept_if_there_is_no_room_for_any(tmp_path: Path) -> None:
    async def test(records: InferenceRecords) -> None:
        keep(records, "a")
        with pytest.raises(NotFound):
            await records.receipt("a", "t")

    run(tmp_path, test, max_receipts=0)
    assert not (tmp_path / "receipts").exists()


async def killed(path: Path) -> None:
    """A server's process that is killed before its thread writes what is in the journal."""
    records = InferenceRecords(path / "records.db")
    await records.start()
    keep(records, "ended")
    keep(records, "ended", "stop")
    assert await outcome(records, "ended") == "stop"
    # the thread never comes to this one
    records._thread.join = lambda: None  # type: ignore[union-attr, method-assign, assignment]
    keep(records, "running")
    os._exit(9)


def test_what_a_killed_server_left_is_found(tmp_path: Path) -> None:
    # no fork: a child of this process that fails would go on as this process and report for it
    code = "import asyncio, pathlib; from tests.service.test_receipts_kept import killed\n"
    code += f"asyncio.run(killed(pathlib.Path({str(tmp_path)!r})))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert ended.returncode == 9

    async def test(records: InferenceRecords) -> None:
        assert records.recovered == 2
        assert await outcome(records, "running") == OPEN
        assert await outcome(records, "ended") == "stop"

    run(tmp_path, test)
    assert not list((tmp_path / "receipts").iterdir())


def test_a_journal_of_a_living_server_is_left_alone(tmp_path: Path) -> None:
    mine, other = ReceiptJournal(tmp_path), ReceiptJournal(tmp_path)
    mine.append(b"mine")
    other.append(b"other")
    assert list(left_behind(tmp_path)) == []
    os.close(other._handle)
    assert list(left_behind(tmp_path)) == [b"other"]
    assert len(list(tmp_path.iterdir())) == 1
    mine.close()


def test_a_torn_journal_gives_its_whole_entries(tmp_path: Path) -> None:
    rng = random.Random(5)
    entries = [rng.randbytes(rng.randrange(1, 200)) for _ in range(30)]
    journal = ReceiptJournal(tmp_path)
    for entry in entries:
        journal.append(entry)
    os.close(journal._handle)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for size in (len(data), len(data) - 1, 3, 0, rng.randrange(len(data))):
        path.write_bytes(data[:size])
        found = list(left_behind(tmp_path))
        assert found == entries[: len(found)]
        assert sum(len(entry) + 4 for entry in found) <= size
    # bytes that no server wrote are no reason not to start
    path.write_bytes(b"\x04\0\0\0abcd")
    run(tmp_path.parent, lambda _: asyncio.sleep(0))


def test_journals_are_short_and_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MAX_BYTES", 5000)

    async def test(records: InferenceRecords) -> None:
        for index in range(300):
            keep(records, f"n{index}")
            if index % 20 == 0:
                await outcome(records, f"n{index}")
        await outcome(records, "n299")
        files = list((tmp_path / "receipts").iterdir())
        assert len(files) == 1 and files[0].stat().st_size < 6000

    run(tmp_path, test)


def test_receipts_that_cannot_be_kept_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    monkeypatch.setattr(module, "GATHER_S", 5.0)

    async def test(records: InferenceRecords) -> None:
        for index in range(50):
            keep(records, f"n{index}")
        assert records.dropped >= 39

    run(tmp_path, test)


def test_a_refusal_keeps_no_text_of_the_caller() -> None:
    writer = ReceiptWriter(InferenceRecords(None))
    error = InvalidRequest("model: no model 'my secret prompt' here", param="model")
    receipt = writer.refusal("x", "t+salt", "bad\nname" * 100, 0.0, error)
    assert receipt.tenant == "t" and "secret" not in str(receipt)
    assert len(receipt.plan.model) <= 128 and "\n" not in receipt.plan.model


def test_the_slowest_part_is_named() -> None:
    assert slowest(ReceiptTimings()) == ""
    waited = ReceiptTimings(queue_ms=80, adapters_ms=50, prefill_ms=20, decode_ms=10, total_ms=112)
    assert slowest(waited) == "loading adapters: 50.0 of 112.0 ms"
    crashed = ReceiptTimings(queue_ms=8, decode_ms=90, total_ms=100, outage_ms=60)
    assert slowest(crashed) == "waiting for a worker after a crash: 60.0 of 100.0 ms"
    held_up = ReceiptTimings(queue_ms=8, decode_ms=30, deliver_ms=62, total_ms=100)
    assert slowest(held_up) == "delivering the answer: 62.0 of 100.0 ms"
    twice = ReceiptTimings(queue_ms=8, decode_ms=90, total_ms=100, preemptions=2)
    assert slowest(twice) == "writing the answer: 90.0 of 100.0 ms, preempted 2 times"
