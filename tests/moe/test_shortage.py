"""Memory that the system refuses while experts are loaded: less is taken, it is told, and tokens
stay the same. Nothing is held twice where both tiers lie in one memory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.core.moe import MoeSettings
from coterie.engine.engine import report_stats
from coterie.moe.runtime.budget import ExpertSizes, TierNeeds, TierSlots, size_tiers
from coterie.moe.runtime.setup import TierAllocation
from coterie.moe.store import disk
from coterie.moe.store.base import ExpertGeometry
from coterie.moe.store.disk import StagingBuffers
from coterie.obs.tables import MOE_SERIES
from coterie.weights.shortage import MemoryShortage, is_shortage
from tests.helpers.moe.dispatched_model import PROMPTS, DispatchedModel, Setting
from tests.helpers.moe.tiny_moe import checkpoint_of

TESTS = Path(__file__).parents[1]
GEOMETRY = ExpertGeometry((0, 1, 2, 3), 8, 2)
CPU = TierNeeds(device=True, host=False, free_device_bytes=0, free_host_bytes=0)
NO_ROOM = OSError(errno.ENOMEM, "Cannot allocate memory")


def loaded_with(share: float, strategy: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.helpers.moe.short_of_memory", str(share), strategy],
        env=os.environ | {"PYTHONPATH": str(TESTS.parent), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_persistent_falls_back_to_two_groups_when_memory_is_refused() -> None:
    # two thirds for the slots, a sixth for the staging of four load threads, the rest is spare
    told = loaded_with(0.95, "persistent")
    assert told["strategy"] == "layer_grouped:2+active_only"
    assert told["asked"] == "persistent"
    assert told["shortages"] == 1
    assert "memory could not be allocated" in told["fallback"]
    assert told["same"]
    assert told["held"] < 0.85


@pytest.mark.full
def test_a_host_tier_that_is_refused_is_halved() -> None:
    told = loaded_with(0.95, "cpu_only")
    assert told["strategy"] == "cpu_only"
    assert told["shortages"] == 1
    assert told["same"]
    assert told["held"] == pytest.approx(0.5, abs=0.01)


def test_what_is_given_up_and_in_which_order() -> None:
    room = TierAllocation(TierSlots(32, 0), CPU).reduced(GEOMETRY, NO_ROOM)
    assert room.tiers == TierSlots(16, 0)
    assert room.reduced(GEOMETRY, NO_ROOM).tiers == TierSlots(8, 0)
    cuda = TierNeeds(True, True, 0, 0, one_memory=False)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert TierAllocation(TierSlots(32, 32), cuda).reduced(GEOMETRY, full).tiers == TierSlots(
        16, 32
    )
    assert TierAllocation(TierSlots(16, 32), cuda).reduced(GEOMETRY, NO_ROOM).tiers == TierSlots(
        16, 16
    )
    with pytest.raises(ConfigError, match="not even 1 device and 0 host slots"):
        TierAllocation(TierSlots(1, 0), CPU).reduced(GEOMETRY, NO_ROOM)


@pytest.mark.parametrize(
    "error",
    [
        NO_ROOM,
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryShortage("expert (0, 1) could not be loaded"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("can't start new thread"),
    ],
)
def test_every_allocators_refusal_is_known(error: Exception) -> None:
    assert is_shortage(error)
    assert not is_shortage(OSError(errno.EIO, "Input/output error"))
    assert not is_shortage(RuntimeError("shape mismatch"))


def test_one_memory_holds_no_expert_twice() -> None:
    sizes, total = ExpertSizes(24, 1000, 24_000), 24
    for device, host in (("25%", "100%"), ("50%", "75%"), ("100%", "50%")):
        settings = MoeSettings(strategy="lru", device_budget=device, host_budget=host)
        slots = size_tiers(settings, sizes, CPU)
        assert (slots.host, slots.shared) == (total, True), (device, host)
    # less than everything in all: as asked for
    settings = MoeSettings(strategy="lru", device_budget="25%", host_budget="50%")
    assert size_tiers(settings, sizes, CPU) == TierSlots(6, 12)
    # two memories: each as asked for
    settings = MoeSettings(strategy="lru", device_budget="25%", host_budget="100%")
    two = TierNeeds(True, False, 0, 0, one_memory=False)
    assert size_tiers(settings, sizes, two) == TierSlots(6, 24)


@pytest.mark.parametrize("strategy", ["lru", "static_pin", "hot_cached_static", "layer_grouped"])
def test_shared_slots_compute_the_same_in_the_memory_of_one_copy(strategy: str) -> None:
    path = checkpoint_of("qwen3_moe")
    with DispatchedModel(Setting(path, "persistent", 24, "0")) as dispatched:
        logits, tokens = dispatched.generate(PROMPTS, 8)
    with DispatchedModel(Setting(path, strategy, 6)) as dispatched:
        assert dispatched.runtime.parts.device.shared
        ours, said = dispatched.generate(PROMPTS, 8)
        report = dispatched.runtime.report()
        nbytes = dispatched.runtime.parts.store.expert_bytes
        assert sum(tier["budget_bytes"] for tier in report["tiers"].values()) == nbytes
    assert torch.equal(ours, logits)
    assert torch.equal(said, tokens)


def test_a_fallback_is_counted() -> None:
    with DispatchedModel(Setting(checkpoint_of("qwen3_moe"), "persistent", 12, "0")) as dispatched:
        stats = report_stats(dispatched.runtime.report())
    assert stats["moe_fallbacks"] == 1
    assert stats["moe_shortages"] == 0
    assert {"moe_fallbacks", "moe_shortages"} <= set(MOE_SERIES)


def test_a_read_without_memory_for_its_staging_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers = StagingBuffers(4096)

    def refused(nbytes: int) -> Tensor:
        raise NO_ROOM

    monkeypatch.setattr(disk, "aligned_buffer", refused)
    lent, asks, order = threading.Event(), threading.Event(), []

    def second() -> None:
        lent.wait()
        asks.set()
        with buffers.lent() as buffer:
            order.append(buffer.numel())

    reader = threading.Thread(target=second)
    reader.start()
    with buffers.lent():
        lent.set()
        asks.wait()
        time.sleep(0.05)
        assert not order
    reader.join(10)
    assert order == [4096]
