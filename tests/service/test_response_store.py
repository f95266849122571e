"""Responses on disk: bounds by age and size, fair between tenants, conversations in one piece."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest

from coterie.core.errors import RequestTooLarge, Unavailable
from coterie.core.settings import ResponseSettings
from coterie.service.responses import store as responses
from coterie.service.responses.store import ResponseStore, ResponseTable, StoredResponse

DAY = 86400.0


def row(
    name: str, tenant: str = "a", previous: str | None = None, size: int = 100
) -> StoredResponse:
    return StoredResponse(name, tenant, previous, b"[]", b"x" * (size - 2))


def table_in(folder: Path, max_bytes: int = 10**6, keep_s: float = DAY) -> ResponseTable:
    return ResponseTable(folder / "responses.db", ResponseSettings(keep_s, max_bytes))


def test_a_row_belongs_to_its_tenant(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.add(row("r1"), ["m1"], 0.0)
    assert table.find("r1", "a") == row("r1")
    assert table.find("r1", "b") is None
    assert table.answers_with(["m1"], "b", 10**6) == []
    assert table.answers_with(["m1"], "a", 10**6) == [row("r1").response]
    assert table.chain("r1", "b", 10**6, 0.0) is None
    assert not table.remove("r1", "b") and table.remove("r1", "a")
    assert table.answers_with(["m1"], "a", 10**6) == []
    # the text is gone from the file, too
    table.close()
    for name in ("responses.db", "responses.db-wal"):
        path = tmp_path / name
        assert not path.exists() or b"x" * 98 not in path.read_bytes()
    assert (tmp_path / "responses.db").stat().st_mode & 0o077 == 0


def test_a_conversation_is_whole_or_is_none(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    previous = None
    for number in range(6):
        table.add(row(f"r{number}", previous=previous), [], float(number))
        previous = f"r{number}"
    chain = table.chain("r5", "a", 10**6, 10.0)
    assert chain is not None and [one.id for one in chain] == [f"r{at}" for at in range(6)]
    # it stops where it is larger than what may be read
    cut = table.chain("r5", "a", 250, 10.0)
    assert cut is not None and len(cut) == 3
    table.remove("r2", "a")
    assert table.chain("r5", "a", 10**6, 10.0) is None
    assert table.chain("r1", "a", 10**6, 10.0) is not None


def test_use_keeps_a_whole_conversation(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.add(row("old"), [], 0.0)
    table.add(row("first"), [], 0.0)
    table.add(row("second", previous="first"), [], 1.0)
    assert table.chain("second", "a", 10**6, DAY / 2) is not None
    assert table.trim(DAY * 1.2) == 1
    assert table.find("old", "a") is None and table.find("first", "a") is not None
    assert table.trim(DAY * 1.6) == 2 and table.size() == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_busy_tenant_takes_nobody_elses_place(tmp_path: Path, seed: int) -> None:
    """Against a plain model: total size stays below the limit, and a tenant with less than its
    share of it loses nothing."""
    rng, limit = random.Random(seed), 20_000
    table = table_in(tmp_path, limit)
    kept: dict[str, list[str]] = {"busy": [], "calm": []}
    for number in range(400):
        tenant = "calm" if number % 40 == 0 else "busy"
        name = f"r{number}"
        table.add(row(name, tenant, size=rng.randrange(50, 900)), [], float(number))
        kept[tenant].append(name)
    table.trim(400.0)
    rows, size = table.size()
    assert size <= limit and rows > 10
    assert all(table.find(name, "calm") for name in kept["calm"])
    left = [name for name in kept["busy"] if table.find(name, "busy")]
    # the newest are left, without a gap
    assert left == kept["busy"][-len(left) :]
    # never far above the limit in between either
    assert size > limit - 900


def test_the_end_of_an_open_response_is_written_once(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    table.add(StoredResponse("r1", "a", None, b"[]", b"open", b"body"), [], 0.0)
    done = StoredResponse("r1", "a", None, b"[]", b"done")
    assert table.finish(done, ["m1"], 1.0)
    assert not table.finish(StoredResponse("r1", "a", None, b"[]", b"again"), ["m2"], 2.0)
    assert table.find("r1", "a") == done
    assert table.answers_with(["m1"], "a", 10**6) == [done.response]
    assert table.answers_with(["m2"], "a", 10**6) == []


def test_answers_are_read_once_and_within_a_bound(tmp_path: Path) -> None:
    table = table_in(tmp_path)
    for number in range(6):
        table.add(row(f"r{number}"), [f"m{number}", f"n{number}"], 0.0)
    ids = [f"{kind}{number}" for kind in "mn" for number in range(6)]
    assert len(table.answers_with([*ids, *ids, "gone"], "a", 10**6)) == 6
    # it stops where they are larger than what may be read
    assert len(table.answers_with(ids, "a", 250)) == 3


def open_row(name: str, tenant: str = "a") -> StoredResponse:
    return StoredResponse(name, tenant, None, b"[]", b"x" * 96, b"{}")


def test_what_has_not_ended_goes_last(tmp_path: Path) -> None:
    table = table_in(tmp_path, 1000)
    for number in range(5):
        table.add(open_row(f"o{number}"), [], float(number))
    for number in range(20):
        table.add(row(f"r{number}"), [], 10.0 + number)
    assert table.size() == (10, 1000)
    assert [one.id for one in table.open(0, 100)] == [f"o{number}" for number in range(5)]
    assert table.find("r19", "a") is not None
    # but the bound holds for them too
    for number in range(5, 20):
        table.add(open_row(f"o{number}"), [], 40.0 + number)
    table.trim(60.0)
    assert table.size() == (10, 1000) and len(table.open(0, 100)) == 10


def test_ends_of_open_responses_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pages, each once, whoever asks or does not."""
    monkeypatch.setattr(responses, "SETTLED_AT_ONCE", 3)

    async def use() -> list[tuple[str, str]]:
        store = ResponseStore(tmp_path / "responses.db", ResponseSettings(max_bytes=10**6))
        asked: list[tuple[str, str]] = []

        async def settle(response_id: str, tenant: str) -> None:
            asked.append((response_id, tenant))
            done = StoredResponse(response_id, tenant, None, b"[]", b"done")
            assert await store.finish(done, [])

        store.connect(settle)
        await store.keep(row("ended"))
        for number in range(8):
            await store.add(open_row(f"o{number}", "ab"[number % 2]))
        await store.sweep()
        await store.sweep()
        with pytest.raises(RequestTooLarge):
            await store.add(row("large", size=10**7))
        await store.close()
        return asked

    assert asyncio.run(use()) == [(f"o{number}", "ab"[number % 2]) for number in range(8)]


