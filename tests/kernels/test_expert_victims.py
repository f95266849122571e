"""Victims chosen inside a step, in Triton's interpreter: slots, table and bytes are those of the
strategies' own decisions on a SlotMap, and of the plain twin, on fresh random choices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(600)

# strategy/slots/rows/steps
CASES = ["lru/3/2/4", "active_only/10/2/4"]
MORE = [f"{name}/{slots}/{rows}/12" for name in ("lru", "active_only")
        for slots in (1, 2, 5, 9, 13, 17) for rows in (1, 3)]  # fmt: skip
LAYERS, EXPERTS, TOP_K, SLOT_UNITS, RECORD_BYTES = 3, 6, 2, 8, 100


def test_the_device_decides_as_the_strategy() -> None:
    found = interpreted(__file__, CASES)
    assert not [case for case in CASES if found[case]]


@pytest.mark.full
def test_every_size() -> None:
    found = interpreted(__file__, MORE)
    assert not [case for case in MORE if found[case]]


def measure(cases: list[str]) -> dict[str, float]:
    """Differences of all kinds."""
    return {case: float(Run(*case.split("/")).differences()) for case in cases}


class Run:
    """Random steps of a small model, on three sides."""

    def __init__(self, name: str, slots: str, rows: str, steps: str) -> None:
        from coterie.moe.dispatch.base import StrategyContext
        from coterie.moe.dispatch.table import STRATEGIES
        from coterie.moe.runtime.slot_map import SlotMap
        from coterie.moe.runtime.victims import StepVictims
        from coterie.moe.store.base import ExpertGeometry
        from tests.helpers.moe.slot_simulator import COSTS

        self.rows, self.steps, self.draw = int(rows), int(steps), random.Random()
        # layer numbers are not their rows
        self.geometry = ExpertGeometry((1, 2, 5), EXPERTS, TOP_K)
        self.slots = SlotMap(int(slots))
        context = StrategyContext(self.geometry, self.slots, None, COSTS, in_place_bytes=3_000_000)
        self.strategy = STRATEGIES[name](context)
        total, count = LAYERS * EXPERTS, int(slots)
        self.arena = torch.zeros((count + total) * SLOT_UNITS * 16, dtype=torch.uint8)
        bank = (count + torch.arange(total)) * SLOT_UNITS
        self.records = torch.randint(0, 256, (total, RECORD_BYTES), dtype=torch.uint8)
        for number, record in enumerate(self.records):
            begin = int(bank[number]) * 16
            self.arena[begin : begin + RECORD_BYTES] = record
        places, tiers = bank.clone(), torch.ones(total, dtype=torch.int8)
        self.victims = StepVictims(self.strategy, places, tiers, bank, SLOT_UNITS, RECORD_BYTES)
        # an earlier time has filled some slots
        for key in self.geometry.keys()[2 : 2 + self.draw.randrange(count + 1)]:
            if self.slots.free():
                slot = self.slots.place(key)
                number = self.number(key)
                begin = slot * SLOT_UNITS * 16
                self.arena[begin : begin + RECORD_BYTES] = self.records[number]
                places[number], tiers[number] = slot * SLOT_UNITS, 0
        self.victims.send()

    def number(self, key: tuple[int, int]) -> int:
        return self.geometry.layers.index(key[0]) * EXPERTS + key[1]

    def differences(self) -> int:
        return sum(self.step() for _ in range(self.steps))

    def step(self) -> int:
        import copy
        from dataclasses import fields, replace

        import numpy as np

        from coterie.kernels.triton import expert_victims as kernels

        state, wrong = self.victims.state, 0
        live = self.draw.randrange(1, self.rows + 1)
        state.counts[kernels.LIVE] = live
        rows = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
        for row in range(LAYERS):
            drawn = [torch.randperm(EXPERTS)[:TOP_K] for _ in range(self.rows)]
            ids = torch.stack(drawn).int()
            np.add.at(rows[row], ids[:live].flatten().numpy(), 1)
            tensors = {f.name: getattr(state, f.name) for f in fields(state)}
            twin = replace(state, **{name: copy.deepcopy(it) for name, it in tensors.items()
                                     if isinstance(it, torch.Tensor)})  # fmt: skip
            want = kernels.place_torch(twin, ids, row)
            chosen = torch.full((self.rows, TOP_K + 1), -7, dtype=torch.int64)
            kernels.place(state, ids, chosen, row)
            kernels.fetch(state, self.arena, ids.numel())
            count = int(state.counts[kernels.COPIES])
            got = [tuple(pair) for pair in state.copies[:count].tolist()]
            wrong += got != want
            for name in ("places", "tiers", "keys", "stamps", "clock"):
                wrong += not torch.equal(getattr(state, name), getattr(twin, name))
            wrong += int(state.counts[kernels.FREE]) != int(twin.counts[kernels.FREE])
            if state.by_layer:
                wrong += not torch.equal(state.sizes, twin.sizes)
            # every pair reads its expert's own bytes, padded ones too
            for at, expert in np.ndenumerate(ids.numpy()):
                begin = int(chosen[at]) * 16
                own = self.arena[begin : begin + RECORD_BYTES]
                wrong += not torch.equal(own, self.records[row * EXPERTS + int(expert)])
            wrong += int((chosen[:, TOP_K] != -7).sum())
        self.victims.follow(rows)
        return wrong + self.disagreements()

    def disagreements(self) -> int:
        """Between the device's slots and the host's, behind a step."""
        state, wrong = self.victims.state, 0
        for slot, number in enumerate(state.keys.tolist()):
            key: Any = self.slots.key_at(slot)
            wrong += (-1 if key is None else self.number(key)) != number
        in_order = [self.number(key) for key in self.slots.by_age()]
        both = zip(state.stamps.tolist(), state.keys.tolist(), strict=True)
        used = [key for _, key in sorted(both) if key >= 0]
        return wrong + (used != in_order)


@pytest.mark.parametrize("buffers", [0, 64])
def test_compiles_for_hopper_without_spills(buffers: int, tmp_path: Any) -> None:
    from coterie.kernels.triton import expert_victims as kernels
    from tests.helpers.kernels.hopper import compiled, usage

    words = ("ids", "keys", "free", "counts", "buffers", "shares", "sizes", "copies", "marks")
    types = dict.fromkeys(words, "*i32") | {"tiers": "*i8", "row": "i32", "slots": "i32"}
    sizes = {
        "SLOT_UNITS": 165_888, "COUNT": 8, "TOP_K": 8, "STRIDE": 8, "PAIRS": 64, "EXPERTS": 128,
        "WIDE": 128, "PADDED": 4096, "BUFFERS": buffers, "NUM_BUFFERS": 48 if buffers else 0,
    }  # fmt: skip
    built = compiled(kernels._place, types, sizes, 8, other="*i64")
    assert usage(built.asm["cubin"], tmp_path)[1] == 0
    if not buffers:
        types = {"arena": "*i32", "copies": "*i32", "counts": "*i32"}
        sizes = {"SLOT_UNITS": 165_888, "WORDS": 663_552, "TILE": 4096, "TILES": 6}
        built = compiled(kernels._fetch, types, sizes, 8, other="*i64")
        assert "ld.global.v4" in built.asm["ptx"] and "st.global.v4" in built.asm["ptx"]
