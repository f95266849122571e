"""adaptive behind steps that read misses in place: what it moves, and what that saves."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.moe.bank_replay import Choices, belady_rate, replay_bank
from benchmarks.moe.carved_trace import CarvedTrace
from benchmarks.moe.gpu_skewed import CARVED
from coterie.moe.dispatch.adaptive.in_place import InPlacePlacement, exchange
from coterie.moe.dispatch.base import StrategyContext
from coterie.moe.dispatch.hot_cached_static import spread_evenly
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry
from tests.helpers.moe.slot_simulator import COSTS

GEOMETRY = ExpertGeometry(tuple(range(1, 9)), 64, 4)
SHARE = GEOMETRY.total // 4


def one_by_one(values: list[float], members: set[int], wanted: set[int], fixed: set[int],
               margin: float, free: int, most: int) -> tuple[list[int], list[int]]:  # fmt: skip
    """The twin of `exchange`: the highest first, each against the lowest that is left."""
    coming, going = [], []
    left = sorted(members - fixed, key=lambda one: (values[one], one))
    for one in sorted(wanted, key=lambda one: (-values[one], one))[:most]:
        if free > 0:
            if values[one] <= 0:
                break
            free -= 1
        elif left and values[one] > values[left[0]] + margin:
            going.append(left.pop(0))
        else:
            break
        coming.append(one)
    return coming, going


@pytest.mark.parametrize("seed", range(30))
def test_an_exchange_is_what_one_after_another_would_be(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 60))
    # values differ, as ties may go either way
    values = draw.permutation(count).astype(float) + draw.random(count)
    members = draw.random(count) < 0.4
    wanted = ~members & (draw.random(count) < 0.6)
    movable = members & (draw.random(count) < 0.8)
    margin, free = float(draw.random() * 5), int(draw.integers(0, 4))
    most = int(draw.integers(0, 20))
    coming, going = exchange(values, members, wanted, movable, margin, free, most)
    first, second, fixed = (
        set(np.flatnonzero(mask).tolist()) for mask in (members, wanted, members & ~movable)
    )
    want = one_by_one(values.tolist(), first, second, fixed, margin, free, most)
    assert (coming.tolist(), going.tolist()) == want


def played(skew: float, steps: int, change: int = 0) -> tuple[float, float, float]:
    """Over the second half of the steps: the share of hits, that of the best fixed choice, and
    uploads for each demand."""
    draw, slots = np.random.default_rng(1), SlotMap(SHARE)
    for key in spread_evenly(GEOMETRY, SHARE):
        slots.place(key)
    placement = InPlacePlacement(StrategyContext(GEOMETRY, slots, None, COSTS, in_place=True))
    shape = (len(GEOMETRY.layers), GEOMETRY.num_experts)
    hits = asked = moved = 0
    counts = np.zeros(shape, dtype=np.int64)
    for number in range(steps):
        if number == 0 or (change and number % change == 0):
            order = np.stack([draw.permutation(shape[1]) for _ in range(shape[0])])
        drawn = draw.gumbel(size=shape) - skew * np.log1p(order)
        rows = np.zeros(shape, dtype=np.int64)
        np.put_along_axis(rows, np.argsort(-drawn, axis=1)[:, : GEOMETRY.top_k], 1, axis=1)
        here = sum((GEOMETRY.layers[at], e) in slots for at, e in np.argwhere(rows).tolist())
        loads = placement.step(rows, "decode")
        assert len(slots.keys()) == SHARE
        assert all(slots.slot_of(key) == slot for key, slot in loads)
        if number >= steps // 2:
            hits, asked, moved = hits + here, asked + int(rows.sum()), moved + len(loads)
            counts += rows
    best = np.sort(counts.reshape(-1))[-SHARE:].sum() / asked
    return hits / asked, float(best), moved / asked


def test_nothing_moves_where_all_are_used_equally_often() -> None:
    hits, _, moved = played(0.0, 160)
    assert hits == pytest.approx(0.25, abs=0.03) and moved < 0.01


def test_what_is_used_most_is_found_and_kept() -> None:
    hits, best, moved = played(1.0, 240)
    assert hits > 0.94 * best and moved < 0.03


def test_a_change_is_followed() -> None:
    hits, _, moved = played(1.5, 240, change=60)
    assert hits > 0.55 and moved < 0.2


def test_pins_of_another_strategy_stay() -> None:
    slots = SlotMap(SHARE)
    keys = spread_evenly(GEOMETRY, SHARE)
    for key in keys:
        slots.place(key)
    for key in keys[:50]:
        slots.pin(key)
    placement = InPlacePlacement(StrategyContext(GEOMETRY, slots, None, COSTS, in_place=True))
    rows = np.zeros((8, 64), dtype=np.int64)
    rows[:, 40:] = 9
    moved = [key for _ in range(8) for key, _ in placement.step(rows, "prefill")]
    assert len(moved) == SHARE - 50 and all(key in slots for key in keys[:50])


# seconds, measured on an H200 with int4 experts: a miss by link and CPU, a copy by the link alone,
# and the rest of a step of six layers
MISS_S, COPY_S, REST_S = 2.65e6 / 116e9, 2.65e6 / 54e9, 1.3e-3


def zipf_choices(layers: int, steps: int, seed: int) -> Choices:
    """Top-8 of 128 experts by Zipf's law; every layer has its own order."""
    order = np.stack([np.random.default_rng([5, at]).permutation(128) for at in range(layers)])
    drawn = np.random.default_rng(seed).gumbel(size=(steps, layers, 128)) - np.log1p(order)
    return np.argsort(-drawn, axis=2)[..., :8]


@pytest.mark.parametrize("routing", ["zipf", "carved"])
@pytest.mark.parametrize("share", [10, 25, 50])
def test_within_3_percent_of_the_best_on_skewed_routing(routing: str, share: int) -> None:
    geometry = ExpertGeometry(tuple(range(6)), 128, 8)
    slots, warm, steps = geometry.total * share // 100, 96, 320
    carved = CarvedTrace.load(CARVED).with_layers(6)
    chosen: Choices = carved.chosen[:steps].astype(np.int64)
    counts = carved.counts.astype(np.float64)
    if routing == "zipf":
        chosen, known = zipf_choices(6, steps, 1), zipf_choices(6, steps, 2)
        counts = np.stack([np.bincount(known[:, at].ravel(), minlength=128) for at in range(6)])
    found, hits = {}, {}
    for text in ("adaptive", "hot_cached_static", "static_pin", "lru", "active_only"):
        heat = Heatmap(geometry, counts.astype(np.float64))
        count = replay_bank(text, geometry, chosen, slots, warm, heat)
        assert count.hits + count.misses == 6 * 8 * (steps - warm)
        found[text], hits[text] = 1 / count.step_s(REST_S, MISS_S, COPY_S), count.hit_rate
    assert found["adaptive"] >= 0.97 * max(found.values())
    assert max(hits.values()) <= belady_rate(geometry, chosen, slots, warm)