def test_a_damaged_file_costs_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    path.write_bytes(b"this is no database" * 100)

    async def use() -> None:
        store = ResponseStore(path, ResponseSettings())
        await store.start()
        assert not await store.keep(row("r1"))
        assert store.dropped == 1
        with pytest.raises(Unavailable):
            await store.find("r1", "a")
        await store.close()

    asyncio.run(use())
    assert path.read_bytes().startswith(b"this is no database")


def test_nothing_is_kept_without_room(tmp_path: Path) -> None:
    async def use() -> None:
        store = ResponseStore(tmp_path / "responses.db", ResponseSettings(max_bytes=0))
        await store.start()
        assert not store.keeps and not await store.keep(row("r1"))
        await store.close()
        small = ResponseStore(tmp_path / "responses.db", ResponseSettings(max_bytes=1000))
        await small.start()
        assert await small.keep(row("r1")) and not await small.keep(row("r2", size=2000))
        assert await small.find("r1", "a") is not None
        await small.close()

    asyncio.run(use())


def test_rows_outlive_the_process(tmp_path: Path) -> None:
    async def write() -> None:
        store = ResponseStore(tmp_path / "responses.db", ResponseSettings())
        assert await store.keep(row("r1"), ["m1"])
        # no close: as if it was killed

    asyncio.run(write())
    with sqlite3.connect(tmp_path / "responses.db") as db:
        assert db.execute("SELECT id, tenant FROM responses").fetchall() == [("r1", "a")]


def test_a_long_chain_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_CHAIN", 5)
    table = table_in(tmp_path)
    # a chain that leads back to itself
    table.add(row("r1", previous="r2"), [], 0.0)
    table.add(row("r2", previous="r1"), [], 0.0)
    chain = table.chain("r1", "a", 10**6, 0.0)
    assert chain is not None and len(chain) == 6
