"""Steps with a prompt beside the bank: every kernel finds the bytes of its experts, whatever is
copied ahead, and later steps find what is still in the buffers."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from coterie.core.moe import MoeSettings
from coterie.kernels.cpu.build import native
from coterie.kernels.device_record import UNIT_BYTES, arrange, device_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.dispatch.base import StrategyContext
from coterie.moe.dispatch.table import build_strategies
from coterie.moe.runtime.banked import BankedExperts
from coterie.moe.runtime.budget import with_buffers
from coterie.moe.runtime.cpu_share import CpuShare
from coterie.moe.runtime.device_pool import IN_ARENA, DevicePool
from coterie.moe.runtime.host_bank import HostBank
from coterie.moe.runtime.layer_stream import buffer_slots
from coterie.moe.runtime.resident import StepDemands
from coterie.moe.runtime.setup import RuntimeParts, prefetches_in_place
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.runtime.tiers import DeviceTier, HostTier
from coterie.moe.runtime.travel import LinkRates
from coterie.moe.runtime.usage import UsageTelemetry
from coterie.moe.store.base import ExpertGeometry, Key
from tests.helpers.moe.slot_simulator import COSTS

CPU = torch.device("cpu")
GEOMETRY = ExpertGeometry((0, 2, 3, 4, 7), 6, 2, frozenset({(2, 4), (7, 0)}))
LAYOUT = ExpertLayout(32, 32, True, ("fp32",) * 3)
MANY, FEW = 500, 2


class _Store:
    geometry, slot_bytes = GEOMETRY, LAYOUT.nbytes
    expert_bytes = GEOMETRY.total * LAYOUT.nbytes

    def layout(self, layer: int) -> ExpertLayout:
        return LAYOUT

    def read(self, key: Key, out: torch.Tensor) -> int:
        draw = torch.Generator().manual_seed(100 * key[0] + key[1])
        out[:] = torch.randint(0, 256, (len(out),), generator=draw, dtype=torch.uint8)
        return len(out)

    def arranged(self, key: Key) -> bytes:
        own, out = (torch.zeros(LAYOUT.nbytes, dtype=torch.uint8) for _ in range(2))
        self.read(key, own)
        arrange(LAYOUT, own, out)
        record = device_record(LAYOUT)
        assert record is not None
        return out[: record.nbytes].numpy().tobytes()


STORE = _Store()
KEYS = GEOMETRY.keys()
RECORDS = {key: STORE.arranged(key) for key in KEYS}


def _experts(
    text: str, num_slots: int, ahead: int = 0, predict: str = "off", deterministic: bool = False
) -> tuple[BankedExperts, DeviceTier]:
    own, slots = cast("Any", STORE), SlotMap(num_slots)
    context = StrategyContext(
        GEOMETRY, slots, None, COSTS, deterministic=deterministic, in_place_bytes=3_000_000
    )
    prefill, decode = build_strategies(text, context)
    bank = HostBank(own, CPU)
    tier = DeviceTier(own, num_slots, CPU, buffers=buffer_slots(GEOMETRY) + ahead)
    parts = RuntimeParts(
        own, HostTier(own, 0), tier, slots, {"prefill": prefill, "decode": decode}, text, predict,
        bank=bank,
    )  # fmt: skip
    banked = BankedExperts(parts, bank, UsageTelemetry(GEOMETRY))
    banked.start()
    return banked, tier


def _wrong(pool: DevicePool, row: int) -> list[int]:
    """Experts of a layer whose place has other bytes than their own."""
    layer, base = GEOMETRY.layers[row], pool.arena.data_ptr()
    return [
        expert
        for expert in GEOMETRY.present(layer)
        if ctypes.string_at(
            base + int(pool.places[row, expert]) * UNIT_BYTES, len(RECORDS[layer, expert])
        )
        != RECORDS[layer, expert]
    ]


def _demands(rng: random.Random, phase: str) -> StepDemands:
    rows = np.zeros((len(GEOMETRY.layers), GEOMETRY.num_experts), dtype=np.int64)
    for row, layer in enumerate(GEOMETRY.layers):
        for expert in rng.sample(GEOMETRY.present(layer), rng.randint(1, 5)):
            rows[row, expert] = rng.randint(1, 4)
    return StepDemands(rows, None, phase)


def _used(keys: list[Key], phase: str) -> StepDemands:
    rows = np.zeros((len(GEOMETRY.layers), GEOMETRY.num_experts), dtype=np.int64)
    for layer, expert in keys:
        rows[GEOMETRY.layers.index(layer), expert] = 1
    return StepDemands(rows, None, phase)


@pytest.mark.parametrize("text", ["lru", "adaptive", "hot_cached_static", "chunked", "cpu_only"])
def test_every_step_finds_every_experts_own_bytes(text: str) -> None:
    banked, tier = _experts(text, 0 if text == "cpu_only" else 7)
    rng = random.Random(5)
    for number in range(12):
        if number % 3:
            banked.decide()
        elif number % 2:
            banked.decide(most=7)
        pool = banked.prompt_pool(rng.choice([MANY, 40]))
        assert pool is not None and pool.stream is not None and pool.is_whole
        for row in range(len(GEOMETRY.layers)):
            with pool.layer(row):
                assert not _wrong(pool, row), (number, row)
        held = pool.stream.held.copy()
        banked.record(pool.experts, _demands(rng, "prefill"), 0.1)
        for _ in range(rng.randint(0, 3)):
            pool = banked.pool
            for row in range(len(GEOMETRY.layers)):
                assert not _wrong(pool, row), (number, row)
            # what was copied of the last layers is still there
            here = (pool.tiers == IN_ARENA).numpy()
            assert held[-2:].any() and here[held].all()
            banked.record(pool.experts, _demands(rng, "decode"), 0.1)
        tier.check()
    banked.finish()
    slots = banked._slots
    assert all(tier.slot_of(key) == slots.slot_of(key) for key in KEYS)
    assert not any(_wrong(banked.pool, row) for row in range(len(GEOMETRY.layers)))
    banked.close()


def test_decisions_are_made_in_order_and_in_parts() -> None:
    banked, tier = _experts("lru", 7)
    banked.record(banked.pool.experts, _used(KEYS, "prefill"), 0.1)
    assert len(banked._undecided) == 1
    banked.launched(copies=False)
    assert not banked._undecided
    banked.record(banked.pool.experts, _used(KEYS, "prefill"), 0.1)
    banked.decide(most=1)
    # the step that decodes has to wait for the prompt before it
    banked.record(banked.pool.experts, _used(KEYS[:3], "decode"), 0.1)
    assert len(banked._undecided) == 2
    banked.decide(most=len(KEYS) - len(GEOMETRY.present(GEOMETRY.layers[0])))
    banked.decide()
    banked.move(())
    assert not banked._undecided and set(tier.keys()) == {*KEYS[:3], *KEYS[-4:]}
    banked.record(banked.pool.experts, _used(KEYS[:3], "decode"), 0.1)
    assert not banked._undecided
    assert not any(_wrong(banked.pool, row) for row in range(5))
    banked.close()


@pytest.mark.parametrize("fails", [False, True])
def test_what_waits_is_taken_out_of_the_next_prompts_buffers(fails: bool) -> None:
    """lru wants the experts of the last layers, in slots whose own are of earlier ones or none."""
    banked, tier = _experts("lru", 7)
    prompts = banked.prompts
    assert prompts is not None
    for number in range(3):
        banked.decide()
        pool = banked.prompt_pool(MANY)
        assert pool is not None
        assert len(prompts.kept) == (7 if number == 1 or (fails and number == 2) else 0)
        failed = fails and number == 1
        for row in range(2 if failed else 5):
            with pool.layer(row):
                assert not _wrong(pool, row)
        if not failed:
            used = KEYS if number == 0 else KEYS[-7:]
            banked.record(pool.experts, _used(used, "prefill"), 0.1)
        assert not any(_wrong(banked.pool, row) for row in range(5))
    banked._telemetry.end_step()
    in_slots = {key for key in KEYS if tier.slot_of(key) is not None}
    assert in_slots == set(KEYS[-7:])
    # the first prompt found nothing that waits; nothing was sent but what prompts copy
    banked.finish()
    assert banked._telemetry.end_step()[0].moved_bytes == 0
    assert not any(_wrong(banked.pool, row) for row in range(5))
    banked.close()


def test_what_waits_is_copied_once_a_step_has_decoded() -> None:
    banked, tier = _experts("lru", 7)
    pool = banked.prompt_pool(MANY)
    assert pool is not None
    for row in range(5):
        with pool.layer(row):
            pass
    banked.record(pool.experts, _used(KEYS, "prefill"), 0.1)
    banked.decide()
    assert not tier.keys()
    banked._telemetry.end_step()
    banked.move(())
    assert set(tier.keys()) == set(KEYS[-7:])
    # the last two layers came from the buffers
    assert banked._telemetry.end_step()[0].moved_bytes == 0
    banked.record(banked.pool.experts, _used([], "decode"), 0.1)
    assert not any(_wrong(banked.pool, row) for row in range(5))
    banked.close()


@pytest.mark.parametrize(("text", "at_once"), [("adaptive", 5), ("lru", 0)])
def test_behind_a_prompt_a_third_of_its_copies_come_at_once(text: str, at_once: int) -> None:
    """Not while another prompt is copied, which takes them out of its buffers; and not what is only
    wanted because the last layers used it last."""
    banked, tier = _experts(text, 12)
    before = set(tier.keys())
    pool = banked.prompt_pool(MANY)
    assert pool is not None and pool.experts.copied is not None
    if at_once:
        assert int(pool.experts.copied.sum()) // 3 == at_once
    for row in range(5):
        with pool.layer(row):
            pass
    rows = _used(KEYS[-12:], "prefill").rows * 1000
    banked.record(pool.experts, StepDemands(rows, None, "prefill"), 0.1)
    banked.launched(copies=True)
    banked.move((), most_waited=0)
    assert not banked._undecided and set(tier.keys()) == before
    banked.launched(copies=False)
    for most, more in ((0, at_once), (2, at_once + 2)):
        banked.move((), most_waited=most)
        assert len(set(tier.keys()) - before) == more
    banked.finish()
    assert set(tier.keys()) == set(KEYS[-12:])
    assert not any(_wrong(banked.pool, row) for row in range(5))
    banked.close()


def test_all_copies_are_counted() -> None:
    banked, _ = _experts("hot_cached_static", 7)
    pool = banked.prompt_pool(MANY)
    assert pool is not None
    banked._telemetry.end_step()
    rows = np.zeros((5, 6), dtype=np.int64)
    rows[:, 1] = MANY
    banked.record(pool.experts, StepDemands(rows, None, "prefill"), 0.1)
    total, _ = banked._telemetry.end_step()
    assert total.device_hits + total.device_misses == 5
    assert total.moved_bytes == (len(KEYS) - 7) * len(RECORDS[KEYS[0]])
    banked.close()


def test_few_rows_read_from_the_bank_and_some_copy_what_is_likely() -> None:
    banked, _ = _experts("hot_cached_static", 4)
    assert banked.prompts is not None
    banked.prompts.rates = LinkRates(copy=5.0, read=4.5)
    assert banked.prompt_pool(FEW) is None
    # two of the experts have all rows
    rows = np.zeros((5, 6), dtype=np.int64)
    rows[:, [1, 3]] = 100_000
    banked.record(banked.pool.experts, StepDemands(rows, None, "prefill"), 0.1)
    pool = banked.prompt_pool(FEW)
    assert pool is not None and not pool.is_whole
    in_buffers = np.zeros((5, 6), dtype=bool)
    in_buffers[:, [1, 3]] = True
    in_buffers &= ~pool.experts.on_device
    for row in range(5):
        with pool.layer(row):
            assert not _wrong(pool, row)
    assert (pool.stream is not None) and (pool.stream.held[-2:] == in_buffers[-2:]).all()
    banked.close()


@pytest.mark.parametrize(
    ("predict", "slots", "ahead"),
    [("auto", 0, True), ("auto", 9, False), ("prefetch", 9, True), ("protect", 0, False),
     ("off", 0, False)],
)  # fmt: skip
def test_what_a_device_reads_ahead_needs_a_buffer(predict: str, slots: int, ahead: bool) -> None:
    settings = MoeSettings("adaptive", predict=predict)
    assert prefetches_in_place(settings, slots) == ahead
    # it would have nothing to read
    assert not prefetches_in_place(replace(settings, strategy="layer_grouped:2+lru"), 9)
    assert not prefetches_in_place(replace(settings, deterministic=True), slots)


def test_what_was_read_ahead_is_told() -> None:
    pytest.importorskip("triton")
    banked, _ = _experts("adaptive", 5)
    assert banked.pool.prefetch is None and banked.report_prefetch() == {}
    banked.close()
    banked, tier = _experts("adaptive", 5, ahead=1)
    prefetch = banked.pool.prefetch
    assert prefetch is not None and prefetch.buffer is not None and banked.prompts is not None
    # behind the buffers of prompts, which end where it begins
    held = banked.prompts.stream._buffers
    assert held.data_ptr() + held.nbytes == prefetch.buffer.data_ptr()
    begin = prefetch.buffer.data_ptr() - tier.arena.data_ptr()
    assert begin + len(prefetch.buffer) == len(tier.arena)
    assert banked.report_prefetch() == {"why_off": "no step has guessed"}
    prefetch.told.copy_(torch.tensor([8, 6, 9, 2]))
    told = banked.report_prefetch()
    assert (told["predictions"], told["useful_prefetches"]) == (8, 6)
    assert told["slot_overlap"] == 0.75 and told["prefetching"] and not told["why_off"]
    # 16 channels of gate and of up
    assert told["wasted_bytes"] == 2 * 2 * 16 * LAYOUT.hidden * 4
    banked.close()


@pytest.mark.parametrize(
    ("predict", "deterministic", "given"),
    [("auto", False, True), ("prefetch", False, True), ("protect", False, False),
     ("off", False, False), ("auto", True, False)],
)  # fmt: skip
def test_a_cpu_gets_hints_without_a_buffer(
    predict: str, deterministic: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if (library := native()) is None:
        pytest.skip("no C++ compiler")
    from coterie.kernels.triton import expert_gemv

    banked, _ = _experts("adaptive", 5, predict=predict, deterministic=deterministic)
    # nobody would get one
    assert banked.pool.prefetch is None
    (record, *_) = banked.pool.records.values()
    share = banked._share = CpuShare(banked._bank, GEOMETRY, record, library)
    found = banked._open_prefetch()
    assert (found is not None) == given
    if found is not None:
        assert found.buffer is None and found.hint is not None
        assert found.hint.data_ptr() == share.hint.data_ptr()
        assert found.layer(3).place is None and found.layer(3).row == 3
        banked.pool = replace(banked.pool, share=share, prefetch=found)
        assert not banked.report_prefetch().get("prefetching")
        # beside so fast a link experts are worth no job, and then no guess
        monkeypatch.setattr(banked, "prompts", None)
        banked.link_rate = 1e15
        banked._measure_cpu()
        assert banked.pool.share is None and banked.pool.prefetch is None
        monkeypatch.setattr(expert_gemv, "RANKED", GEOMETRY.num_experts - 1)
        assert banked._open_prefetch() is None
    banked.close()


def test_a_budget_in_bytes_has_room_for_the_buffers() -> None:
    whole = MoeSettings(device_budget="25%")
    assert with_buffers(whole, 100, 30) == (100, 30)
    assert with_buffers(MoeSettings(cache_capacity=5), 5, 30) == (5, 30)
    for text in ("6GB", ""):
        assert with_buffers(MoeSettings(device_budget=text), 100, 30) == (70, 30)
        assert with_buffers(MoeSettings(device_budget=text), 30, 30) == (30, 0)
    # nothing of the device was asked for
    assert with_buffers(MoeSettings(), 0, 30) == (0, 30)
    assert with_buffers(MoeSettings(device_budget="1GB"), 0, 30) == (0, 0)
