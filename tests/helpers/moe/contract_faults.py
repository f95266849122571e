"""Reads that break at start, records that are damaged, and many threads at once."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from coterie.core.errors import WeightsError
from coterie.core.moe import MoeSettings
from coterie.models.base import load_model
from coterie.models.build.moe import MoeRequirements, store_of
from coterie.moe.runtime.runtime import open_experts
from coterie.moe.runtime.tiers import ExpertLoad, HostTier
from coterie.moe.store.export import export
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.moe.dispatched_model import (
    PROMPTS,
    DispatchedModel,
    FaultyDisk,
    Setting,
    expect_weights_error,
)
from tests.helpers.moe.tiny_moe import EXPERTS, LAYERS, checkpoint_of


def broken_start_is_a_typed_error(device: str) -> str:
    """What is loaded at start and cannot be read: no half-open runtime, and a second try works."""
    setting = Setting(
        checkpoint_of("qwen3_moe"), "persistent", LAYERS * EXPERTS, "0", device=device
    )

    class Broken(DispatchedModel):
        def _open(self, wanted: MoeRequirements):  # type: ignore[no-untyped-def]
            self.disk.reads_until_fault = 5
            return super()._open(wanted)

    expect_weights_error(lambda: Broken(setting))
    with DispatchedModel(setting) as dispatched:
        dispatched.generate(PROMPTS[:1], 16)
    return "refused, then right"


def damaged_record_is_a_typed_error(device: str) -> str:
    """A flipped byte is found at the record's first read, and only its users fail."""
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "packed"
        source = checkpoint_of("mixtral")
        store = {}

        def keep(wanted: MoeRequirements):  # type: ignore[no-untyped-def]
            store["source"] = store_of(wanted, "auto")
            export(open_checkpoint(source), store["source"], packed)
            return open_experts(store["source"], MoeSettings(strategy="cpu_only"))

        load_model(open_checkpoint(source), dtype="fp32", experts=keep).close()
        whole = (packed / "experts.bin").read_bytes()
        setting = Setting(packed, "active_only", 4, "0", device=device)
        with DispatchedModel(setting) as dispatched:
            expected = dispatched.generate(PROMPTS[:1], 16)
        (packed / "experts.bin").write_bytes(bytes(byte ^ 1 for byte in whole[:64]) + whole[64:])
        with DispatchedModel(setting) as dispatched:
            expect_weights_error(lambda: [dispatched.generate([p], 16) for p in PROMPTS])
            dispatched.runtime.check()
            (packed / "experts.bin").write_bytes(whole)
            _, tokens = dispatched.generate(PROMPTS[:1], 16)
        assert torch.equal(tokens, expected[1])
        shutil.rmtree(packed)
    return "found, then right"


def host_tier_holds_its_budget_under_threads(device: str) -> str:
    """Many threads ask one small tier for all experts, with reads that fail now and then."""
    del device
    path = checkpoint_of("qwen3_moe")
    setting = Setting(path, "cpu_only", 0, "13%")
    with DispatchedModel(setting) as dispatched:
        store, host = dispatched.runtime.parts.store, dispatched.runtime.parts.host
        assert isinstance(host, HostTier)
        keys, problems = list(store.geometry.keys()), []

        def ask(seed: int) -> None:
            order = random.Random(seed)
            for _ in range(60):
                key = order.choice(keys)
                mine = ExpertLoad(key)
                entry = host.acquire(key, mine, block=True)
                assert entry is not None
                try:
                    arrival = entry.load
                    if arrival is not None and host.claim(entry):
                        if order.random() < 0.2:
                            arrival.finish(WeightsError("injected"))
                        else:
                            store.read(key, entry.record)
                            host.filled(entry)
                            arrival.finish()
                    elif arrival is not None:
                        arrival.settle()
                    if host.used_bytes > host.budget_bytes:
                        problems.append(key)
                finally:
                    host.release(entry)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        host.check()
        assert not host.keys_in_use(wait_s=0.0)
    return "6 threads x 60 experts in 3 places"


def first_token_comes_before_all_experts(device: str) -> str:
    """An ordinary directory, everything automatic: nothing is read that nobody asked for."""
    setting = Setting(checkpoint_of("olmoe"), "cpu_only", 0, "100%", device=device)
    with DispatchedModel(setting) as dispatched:
        assert isinstance(dispatched.disk, FaultyDisk)
        before = dispatched.disk.calls
        dispatched.generate([PROMPTS[0][:2]], 2)
        total = dispatched.runtime.report()["total"]
        assert before == 0
        assert 0 < total["host_misses"] < LAYERS * EXPERTS
    return f"{total['host_misses']} of {LAYERS * EXPERTS} experts read"


CHECKS: dict[str, Callable[[str], str]] = {
    check.__name__: check
    for check in (
        broken_start_is_a_typed_error,
        damaged_record_is_a_typed_error,
        host_tier_holds_its_budget_under_threads,
        first_token_comes_before_all_experts,
    )
}
