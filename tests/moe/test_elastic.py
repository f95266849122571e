"""KV and expert slots that share one memory: answers stay the same while slabs change hands, and no
byte belongs to two; what is not needed is given back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from coterie.core.errors import ConfigError
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings
from coterie.core.plan import Admitted, Rejected
from coterie.engine import lent_blocks
from coterie.engine.blocks import KVSpace
from coterie.engine.engine import Engine, report_stats
from coterie.engine.lent_blocks import PATIENCE
from coterie.models.base import CausalLM, load_model
from coterie.models.build.moe import moe_factory
from coterie.models.text.tokenizer import load_tokenizer
from coterie.moe.runtime.memory_trade import MemoryTrade
from coterie.moe.runtime.slabs import KvBlocks, plan_slabs
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.runtime.tiers import HostTier
from coterie.moe.store.base import Key
from coterie.obs.tables import MOE_SERIES
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.greedy_engine import (
    GREEDY,
    Outcome,
    _assignment,
    _collect,
    model_at,
    run,
)

# 14 of 24 experts in slots, and host slots for 7: fewer than all together
SETTINGS = MoeSettings(
    strategy="lru", cache_capacity=14, host_budget="30%", warmup="none", predict="off",
    elastic_memory=True,
)  # fmt: skip
PROMPTS = [[5 + (i + 3) * j % 90 for j in range(6 + 13 * i)] for i in range(4)]


def loaded(settings: MoeSettings, backend: str = "reference", own_kv: int = 60_000) -> CausalLM:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen3_moe"))
    factory = moe_factory(settings, own_kv)
    return load_model(checkpoint, dtype="fp32", backend=backend, experts=factory)


@contextmanager
def elastic_engine(model: CausalLM, **more: Any) -> Iterator[tuple[Engine, MemoryTrade]]:
    trade = model.memory_trade
    assert trade is not None
    lane = {"num_blocks": trade.layout.num_blocks, "context": model.spec.max_positions, **more}
    tokenizer = load_tokenizer(tiny_checkpoint("qwen3_moe"))
    try:
        yield Engine(model, tokenizer, [LaneConfig(name="m", **lane)]), trade
    finally:
        model.close()


@cache
def answers(backend: str) -> list[list[int]]:
    """With all experts resident and KV of its own."""
    return run(model_at(tiny_checkpoint("qwen3_moe"), backend), tiny_checkpoint("qwen3_moe"),
               PROMPTS).tokens  # fmt: skip


def serve(engine: Engine, numbers: Sequence[int], seen: Callable[[], None]) -> list[list[int]]:
    outcome = Outcome([[] for _ in PROMPTS], [0] * len(PROMPTS))
    for number in numbers:
        assignment = replace(_assignment(number, PROMPTS[number], GREEDY), session="")
        assert isinstance(engine.add(assignment), Admitted)
    while engine.has_work():
        _collect(engine, outcome)
        engine.check()
        seen()
    return [outcome.tokens[number] for number in numbers]


MORE = ("adaptive", "active_only", "chunked", "static_pin", "hot_cached_static", "layer_grouped:2")


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        ("lru", "cpu"),
        *[pytest.param(text, "reference", marks=pytest.mark.full) for text in ("lru", *MORE)],
    ],
)
def test_answers_are_the_same_while_memory_changes_hands(
    strategy: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_blocks, "PATIENCE", 16)
    want, cached = answers(backend), strategy == "adaptive"
    model = loaded(replace(SETTINGS, strategy=strategy), backend)
    with elastic_engine(model, prefix_cache=cached) as (engine, trade):
        experts: Any = engine._experts
        runtime: Any = experts._runtime
        most = 0

        def seen() -> None:
            nonlocal most
            most = max(most, len(trade.lent))
            trade.check()
            runtime.parts.device.check()

        # many contexts grow, then one of them is alone: experts have slots again
        assert serve(engine, range(len(PROMPTS)), seen) == want
        assert most == len(trade.lent) == trade.layout.num_slabs
        assert runtime.parts.slots.num_slots == trade.layout.first_slot
        assert serve(engine, [0], seen) == [want[0]]
        assert trade.returned >= 1 and runtime.parts.slots.num_slots > trade.layout.first_slot
        told = report_stats(runtime.report())
        assert told["moe_slabs_taken"] == trade.taken >= trade.layout.num_slabs
        assert told["moe_kv_slabs"] + told["moe_expert_slabs"] == trade.layout.num_slabs
        assert {"moe_kv_slabs", "moe_expert_slabs", "moe_slabs_taken", "moe_slabs_returned"} <= set(
            MOE_SERIES
        )
        # and it can grow again
        assert serve(engine, range(len(PROMPTS)), seen) == want


def test_one_context_may_be_longer_than_kvs_own_part() -> None:
    with elastic_engine(loaded(SETTINGS)) as (engine, trade):
        own = trade.layout.kv.own * trade.layout.kv.block_size
        assert own < len(PROMPTS[-1])
        assert serve(engine, [3], lambda: None) == [answers("reference")[3]]
        assert trade.taken > 0
        longer = tuple(range(3, 3 + trade.layout.num_blocks * trade.layout.kv.block_size))
        refused = engine.add(replace(_assignment(0, longer, GREEDY), session=""))
        assert isinstance(refused, Rejected)


class CountedSlots:
    """Experts of which only the slots are there."""

    def __init__(self, slots: SlotMap) -> None:
        self.slots = slots

    def withdraw(self, slots: Sequence[int]) -> None:
        self.slots.withdraw(slots)

    def restore(self, slots: Sequence[int]) -> None:
        self.slots.restore(slots)

    def worth(self) -> Callable[[Key], float]:
        return lambda key: 1.0 / (1 + self.slots.age(key))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 6 else pytest.mark.full) for seed in range(30)]
)
def test_no_byte_belongs_to_two_and_all_lie_in_the_budget(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random sizes, blocks that come and go, experts that are placed and evicted."""
    monkeypatch.setattr(lent_blocks, "PATIENCE", 3)
    monkeypatch.setattr(lent_blocks, "_SORTED_EVERY", 1)
    rng = random.Random(seed)
    kv = KvBlocks(16 * rng.randint(1, 30), 2 * rng.randint(1, 6), 16, rng.randint(1, 5))
    slot_bytes = 16 * rng.randint(1, 400)
    count = rng.randint(8, 40) + 4 * kv.block_bytes // slot_bytes
    layout = plan_slabs(kv, slot_bytes, count, rng.randint(0, 3), least=rng.randint(0, 3))
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    assert layout.nbytes <= layout.before + kv.nbytes + kv.cell_bytes
    slots = SlotMap(count)
    trade = MemoryTrade(layout, memory, slots, CountedSlots(slots))
    lane = LaneConfig("m", context=16, num_blocks=layout.num_blocks)
    space = KVSpace(lane, trade=trade)
    cells, held, keys = layout.first_cells(), [], 0
    for _ in range(300):
        if rng.random() < 0.5 and space.cache.num_available:
            held += space.cache.take_all(rng.randint(1, min(4, space.cache.num_available)))
        for _ in range(min(len(held), rng.choice((0, 0, 1, 8)))):
            space.cache.release(held.pop(rng.randrange(len(held))))
        if rng.random() < 0.7:
            if not slots.free():
                slots.evict(next(iter(slots.by_age())))
            keys += 1
            slots.place((0, keys))
        space.ended_step()
        trade.check()
        space.cache.check([held])
        taken = torch.zeros(layout.nbytes, dtype=torch.int8)
        for block in held:
            begin = int(cells[block]) * kv.cell_bytes
            assert begin + kv.block_bytes <= layout.nbytes
            taken[begin : begin + kv.block_bytes] += 1
        for key in list(slots.keys()):
            at = slots.slot_of(key)
            assert at is not None
            taken[at * slot_bytes : (at + 1) * slot_bytes] += 1
        assert int(taken.max()) <= 1
        assert slots.num_slots >= layout.first_slot
    assert trade.taken > 0


