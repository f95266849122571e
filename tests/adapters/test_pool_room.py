"""Who gets room, who waits, who goes: budgets, waiting order, the guard, and use before age."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from coterie.adapters import residency
from coterie.adapters.pool import AdapterPool
from coterie.adapters.residency import ALIGN
from coterie.core.errors import InvalidRequest
from coterie.core.plan import stack_key
from tests.helpers.adapters.adapter_pool import (
    choose,
    delta,
    fetch,
    open_pool,
    settle,
    stored_delta,
    write_lora,
)

# of a rank-4 adapter in the rig: 4 sites of a [4, 48] and b [4, 64] in fp32
ONE = 4 * 4 * (48 + 64) * 4


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.002)


def use(pool: AdapterPool, digest: str) -> str:
    key = fetch(pool, choose(digest)).key
    pool.release(key)
    return key


def test_taken_stacks_fill_the_room_and_the_rest_waits_in_order(tmp_path: Path) -> None:
    assert ONE % ALIGN == 0
    digests = [write_lora(tmp_path, seed) for seed in range(5)]
    pool = open_pool(tmp_path, device_bytes=2 * ONE + ALIGN)
    first, second = (fetch(pool, choose(digest)).key for digest in digests[:2])
    waiting = [stack_key(choose(digest)) for digest in digests[2:]]
    for digest in digests[2:]:
        pool.want(choose(digest))
        until(lambda: pool.stats()["adapter_loads_disk"] >= 3)
    until(lambda: all(pool.state(key) == "full" for key in waiting))
    assert pool.stats()["adapter_resident_bytes"] == 2 * ONE
    order: list[str] = []
    for key in (first, second, waiting[0]):
        pool.release(key)
        until(lambda: any(pool.state(k) == "ready" for k in set(waiting).difference(order)))
        (placed,) = (k for k in waiting if k not in order and pool.state(k) == "ready")
        pool.take(placed)
        order.append(placed)
    assert order == waiting
    pool.check()
    pool.close()


def test_the_preferred_one_is_next_and_the_others_keep_their_order(tmp_path: Path) -> None:
    digests = [write_lora(tmp_path, seed) for seed in range(5)]
    pool = open_pool(tmp_path, device_bytes=ONE)
    held = fetch(pool, choose(digests[0])).key
    waiting = []
    for digest in digests[1:]:
        pool.want(choose(digest))
        waiting.append(stack_key(choose(digest)))
        until(lambda: pool.state(waiting[-1]) == "full")
    # the last word counts; what is not waiting is no matter
    for key in (waiting[0], waiting[3], waiting[2], waiting[2], held, "unknown"):
        pool.prefer(key)
    order = []
    for _ in waiting:
        pool.release(held)
        left = [key for key in waiting if key not in order]
        until(partial(any_ready, pool, left))
        (held,) = (key for key in left if pool.state(key) == "ready")
        pool.take(held)
        order.append(held)
    assert order == [waiting[index] for index in (2, 3, 0, 1)]
    pool.check()
    pool.close()


def any_ready(pool: AdapterPool, keys: list[str]) -> bool:
    return any(pool.state(key) == "ready" for key in keys)


def is_full(pool: AdapterPool, key: str) -> bool:
    return pool.state(key) == "full"


def test_a_preferred_stack_takes_room_that_is_too_small_for_the_first(tmp_path: Path) -> None:
    small = [write_lora(tmp_path, seed) for seed in range(3)]
    big = write_lora(tmp_path, 9, rank=8)
    pool = open_pool(tmp_path, device_bytes=2 * ONE)
    keys = [fetch(pool, choose(digest)).key for digest in small[:2]]
    late, first = stack_key(choose(small[2])), stack_key(choose(big))
    for digest, key in ((big, first), (small[2], late)):
        pool.want(choose(digest))
        until(partial(is_full, pool, key))
    pool.release(keys[0])
    pool.prefer(late)
    until(lambda: pool.state(late) == "ready")
    assert pool.state(first) == "full"
    pool.release(keys[1])
    pool.release(pool.take(late).key)
    until(lambda: pool.state(first) == "ready")
    pool.check()
    pool.close()


def test_a_big_stack_is_not_passed_by_small_ones(tmp_path: Path) -> None:
    small = [write_lora(tmp_path, seed) for seed in range(4)]
    big = write_lora(tmp_path, 9, rank=12)
    pool = open_pool(tmp_path, device_bytes=3 * ONE)
    keys = [fetch(pool, choose(digest)).key for digest in small[:3]]
    pool.want(choose(big))
    until(lambda: pool.state(stack_key(choose(big))) == "full")
    pool.want(choose(small[3]))
    late = stack_key(choose(small[3]))
    until(lambda: pool.state(late) == "full")
    pool.release(keys[0])
    time.sleep(0.2)
    # there is room for the small one, and it is not given
    assert pool.state(late) == "full" and pool.stats()["adapter_resident"] == 3
    pool.release(keys[1])
    pool.release(keys[2])
    until(lambda: pool.state(stack_key(choose(big))) == "ready")
    pool.release(pool.take(stack_key(choose(big))).key)
    until(lambda: pool.state(late) == "ready")
    pool.close()


def test_nobody_waits_behind_one_that_was_given_up(tmp_path: Path) -> None:
    small = [write_lora(tmp_path, seed) for seed in range(3)]
    big = write_lora(tmp_path, 9, rank=8)
    pool = open_pool(tmp_path, device_bytes=2 * ONE)
    keys = [fetch(pool, choose(digest)).key for digest in small[:2]]
    pool.want(choose(big))
    time.sleep(0.1)
    pool.want(choose(small[2]))
    late = stack_key(choose(small[2]))
    pool.release(keys[0])
    # only the small one is asked for any more
    until(lambda: pool.state(late) == "ready")
    assert pool.take(late).key == late and pool.state(stack_key(choose(big))) != "ready"
    pool.close()


def test_use_outweighs_age(tmp_path: Path) -> None:
    digests = [write_lora(tmp_path, seed) for seed in range(8)]
    pool = open_pool(tmp_path, device_bytes=3 * ONE)
    for _ in range(3):
        use(pool, digests[0])
        use(pool, digests[1])
    # a row of strangers, each used once: they push each other out, not what is used again
    for digest in digests[2:]:
        use(pool, digest)
    assert set(digests[:2]) < set(pool.resident())
    assert pool.stats()["adapter_evictions"] == 5
    # what is not used any more goes in the end: strangers that come back take its place
    for _ in range(3):
        for digest in digests[2:5]:
            use(pool, digest)
    assert set(pool.resident()) == set(digests[2:5])
    pool.close()


def test_the_guard_spares_what_was_brought_in_for_someone(tmp_path: Path) -> None:
    digests = [write_lora(tmp_path, seed) for seed in range(4)]
    keys = [stack_key(choose(digest)) for digest in digests]
    pool = open_pool(tmp_path, device_bytes=2 * ONE)
    for digest in digests:
        pool.want(choose(digest))
    # everybody asks, as an engine with a queue does
    until(lambda: [pool.state(key) for key in keys].count("ready") == 2)
    begun = time.monotonic()
    ready = {key for key in keys if pool.state(key) == "ready"}
    while time.monotonic() - begun < 0.5:
        assert {key for key in keys if pool.state(key) == "ready"} == ready
        time.sleep(0.01)
    # used once, each makes way at once
    for key in ready:
        pool.release(pool.take(key).key)
    until(lambda: all(pool.state(key) == "ready" for key in set(keys) - ready))
    assert time.monotonic() - begun < residency.HOLD_S
    pool.close()


def test_the_guard_lets_go_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "HOLD_S", 0.3)
    digests = [write_lora(tmp_path, seed) for seed in range(2)]
    keys = [stack_key(choose(digest)) for digest in digests]
    pool = open_pool(tmp_path, device_bytes=ONE)
    pool.want(choose(digests[0]))
    assert settle(pool, keys[0]) == "ready"
    pool.want(choose(digests[1]))
    begun = time.monotonic()
    while pool.state(keys[1]) != "ready":
        pool.state(keys[0])
        assert time.monotonic() - begun < 10
        time.sleep(0.005)
    assert time.monotonic() - begun > 0.3
    pool.close()


def test_budgets_hold_whatever_comes(tmp_path: Path) -> None:
    digests = [write_lora(tmp_path, seed, rank=1 + seed % 7) for seed in range(24)]
    room, memory = 3 * ONE, 4 * ONE
    pool = open_pool(tmp_path, device_bytes=room, host_bytes=memory)
    for number in range(60):
        digest = digests[(number * 7) % 24]
        stack = fetch(pool, choose(digest, weight=1.0 + number % 3))
        stats = pool.stats()
        assert stats["adapter_resident_bytes"] <= room
        assert stats["adapter_host_bytes"] <= memory
        expected = stored_delta(tmp_path, digest, weight=1.0 + number % 3)
        assert (delta(stack) - expected).abs().max() < 1e-4
        pool.release(stack.key)
        pool.check()
    assert pool.stats()["adapter_host_evictions"] > 0
    pool.close()


def test_without_a_host_cache_everything_comes_from_disk(tmp_path: Path) -> None:
    digests = [write_lora(tmp_path, seed) for seed in range(3)]
    pool = open_pool(tmp_path, device_bytes=ONE, host_bytes=0)
    for digest in digests * 2:
        stack = fetch(pool, choose(digest))
        assert (delta(stack) - stored_delta(tmp_path, digest)).abs().max() < 1e-4
        pool.release(stack.key)
    stats = pool.stats()
    assert stats["adapter_loads_disk"] == 6 and stats["adapter_host_bytes"] == 0
    pool.close()


def test_more_stacks_than_slots(tmp_path: Path) -> None:
    digest = write_lora(tmp_path, 1, rank=1)
    pool = open_pool(tmp_path, device_bytes=10**7)
    weights = [1.0 + number / 64 for number in range(pool.max_stacks + 8)]
    slots = set()
    for weight in weights:
        stack = fetch(pool, choose(digest, weight=weight))
        assert 0 <= stack.slot < pool.max_stacks
        slots.add(stack.slot)
        pool.release(stack.key)
    assert len(slots) == pool.stats()["adapter_resident"] == pool.max_stacks
    assert pool.stats()["adapter_evictions"] == 8
    pool.check()
    pool.close()


def test_what_composes_to_more_than_the_room_fails_by_type(tmp_path: Path) -> None:
    # stored in bf16, and fp32 at a weight that bf16 cannot hold
    digest = write_lora(tmp_path, 1, dtype=torch.bfloat16)
    pool = open_pool(tmp_path, device_bytes=ONE // 2)
    assert delta(fetch(pool, choose(digest))).isfinite().all()
    heavy = choose(digest, weight=0.3)
    pool.want(heavy)
    assert settle(pool, stack_key(heavy)) == "failed"
    problem = pool.failure(stack_key(heavy))
    assert isinstance(problem, InvalidRequest) and "device_bytes" in problem.message
    with pytest.raises(InvalidRequest, match="device_bytes"):
        pool.describe(choose(digest, digest))
    pool.close()
