"""The bank in RAM and the table over it: every step reads every expert's own bytes, whatever the
strategy moves beside it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from coterie.core.moe import MoeSettings
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord, arrange
from coterie.kernels.expert_layout import ExpertLayout
from coterie.models.build.moe import DeviceStep
from coterie.moe.dispatch.base import StrategyContext
from coterie.moe.dispatch.table import STRATEGIES, build_strategies
from coterie.moe.planner import auto
from coterie.moe.planner.auto import chooser
from coterie.moe.runtime.banked import BankedExperts
from coterie.moe.runtime.budget import TierNeeds, host_room
from coterie.moe.runtime.device_pool import IN_ARENA, IN_BANK, DevicePool, ResidentExperts
from coterie.moe.runtime.host_bank import HostBank, has_device_records
from coterie.moe.runtime.resident import StepDemands, count_demands, demands_by_sequence
from coterie.moe.runtime.setup import (
    PlacementContext,
    RuntimeParts,
    allocation_for,
    reads_in_place,
)
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.runtime.tiers import DeviceTier, HostTier
from coterie.moe.runtime.usage import UsageTelemetry
from coterie.moe.runtime.waiting_loads import WaitingLoads
from coterie.moe.store.base import ExpertGeometry, Key
from tests.helpers.moe.planner_cases import on_gpu
from tests.helpers.moe.slot_simulator import COSTS

CPU = torch.device("cpu")
# layer 3 is dense, one expert was pruned
GEOMETRY = ExpertGeometry((1, 2, 4), 6, 2, frozenset({(2, 4)}))
LAYOUT = ExpertLayout(32, 32, True, ("int8",) * 3)
RECORD = DeviceRecord("int8", 32, 32)
PRESENT = np.array([[(layer, e) not in GEOMETRY.absent for e in range(6)] for layer in (1, 2, 4)])


class DrawnStore:
    """Every expert has bytes of its own."""

    geometry, slot_bytes = GEOMETRY, 4096
    expert_bytes = GEOMETRY.total * LAYOUT.nbytes

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.records = {
            key: torch.randint(0, 256, (LAYOUT.nbytes,), generator=draw, dtype=torch.uint8)
            for layer in GEOMETRY.layers
            for key in [(layer, expert) for expert in GEOMETRY.present(layer)]
        }

    def layout(self, layer: int) -> ExpertLayout:
        return LAYOUT

    def read(self, key: Key, out: torch.Tensor) -> int:
        out[: LAYOUT.nbytes] = self.records[key]
        return LAYOUT.nbytes

    def arranged(self, key: Key) -> bytes:
        out = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
        arrange(LAYOUT, self.records[key], out)
        return out[: RECORD.nbytes].numpy().tobytes()


def filled_bank(store: DrawnStore) -> HostBank:
    bank = HostBank(cast("Any", store), CPU)
    assert bank.fill() == store.expert_bytes
    return bank


def test_every_expert_lies_in_the_bank_as_the_device_reads_it() -> None:
    store = DrawnStore()
    bank = filled_bank(store)
    assert bank.nbytes == GEOMETRY.total * 4096
    for layer in GEOMETRY.layers:
        whole = bank.layer(layer)
        for rank, expert in enumerate(GEOMETRY.present(layer)):
            own = store.arranged((layer, expert))
            assert bank.record(layer, expert)[: len(own)].numpy().tobytes() == own
            assert whole[rank].data_ptr() == bank.record(layer, expert).data_ptr()
            assert bank.memory.data_ptr() + bank.offset(layer, expert) == whole[rank].data_ptr()
    bank.close()


def test_experts_that_no_kernel_supports_have_no_bank() -> None:
    store = DrawnStore()
    assert has_device_records(cast("Any", store))
    odd = ExpertLayout(32, 32, False, ("fp32",) * 4)
    store.layout = lambda layer: odd  # type: ignore[method-assign]
    assert not has_device_records(cast("Any", store))


def test_a_host_budget_in_bytes_limits_the_bank() -> None:
    needs = TierNeeds(True, True, 0, free_host_bytes=1000)
    assert host_room(MoeSettings(host_budget="300"), needs) == 300
    assert host_room(MoeSettings(), needs) == host_room(MoeSettings(host_budget="100%"), needs)
    assert host_room(MoeSettings(), needs) == 800


@contextmanager
def experts_beside(text: str, num_slots: int) -> Iterator[tuple[DrawnStore, BankedExperts, Any]]:
    store = DrawnStore()
    with banked_over(store, text, num_slots) as (banked, parts):
        yield store, banked, parts


@contextmanager
def banked_over(
    store: DrawnStore, text: str, num_slots: int, wait_s: float | None = None
) -> Iterator[tuple[BankedExperts, Any]]:
    slots = SlotMap(num_slots)
    context = StrategyContext(GEOMETRY, slots, None, COSTS, in_place_bytes=3_000_000)
    prefill, decode = build_strategies(text, context)
    own = cast("Any", store)
    bank = HostBank(own, CPU)
    parts = RuntimeParts(
        own, HostTier(own, 0), DeviceTier(own, num_slots, CPU), slots,
        {"prefill": prefill, "decode": decode}, text, "off", bank=bank,
    )  # fmt: skip
    telemetry = UsageTelemetry(GEOMETRY)
    banked = BankedExperts(parts, bank, telemetry)
    banked.start(wait_s)
    try:
        yield banked, parts
    finally:
        banked.close()
        parts.device.close()


def wrong_experts(store: DrawnStore, banked: BankedExperts) -> list[Key]:
    """Those whose place has other bytes than their own, or whose tier is not true."""
    pool, wrong = banked.pool, []
    inside = range(len(pool.arena))
    for row, layer in enumerate(GEOMETRY.layers):
        for expert in GEOMETRY.present(layer):
            at = int(pool.places[row, expert]) * UNIT_BYTES
            read = ctypes.string_at(pool.arena.data_ptr() + at, RECORD.nbytes)
            tier = IN_ARENA if at in inside else IN_BANK
            if read != store.arranged((layer, expert)) or pool.tiers[row, expert] != tier:
                wrong.append((layer, expert))
    return wrong


def drawn_step(rng: random.Random, phase: str) -> StepDemands:
    rows = np.zeros((len(GEOMETRY.layers), GEOMETRY.num_experts), dtype=np.int64)
    for row, layer in enumerate(GEOMETRY.layers):
        most = 5 if phase == "prefill" else 3
        for expert in rng.sample(GEOMETRY.present(layer), rng.randint(1, most)):
            rows[row, expert] = rng.randint(1, 4)
    return StepDemands(rows, None, phase)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=() if text in ("lru", "adaptive", "chunked") else pytest.mark.full)
        for text in (*STRATEGIES, "layer_grouped:3+lru", "hot_cached_static+lru")
    ],
)
@pytest.mark.parametrize(
    "num_slots",
    [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 5],
)
def test_every_step_reads_every_experts_own_bytes(text: str, num_slots: int) -> None:
    if num_slots == 0 and text != "cpu_only":
        return
    rng = random.Random(num_slots)
    with experts_beside(text, num_slots) as (store, banked, parts):
        assert not wrong_experts(store, banked)
        for number in range(40):
            launched = banked.pool.experts
            phase = "prefill" if number % 9 == 0 else "decode"
            demands = drawn_step(rng, phase)
            banked.record(launched, demands, 0.01)
            assert not wrong_experts(store, banked), number
            if phase == "decode":
                for strategy in dict.fromkeys(parts.strategies.values()):
                    banked.move(strategy.update())
            assert not wrong_experts(store, banked), number
            assert int(banked.pool.experts.on_device.sum()) <= num_slots
            # what the next step's hits are counted by
            in_slots = banked.pool.tiers.numpy() == IN_ARENA
            assert (banked.pool.experts.on_device == in_slots)[PRESENT].all(), number
        parts.device.check()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=() if text in ("lru", "adaptive") else pytest.mark.full)
        for text in (*STRATEGIES, "hot_cached_static+lru")
        if text != "cpu_only"
    ],
)
def test_slots_that_others_use_for_a_while_are_read_from_the_bank(text: str) -> None:
    """Withdrawn slots are overwritten at once, as KV would; nothing may write or read them."""
    rng, others = random.Random(7), [3, 4, 6]
    with experts_beside(text, 8) as (store, banked, parts):
        held: list[int] = []
        for number in range(60):
            demands = drawn_step(rng, "prefill" if number % 9 == 0 else "decode")
            banked.record(banked.pool.experts, demands, 0.01)
            if number % 10 == 4:
                held = others[: rng.randint(1, 3)]
                banked.withdraw(held)
                for slot in held:
                    banked.pool.arena[slot * 4096 : (slot + 1) * 4096] = 77
            if number % 10 == 9:
                kept = [banked.pool.arena[slot * 4096 : (slot + 1) * 4096] for slot in held]
                assert all(bool((each == 77).all()) for each in kept)
                parts.slots.restore(held)
                held = []
            for strategy in dict.fromkeys(parts.strategies.values()):
                banked.move(strategy.update())
            assert not wrong_experts(store, banked), number
            assert len(parts.device.keys()) <= parts.slots.num_slots
            assert not any(parts.device.key_at(slot) for slot in held)
        parts.device.check()


def test_lru_keeps_the_last_used_and_counts_what_the_link_carries() -> None:
    with experts_beside("lru", 2) as (_, banked, _):
        rows = np.zeros((3, 6), dtype=np.int64)
        rows[0, [1, 3]] = 1
        demands = StepDemands(rows, np.array([[[2, 0], [0, 0], [0, 0]]]))
        for hits in (0, 2, 2):
            banked.record(banked.pool.experts, demands, 0.5)
            total, own = banked._telemetry.end_step()
            assert (total.device_hits, total.device_misses) == (hits, 2 - hits)
            # a miss is read over the link, and then copied for later steps
            assert total.moved_bytes == (0 if hits else 4 * RECORD.nbytes)
            assert total.compute_s + total.stall_s == pytest.approx(0.5)
            assert own[0].moved_bytes == total.moved_bytes
            banked.record(banked.pool.experts, StepDemands(np.zeros_like(rows), None), 0.0)
            banked._telemetry.end_step()


def placed_step(
    banked: BankedExperts, rng: random.Random, live: int, copied: list[int] | None = None
) -> StepDemands:
    """What the device does in a decode step of two rows, of which `live` count, by the plain twin
    of its kernels. `copied` gets the numbers of the experts that it copies."""
    from coterie.kernels.triton import expert_victims

    victims, pool = banked._victims, banked.pool
    assert victims is not None
    rows = np.zeros((len(GEOMETRY.layers), GEOMETRY.num_experts), dtype=np.int64)
    choices = np.zeros((len(GEOMETRY.layers), live, GEOMETRY.top_k), dtype=np.int32)
    expert_victims.begin(victims.state, torch.tensor([7, 8 if live == 2 else -1]))
    for row, layer in enumerate(GEOMETRY.layers):
        ids = [rng.sample(GEOMETRY.present(layer), GEOMETRY.top_k) for _ in range(2)]
        choices[row] = ids[:live]
        for expert in (expert for own in ids[:live] for expert in own):
            rows[row, expert] += 1
        for number, slot in expert_victims.place_torch(victims.state, torch.tensor(ids), row):
            begin = int(victims.state.bank[number]) * UNIT_BYTES + pool.arena.data_ptr()
            record = ctypes.string_at(begin, RECORD.nbytes)
            own = pool.arena[slot * 4096 : slot * 4096 + RECORD.nbytes]
            own.copy_(torch.frombuffer(bytearray(record), dtype=torch.uint8))
            if copied is not None:
                copied.append(number)
    number = int(victims.step_launched()[-1])
    if live == 1:
        return StepDemands(rows, None, "decode", number)
    return StepDemands(rows, np.zeros((live, len(rows), 2), np.int64), "decode", number, choices)


def place_in_steps(banked: BankedExperts) -> None:
    """As at the start beside a CUDA device."""
    banked.pool = replace(banked.pool, victims=banked._step_victims())
    if banked._victims is not None:
        banked._victims.send()


@pytest.mark.parametrize(
    "num_slots", [pytest.param(n, marks=pytest.mark.full) for n in (2, 11)] + [5]
)
@pytest.mark.parametrize("text", ["lru", "active_only", "lru+active_only"])
def test_the_host_follows_what_the_device_places_in_its_steps(text: str, num_slots: int) -> None:
    pytest.importorskip("triton")
    rng = random.Random()
    with experts_beside(text, num_slots) as (store, banked, parts):
        place_in_steps(banked)
        ahead: list[tuple[ResidentExperts, StepDemands]] = []
        for number in range(60):
            launched = banked.pool.experts
            if number % 13 == 5:
                banked.record(launched, drawn_step(rng, "prefill"), 0.01)
            ahead.append((launched, placed_step(banked, rng, rng.choice((1, 2)))))
            if number % 17 == 16:
                # a step that nobody counts, and one that needs the table now
                ahead.pop()
            elif number % 23 == 22:
                banked._read_slots()
            assert not wrong_experts(store, banked), number
            if len(ahead) > 1:
                banked.record(*ahead.pop(0), 0.01)
        for step in ahead:
            banked.record(*step, 0.01)
        victims = banked._victims
        assert victims is not None and victims.followed == 60
        width, keys = GEOMETRY.num_experts, victims.state.keys.tolist()
        for slot, key in enumerate(keys):
            own = None if key < 0 else (GEOMETRY.layers[key // width], key % width)
            assert own == parts.slots.key_at(slot) == parts.device.key_at(slot)
        assert (banked._table.known() == banked.pool.places.numpy()).all()
        assert int(banked.pool.experts.on_device.sum()) == len(parts.slots.keys())
        parts.device.check()


def test_what_the_device_places_crosses_the_link_once() -> None:
    pytest.importorskip("triton")
    rng, copied = random.Random(5), list[int]()
    with experts_beside("lru", 13) as (_, banked, parts):
        place_in_steps(banked)
        for _ in range(30):
            banked.record(banked.pool.experts, placed_step(banked, rng, 2, copied), 0.01)
        total = banked._telemetry.total()
        # also what was in a slot when the step began, and not any more when its layer came
        assert total.device_misses == len(copied) > 50 and total.device_hits > 10
        assert total.moved_bytes == total.device_misses * RECORD.nbytes
        assert total.host_hits == total.device_misses and total.host_runs == 0
        assert sum(parts.device.evictions.values()) > 30


def test_each_request_has_the_hits_of_the_step_that_placed_its_experts() -> None:
    pytest.importorskip("triton")
    rng = random.Random()
    with experts_beside("lru", 5) as (_, banked, _):
        place_in_steps(banked)
        for _ in range(20):
            copied: list[int] = []
            demands = placed_step(banked, rng, 2, copied)
            banked.record(banked.pool.experts, demands, 0.01)
            _, each = banked._telemetry.end_step()
            assert demands.choices is not None
            for sequence, own in enumerate(each):
                chosen = demands.choices[:, sequence] + np.arange(3)[:, None] * 6
                misses = len(set(chosen.ravel().tolist()) & set(copied))
                assert own.device_misses == misses
                assert own.device_hits == 3 * GEOMETRY.top_k - misses


def test_pins_and_other_rules_are_left_to_the_host() -> None:
    pytest.importorskip("triton")
    for text in ("hot_cached_static+lru", "static_pin", "adaptive", "chunked"):
        with experts_beside(text, 5) as (_, banked, _):
            place_in_steps(banked)
            assert banked._victims is None and banked.pool.victims is None


def test_chunked_copies_every_layer_again() -> None:
    with experts_beside("chunked", 4) as (store, banked, _):
        banked.record(banked.pool.experts, drawn_step(random.Random(1), "decode"), 0.1)
        total, _ = banked._telemetry.end_step()
        assert total.moved_bytes == (total.device_misses + GEOMETRY.total) * RECORD.nbytes
        assert not wrong_experts(store, banked)


def test_adaptive_moves_only_what_leads_and_never_a_temporary_one() -> None:
    """Uniform routing: no expert leads another, so that nearly nothing is moved."""
    with experts_beside("adaptive", 6) as (_, banked, parts):
        rng, misses = random.Random(3), 0
        for _ in range(100):
            banked.record(banked.pool.experts, drawn_step(rng, "decode"), 0.0)
            parts.strategies["decode"].update()
        total = banked._telemetry.total()
        misses = total.device_misses
        moved = total.moved_bytes // RECORD.nbytes - misses
        assert moved < misses // 3


class _Stream:
    """Of a device that has done everything at once."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("banked", [True, False])