def test_slabs_go_back_only_when_they_are_not_needed() -> None:
    kv = KvBlocks(64, 4, 16, 4)
    layout = plan_slabs(kv, 512, 20, 0, 0)
    assert (layout.slab_slots, layout.slab_blocks, layout.num_slabs) == (1, 2, 15)
    slots = SlotMap(20)
    trade = MemoryTrade(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), slots,
                        CountedSlots(slots))  # fmt: skip
    for number in range(20):
        slots.place((0, number))
    slots.use([(0, 12), (0, 19)])
    space = KVSpace(LaneConfig("m", context=16, num_blocks=layout.num_blocks), trade=trade)
    blocks = space.cache.take_all(10)
    # three slabs, those whose experts were not used for longest
    assert len(trade.lent) == 3 and slots.num_slots == 17
    assert {(0, 12), (0, 19)} <= set(slots.keys())
    space.cache.release_all(blocks[2:])
    for _ in range(PATIENCE - 1):
        space.ended_step()
    assert trade.returned == 0
    space.ended_step()
    assert trade.returned == 3 and not trade.lent
    # what is in use, and a slab beside it, stay
    blocks = space.cache.take_all(8)
    space.cache.release_all(blocks[:2])
    for _ in range(10 * PATIENCE):
        space.ended_step()
    assert len(trade.lent) == 3 and slots.num_slots == 17


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (replace(SETTINGS, host_budget="100%"), "slots refer to experts in RAM"),
        (replace(SETTINGS, cache_capacity=24, host_budget="0"), "every expert has a slot"),
        (
            replace(SETTINGS, strategy="cpu_only", host_budget="100%"),
            "no device slots.*device_budget",
        ),
        (replace(SETTINGS, cache_capacity=1), "too few to share"),
    ],
)
def test_where_there_is_nothing_to_share_it_is_refused(settings: MoeSettings, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        loaded(settings)
    assert raised.value.param == "elastic_memory"


def test_one_lane_with_all_blocks_is_needed() -> None:
    model = loaded(SETTINGS)
    assert model.memory_trade is not None
    tokenizer = load_tokenizer(tiny_checkpoint("qwen3_moe"))
    blocks = model.memory_trade.layout.num_blocks
    lanes = [LaneConfig(name=name, num_blocks=blocks, context=64) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="one specialist"):
        Engine(model, tokenizer, lanes)
    with pytest.raises(ConfigError, match="divides"):
        Engine(model, tokenizer, [replace(lanes[0], num_blocks=blocks + 1)])
    model.close()


@pytest.mark.full
def test_a_load_that_ends_just_now_is_not_taken_for_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has told its end, and releases its entry in RAM a moment later."""
    released = HostTier.release

    def late(self: HostTier, *entries: Any) -> None:
        time.sleep(0.02)
        released(self, *entries)

    monkeypatch.setattr(HostTier, "release", late)
    model = loaded(replace(SETTINGS, strategy="chunked"))
    with elastic_engine(model) as (engine, _):
        runtime: Any = engine._experts._runtime  # type: ignore[union-attr]
        assert serve(engine, [0], runtime.check) == [answers("reference")[0]]
