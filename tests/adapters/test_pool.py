"""The pool's contract: what is ready is right, taken stacks lie still, budgets hold."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from coterie.core.errors import InvalidRequest, NotFound
from coterie.core.plan import stack_key
from coterie.obs.tables import ADAPTER_METRICS, ADAPTER_SERIES
from tests.helpers.adapters.adapter_pool import (
    choose,
    delta,
    fetch,
    open_pool,
    settle,
    stored_delta,
    write_lora,
)


def test_a_stack_is_loaded_taken_and_right(tmp_path: Path) -> None:
    one, two = write_lora(tmp_path, 1), write_lora(tmp_path, 2, rank=3)
    pool = open_pool(tmp_path)
    single, both = choose(one), (*choose(one, weight=0.5), *choose(two, weight=-2.0))
    assert pool.describe(both).key == stack_key(both) and pool.describe(both).nbytes > 0
    first, second = fetch(pool, single), fetch(pool, both)
    assert first.key == stack_key(single) and first.slot != second.slot
    torch.testing.assert_close(delta(first), stored_delta(tmp_path, one))
    wanted = stored_delta(tmp_path, one, weight=0.5) + stored_delta(tmp_path, two, weight=-2.0)
    torch.testing.assert_close(delta(second), wanted)
    assert pool.stack(first.key) is first
    assert set(pool.resident()) == {one, two}
    stats = pool.stats()
    # alone, the first was kept composed: as a part it is read again
    assert stats["adapter_loads_disk"] == 3 and stats["adapter_resident"] == 2
    assert stats["adapter_resident_bytes"] > 0 and stats["adapter_host_bytes"] > 0
    pool.check()
    pool.close()


def test_a_stack_pushed_out_comes_back_by_asking(tmp_path: Path) -> None:
    digests = [write_lora(tmp_path, seed) for seed in range(3)]
    room = 2 * (4 * (48 + 64) * 4 * 4 + 256)
    pool = open_pool(tmp_path, device_bytes=room)
    for digest in digests:
        pool.release(fetch(pool, choose(digest)).key)
    assert pool.stats()["adapter_evictions"] == 1
    again = stack_key(choose(digests[0]))
    assert pool.state(again) in ("loading", "ready")
    assert settle(pool, again) == "ready"
    torch.testing.assert_close(delta(pool.take(again)), stored_delta(tmp_path, digests[0]))
    assert pool.stats()["adapter_loads_disk"] == 3
    pool.check()
    pool.close()


def test_what_cannot_be_run_is_refused_by_type(tmp_path: Path) -> None:
    digest = write_lora(tmp_path, 1)
    pool = open_pool(tmp_path, device_bytes=1024)
    with pytest.raises(NotFound, match="library"):
        pool.describe(choose("0" * 64))
    with pytest.raises(NotFound, match="digest"):
        pool.describe(choose("../../etc/passwd"))
    with pytest.raises(InvalidRequest, match="up to 10"):
        pool.describe(choose(*[digest] * 11))
    with pytest.raises(InvalidRequest, match="device_bytes"):
        pool.describe(choose(digest))
    with pytest.raises(InvalidRequest, match="weight"):
        pool.describe(choose(digest, weight=float("nan")))
    assert pool.state("never heard of") == "failed"
    assert isinstance(pool.failure("never heard of"), NotFound)
    pool.close()


def test_every_stat_has_its_metric(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    assert pool.stats().keys() == ADAPTER_SERIES.keys()
    labels = {metric.name: metric.labels for metric in ADAPTER_METRICS}
    for name, *own in ADAPTER_SERIES.values():
        assert len(labels[name]) == 1 + len(own)
    pool.close()


def test_uses_are_counted_by_where_they_were_found(tmp_path: Path) -> None:
    digests = [write_lora(tmp_path, seed) for seed in range(2)]
    pool = open_pool(tmp_path, device_bytes=4 * (48 + 64) * 4 * 4)
    for digest in (digests[0], digests[0], digests[1], digests[0]):
        # a hint and the request itself ask for the same stack
        pool.want(choose(digest))
        pool.release(fetch(pool, choose(digest)).key)
    stats = pool.stats()
    found = [stats[f"adapter_lookups_{tier}"] for tier in ("device", "host", "disk")]
    assert found == [1, 1, 2] and stats["adapter_hits"] == 4
    pool.close()


def test_switching_between_resident_stacks_takes_no_time(tmp_path: Path) -> None:
    keys = [write_lora(tmp_path, seed) for seed in range(4)]
    pool = open_pool(tmp_path)
    keys = [fetch(pool, choose(digest)).key for digest in keys]
    spent = []
    for number in range(200):
        begun = time.perf_counter()
        assert pool.state(keys[number % 4]) == "ready"
        pool.take(keys[number % 4])
        pool.release(keys[number % 4])
        spent.append(time.perf_counter() - begun)
    assert statistics.median(spent) < 0.001
    pool.close()


def test_a_stack_that_changes_nothing(tmp_path: Path) -> None:
    digest = write_lora(tmp_path, 1)
    pool = open_pool(tmp_path)
    stack = fetch(pool, choose(digest, weight=0.0))
    assert not stack.patches and stack.soft is None
    pool.release(stack.key)
    pool.check()
    pool.close()