def test_a_step_tells_each_sequences_hits(
    monkeypatch: pytest.MonkeyPatch, rows: int, banked: bool
) -> None:
    """Counted on the host for few rows, on the device for many and for prompts."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: _Stream())
    draw = np.random.default_rng(rows)
    routed = np.array([[draw.permutation(6)[:2] for _ in range(rows)] for _ in range(3)])
    mask = draw.random((3, 6)) < 0.5 if banked else np.ones((3, 6), dtype=bool)
    experts = ResidentExperts({}, {}, mask)
    tiers = torch.from_numpy(np.where(mask, IN_ARENA, IN_BANK).astype(np.int8))
    bank = cast("Any", object()) if banked else None
    places = torch.zeros((3, 6), dtype=torch.int64)
    pool = DevicePool(torch.empty(0), None, places, tiers, {}, experts, bank)
    # every row a sequence; then a prompt, and one row behind it
    for bounds in (list(range(rows + 1)), [0, rows - 1, rows]):
        count = len(bounds) - 1
        batch = AttentionBatch(
            positions=torch.zeros(rows, dtype=torch.int64),
            slots=torch.zeros(rows, dtype=torch.int64),
            query_starts=torch.tensor(bounds, dtype=torch.int32),
            context_lens=torch.ones(count, dtype=torch.int32),
            block_tables=torch.zeros((count, 1), dtype=torch.int32),
            block_size=16,
            phase="decode",
        )
        step = DeviceStep(torch.from_numpy(routed.astype(np.int32)), batch, pool)
        found, _ = step.collect()
        owners = np.repeat(np.arange(count), np.diff(bounds))
        want = demands_by_sequence(routed.astype(np.int32), owners.tolist(), mask)
        assert found.by_sequence is not None and (found.by_sequence == want).all()
        assert (found.rows == count_demands(routed.astype(np.int32), 6)).all()


def test_auto_is_adaptive_where_the_device_reads_from_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up GPU, with room for half of the experts."""
    store, site = cast("Any", DrawnStore()), PlacementContext(torch.device("cuda"))
    free = int(GEOMETRY.total * 4096 / 2 / 0.8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "made-up")
    monkeypatch.setattr(auto, "profile_name", lambda store, target: "p")
    chosen = chooser(store, MoeSettings(), site)
    assert chosen == MoeSettings(strategy="adaptive")
    # measured, so that the planner is asked
    known, asked = on_gpu().machine, []

    def choose(*given: Any) -> str:
        asked.append(given)
        return "lru"

    monkeypatch.setattr(auto, "load", lambda identity: known)
    monkeypatch.setattr(auto, "choose_in_place", choose)
    assert chooser(store, MoeSettings(), site) == MoeSettings(strategy="lru")
    [(case, division)] = asked
    assert case.profile == "p" and case.model.geometry == GEOMETRY
    assert division.settings == MoeSettings() and not division.needs.one_memory
    room = allocation_for(store, chosen, site)
    assert reads_in_place(store, chosen, site, room)
    few = MoeSettings(strategy="adaptive", host_budget="50%")
    assert not reads_in_place(store, few, site, allocation_for(store, few, site))
    for other in (
        MoeSettings(strategy="lru", host_budget="4KB"),
        MoeSettings(strategy="lru", device_budget="100%"),
    ):
        assert not reads_in_place(store, other, site, allocation_for(store, other, site))


def test_what_waits_is_copied_in_parts() -> None:
    """So that no token waits for all that a prompt brings."""
    slots, store = SlotMap(6), cast("Any", DrawnStore())
    tier = DeviceTier(store, 6, CPU)
    waiting = WaitingLoads(slots, tier)
    keys = [(1, expert) for expert in range(6)]
    loads = [(key, slots.place(key)) for key in keys]
    waiting.add(loads)
    assert waiting.take(4) == loads[:4]
    slots.evict(loads[4][0])
    # no longer wanted
    assert waiting.take(4) == loads[5:]
    assert waiting.take(4) == []
    tier.close()
