"""A worker that is begun before it is known what it loads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.core.errors import WeightsError
from coterie.core.lane import LaneConfig
from coterie.workers import early
from coterie.workers.contract import WorkerSpec
from coterie.workers.supervisor import ProcessReplica
from tests.helpers.models.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    early.discard()


def spec(model: Path, threads: int = 1) -> WorkerSpec:
    lane = LaneConfig("m", max_sequences=2, context=64)
    return WorkerSpec("w", str(model), (lane,), threads=threads, kv_bytes=4_000_000, device="cpu")


async def started_as(model: Path, threads: int = 1) -> int | None:
    replica = ProcessReplica(spec(model, threads))
    await replica.start()
    try:
        return replica.pid
    finally:
        await replica.close()


def begun(threads: int = 1) -> int:
    early.begin(threads)
    return early._begun[threads].pid


def test_the_first_engine_takes_it_over() -> None:
    model, pid = tiny_checkpoint("llama"), begun()
    assert asyncio.run(started_as(model)) == pid
    assert asyncio.run(started_as(model)) != pid


def test_one_for_other_threads_is_left() -> None:
    model, pid = tiny_checkpoint("llama"), begun(2)
    assert asyncio.run(started_as(model)) != pid
    assert early._begun[2].poll() is None
    child = early._begun[2]
    early.discard()
    assert child.poll() is not None


def test_one_that_died_is_replaced() -> None:
    model, pid = tiny_checkpoint("llama"), begun()
    early._begun[1].kill()
    early._begun[1].wait()
    assert asyncio.run(started_as(model)) != pid


def test_what_it_cannot_load_is_told(tmp_path: Path) -> None:
    begun()
    with pytest.raises(WeightsError, match="nowhere"):
        asyncio.run(started_as(tmp_path / "nowhere.gguf"))


def test_it_ends_with_its_parent() -> None:
    early.begin(1)
    child = early.take(1)
    assert child is not None and child.stdin is not None
    child.stdin.close()
    until = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert child.poll() is not None
    child.close()
