"""Many loads: nothing mixed up, nothing left behind, whoever asks and whenever."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import psutil
import pytest
import torch

from coterie.adapters.pool import AdapterPool
from coterie.core.errors import InternalError
from coterie.core.plan import AdapterChoice, stack_key
from coterie.kernels.patch import PatchStack
from tests.helpers.adapters.adapter_pool import (
    PlainTargets,
    choose,
    delta,
    open_pool,
    stored_delta,
    write_lora,
)

ONE = 4 * 4 * (48 + 64) * 4


class Crowd:
    """Requests as an engine's thread would make them: ask, take when ready, look, release."""

    def __init__(self, pool: AdapterPool, root: Path, digests: list[str], seed: int) -> None:
        self.pool, self.digests = pool, digests
        self._draw = random.Random(seed)
        self._deltas = {digest: stored_delta(root, digest) for digest in digests}
        self._waiting: list[tuple[AdapterChoice, ...]] = []
        self._running: list[tuple[tuple[AdapterChoice, ...], PatchStack, torch.Tensor]] = []
        self.served = 0

    def step(self) -> None:
        draw = self._draw
        if len(self._waiting) < 12:
            # skewed: low numbers are popular
            number = min(int(draw.expovariate(0.25)), len(self.digests) - 1)
            asked = [AdapterChoice("x", self.digests[number], draw.choice([1.0, 1.0, -0.5]))]
            if draw.random() < 0.2:
                asked.append(AdapterChoice("y", draw.choice(self.digests)))
            self._waiting.append(tuple(asked))
            self.pool.want(asked)
        for adapters in list(self._waiting):
            if len(self._running) < 4 and self.pool.state(stack_key(adapters)) == "ready":
                try:
                    stack = self.pool.take(stack_key(adapters))
                except InternalError:
                    # evicted since its state was read: it waits on, as in an engine
                    continue
                self._waiting.remove(adapters)
                self._check(adapters, stack)
                copy = torch.cat([p.a.flatten() for p in stack.patches.values() if p.a is not None])
                self._running.append((adapters, stack, copy))
        if self._running and (len(self._running) == 4 or draw.random() < 0.5):
            adapters, stack, copy = self._running.pop(draw.randrange(len(self._running)))
            # nothing touched it since it was taken
            now = torch.cat([p.a.flatten() for p in stack.patches.values() if p.a is not None])
            assert torch.equal(now, copy)
            self._check(adapters, stack)
            assert self.pool.stack(stack.key) is stack
            self.pool.release(stack.key)
            self.served += 1
        elif not self._running:
            self.pool.wait(0.01)

    def _check(self, adapters: tuple[AdapterChoice, ...], stack: PatchStack) -> None:
        wanted = sum(self._deltas[choice.digest] * choice.weight for choice in adapters)
        assert isinstance(wanted, torch.Tensor)
        assert (delta(stack) - wanted).abs().max() < 1e-4

    def drain(self) -> None:
        for _, stack, _ in self._running:
            self.pool.release(stack.key)
        self._running.clear()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("host", [0, 6 * ONE, 100 * ONE])
def test_a_crowd_gets_what_it_asked_for(tmp_path: Path, host: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    digests = [write_lora(tmp_path, seed, rank=2 + seed % 5) for seed in range(20)]
    pool = open_pool(tmp_path, device_bytes=6 * ONE, host_bytes=host, device=device)
    crowd = Crowd(pool, tmp_path, digests, seed=host)
    while crowd.served < 150:
        crowd.step()
    crowd.drain()
    pool.check()
    stats = pool.stats()
    assert stats["adapter_evictions"] > 10 and stats["adapter_failures"] == 0
    pool.close()


def flat_over(root: Path, loads: int, width: int) -> None:
    """Resident memory after the first tenth against the end."""
    digests = [write_lora(root, seed, rank=16, wide=width, tall=width) for seed in range(12)]
    one = 4 * 16 * 2 * width * 4
    targets = PlainTargets(width, width)
    pool = open_pool(root, device_bytes=3 * one, host_bytes=4 * one, targets=targets)
    process, begun = psutil.Process(), 0
    for number in range(loads):
        # every load is of a stack that was never seen
        adapters = choose(digests[number * 5 % 12], weight=1.0 + number)
        key = stack_key(adapters)
        pool.want(adapters)
        while pool.state(key) != "ready":
            pool.wait(0.05)
        pool.release(pool.take(key).key)
        if number == loads // 10:
            gc.collect()
            begun = process.memory_info().rss
    gc.collect()
    grown = process.memory_info().rss - begun
    stats = pool.stats()
    assert stats["adapter_loads"] >= loads and stats["adapter_loads_disk"] > loads / 2
    assert stats["adapter_resident_bytes"] <= 3 * one and stats["adapter_host_bytes"] <= 4 * one
    assert len(pool.loads()) <= 64
    pool.check()
    pool.close()
    # of facts, and of what the allocator keeps: nothing that grows with the loads
    assert grown < 8_000_000, f"{grown} bytes more after {loads} loads of {one}"


def test_memory_is_flat(tmp_path: Path) -> None:
    flat_over(tmp_path, 200, 128)


@pytest.mark.full
def test_memory_is_flat_over_five_thousand_loads(tmp_path: Path) -> None:
    flat_over(tmp_path, 5000, 1024)


def test_what_a_load_cost_is_told_no_later_than_its_end(tmp_path: Path) -> None:
    """A worker reports loads once for each version: one seen too early would stay wrong."""
    digests = [write_lora(tmp_path, seed) for seed in range(40)]
    pool = open_pool(tmp_path, device_bytes=64 * ONE)
    for digest in digests:
        before = pool.version
        pool.want(choose(digest))
        while pool.version == before:
            pass
        times = pool.loads()[digest]
        assert times.loads == 1 and times.place_s > 0
    pool.close()
