"""Every strategy at every capacity: nobody is left out, and each name moves what it says."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import ConfigError
from coterie.moe.dispatch.base import StrategyContext
from coterie.moe.dispatch.pins import spare_slots
from coterie.moe.dispatch.repin import (
    MAX_BUDGET,
    MAX_INTERVAL,
    MIN_BUDGET,
    MIN_INTERVAL,
    UpdateTimer,
    choose_schedule,
    longest_interval,
)
from coterie.moe.dispatch.table import (
    STRATEGIES,
    StrategyChoice,
    build_strategies,
    parse_strategy,
    resolve_strategy,
)
from coterie.moe.dispatch.weighted_pin import pin_budgets
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.store.base import ExpertGeometry
from tests.helpers.moe.slot_simulator import COSTS, Simulator

# layer 3 is dense, one expert was pruned
GEOMETRY = ExpertGeometry((1, 2, 4, 5), 6, 2, frozenset({(2, 5)}))
NAMES = [
    *STRATEGIES,
    "layer_grouped:4",
    "layer_grouped:3+lru",
    "lru+active_only",
    "hot_cached_static+lru",
    "hot_cached_static+chunked",
    "hot_cached_static+static_pin",
    "static_pin+weighted_pin",
    "layer_grouped+adaptive",
    "adaptive+hot_cached_static",
]


def heatmap(seed: int = 0) -> Heatmap:
    counts = np.random.default_rng(seed).random((4, 6)) ** 3 * 100
    counts[1, 5] = 0
    return Heatmap(GEOMETRY, counts)


def draw(rng: random.Random, most: int) -> dict[int, list[int]]:
    return {
        layer: rng.sample(GEOMETRY.present(layer), rng.randint(1, min(most, 5)))
        for layer in GEOMETRY.layers
    }


@pytest.mark.parametrize("text", NAMES)
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, GEOMETRY.total),
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_expert_runs_once_from_a_slot_that_holds_it(
    text: str, slots: int, seed: int, warm: bool, host: bool, deterministic: bool
) -> None:
    rng = random.Random(seed)
    options = {"host_can_run": host, "deterministic": deterministic}
    stage = Simulator(GEOMETRY, text, slots, heatmap() if warm else None, options)
    for number in range(25):
        if number % 6 == 0:
            stage.step("prefill", *(draw(rng, 6) for _ in range(1 + number % 4)))
        else:
            stage.step("decode", draw(rng, 2))


@pytest.mark.parametrize("text", NAMES)
def test_one_slot_always_works(text: str) -> None:
    stage = Simulator(GEOMETRY, text, 1)
    everything = {layer: GEOMETRY.present(layer) for layer in GEOMETRY.layers}
    stage.step("prefill", everything, everything)
    stage.step("decode", everything)


def test_an_expert_that_never_arrived_is_loaded_again() -> None:
    for text in STRATEGIES:
        stage = Simulator(GEOMETRY, text, GEOMETRY.total, heatmap())
        stage.step("decode", dict.fromkeys(GEOMETRY.layers, (0, 1)))
        stage.slots.forget((1, 0))
        stage.step("decode", dict.fromkeys(GEOMETRY.layers, (0, 1)))


def traffic(text: str, slots: int, warm: bool = True, **options: bool) -> Simulator:
    stage = Simulator(GEOMETRY, text, slots, heatmap() if warm else None, options)
    rng = random.Random(3)
    for number in range(30):
        phase = "prefill" if number % 10 == 0 else "decode"
        stage.step(phase, draw(rng, 5 if number % 10 == 0 else 2))
    return stage


def test_cpu_only_moves_nothing() -> None:
    stage = traffic("cpu_only", 8)
    assert stage.moved == stage.started == [] and stage.hosted


def test_persistent_moves_nothing_after_the_start() -> None:
    stage = traffic("persistent", GEOMETRY.total)
    assert sorted(stage.started) == GEOMETRY.keys()
    assert stage.moved == stage.hosted == []


@pytest.mark.parametrize("warm", [True, False])
def test_hot_cached_static_fixed_moves_nothing_after_the_start(warm: bool) -> None:
    stage = traffic("hot_cached_static", 7, warm, deterministic=True)
    assert stage.moved == [] and stage.hosted
    assert len(stage.started) == 7
    if warm:
        assert set(stage.started) == set(heatmap().hottest(7))
    else:
        assert {layer for layer, _ in stage.started} == set(GEOMETRY.layers)


@pytest.mark.parametrize("slots", [1, 4, 23])
def test_chunked_moves_every_expert_of_the_layer_each_time(slots: int) -> None:
    stage = Simulator(GEOMETRY, "chunked", slots)
    asked = dict.fromkeys(GEOMETRY.layers, (0, 3))
    for phase in ("decode", "prefill", "decode"):
        stage.moved.clear()
        stage.step(phase, asked)
        assert sorted(stage.moved) == GEOMETRY.keys()


def test_active_only_moves_unique_misses_only() -> None:
    stage = Simulator(GEOMETRY, "active_only", GEOMETRY.total)
    asked = dict.fromkeys(GEOMETRY.layers, (0, 3))
    stage.step("prefill", asked, asked)
    assert sorted(stage.moved) == [(layer, e) for layer in GEOMETRY.layers for e in (0, 3)]
    stage.step("decode", asked)
    assert len(stage.moved) == 8


def test_active_only_keeps_each_layer_its_share() -> None:
    stage = Simulator(GEOMETRY, "active_only", 8)
    for expert in range(5):
        stage.step("decode", {1: (expert,), 2: (0,), 4: (0,), 5: (0,)})
    # layer 1 has two slots and went through five experts; nobody else lost anything
    assert set(stage.slots.layer_by_age(1)) == {(1, 3), (1, 4)}
    assert stage.moved.count((2, 0)) == 1


def test_lru_lets_one_layer_use_the_slots_of_another() -> None:
    stage = Simulator(GEOMETRY, "lru", 6)
    stage.step("decode", {1: (0, 1, 2, 3), 2: (0,), 4: (0,), 5: (0,)})
    assert set(stage.slots.keys()) == {(1, 1), (1, 2), (1, 3), (2, 0), (4, 0), (5, 0)}


@pytest.mark.parametrize("groups", [2, 4])
def test_layer_grouped_loads_the_same_for_any_length(groups: int) -> None:
    asked = dict.fromkeys(GEOMETRY.layers, (0, 3))
    totals = []
    for chunks in (1, 7):
        stage = Simulator(GEOMETRY, f"layer_grouped:{groups}", 12)
        stage.step("prefill", *[asked] * chunks)
        totals.append(len(stage.moved))
    assert totals == [GEOMETRY.total] * 2


@pytest.mark.parametrize("text", ["static_pin", "weighted_pin"])
def test_pins_follow_the_heatmap_and_stay(text: str) -> None:
    stage = Simulator(GEOMETRY, text, 12, heatmap())
    pins = stage.slots.pinned()
    assert len(pins) == 12 - spare_slots(GEOMETRY, 12)
    assert pins == set(stage.started)
    if text == "static_pin":
        assert pins == set(heatmap().hottest(len(pins)))
    cold = {layer: heatmap().hottest_of(layer)[-1:] for layer in GEOMETRY.layers}
    for _ in range(3):
        stage.step("decode", cold)
    assert pins == stage.slots.pinned()


@pytest.mark.parametrize("text", ["static_pin", "weighted_pin"])
def test_without_a_heatmap_pins_come_from_what_was_seen(text: str) -> None:
    stage = Simulator(GEOMETRY, text, 12)
    hot = dict.fromkeys(GEOMETRY.layers, (2, 4))
    assert not stage.slots.pinned()
    for _ in range(40):
        stage.step("decode", hot)
    wanted = {(layer, e) for layer in GEOMETRY.layers for e in (2, 4)}
    assert wanted <= stage.slots.pinned()
    # another workload: pins move over, a few at a time
    for _ in range(300):
        stage.step("decode", dict.fromkeys(GEOMETRY.layers, (0, 1)))
    assert (1, 0) in stage.slots.pinned()
    assert len(stage.slots.pinned()) <= 12 - spare_slots(GEOMETRY, 12)


def test_weighted_pin_gives_more_to_skewed_layers() -> None:
    counts = np.ones((4, 6)) * 100
    counts[0] = [90, 60, 3, 2, 1, 0]
    counts[1, 5] = 0
    heat = Heatmap(GEOMETRY, counts)
    budgets = pin_budgets(heat, 8)
    assert sum(budgets.values()) == 8 and budgets[1] > budgets[4]
    chosen = [
        Simulator(GEOMETRY, text, 12, heat).slots.pinned()
        for text in ("static_pin", "weighted_pin")
    ]
    assert chosen[0] != chosen[1]
    assert (1, 1) in chosen[1] and (1, 1) not in chosen[0]


def test_pin_budgets_use_up_every_slot() -> None:
    for limit in range(30):
        assert sum(pin_budgets(heatmap(), limit).values()) == min(limit, GEOMETRY.total)


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("lru", "lru", "lru"),
        ("layer_grouped:4", "layer_grouped:4", "active_only"),
        ("layer_grouped:4+lru", "layer_grouped:4", "lru"),
        ("--no-gpu-decode", "cpu_only", "cpu_only"),
        ("expert-divisor 0", "chunked", "chunked"),
        ("--expert-divisor=1", "persistent", "persistent"),
        ("--expert-divisor 5", "layer_grouped:5", "active_only"),
        ("--cache-strategy lru", "lru", "active_only"),
        ("cache-strategy static_pin", "static_pin", "static_pin"),
    ],
)
def test_names_and_krasis_spellings(text: str, prefill: str, decode: str) -> None:
    assert tuple(map(str, parse_strategy(text))) == (prefill, decode)


@pytest.mark.parametrize("text", ["lrv", "a+b+c", "lru:3", "layer_grouped:0", "", "auto+"])
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_strategy(text)
    assert error.value.param == "strategy"


def test_a_typo_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean weighted_pin"):
        parse_strategy("weigted_pin")


def test_names_are_file_names_and_headings() -> None:
    page = (Path(__file__).parents[2] / "docs/dispatch.md").read_text(encoding="utf-8")
    for name, strategy in STRATEGIES.items():
        assert f"\n### {name}\n" in page
        assert strategy.name == name
        folder = "coterie.moe.dispatch" + (".adaptive" if name == "adaptive" else "")
        assert strategy.__module__ == f"{folder}.{name}"


def test_one_object_serves_both_phases_of_one_name() -> None:
    context = StrategyContext(GEOMETRY, SlotMap(4), None, COSTS)
    prefill, decode = build_strategies("lru", context)
    assert prefill is decode
    assert parse_strategy("layer_grouped") == (
        StrategyChoice("layer_grouped", 2),
        StrategyChoice("active_only"),
    )


def test_persistent_falls_back_step_by_step() -> None:
    # whole; two groups; one group per layer; waves inside a layer
    expected = {
        23: "persistent",
        12: "layer_grouped:2",
        11: "layer_grouped:4",
        1: "layer_grouped:4",
    }
    for slots, text in expected.items():
        assert str(parse_strategy(resolve_strategy("persistent", GEOMETRY, slots))[0]) == text
    six = ExpertGeometry(tuple(range(6)), 4, 2)
    assert resolve_strategy("persistent", six, 8) == "layer_grouped:3+active_only"
    assert resolve_strategy("persistent", GEOMETRY, 12) == "layer_grouped:2+active_only"
    assert resolve_strategy("persistent+lru", GEOMETRY, 6) == "layer_grouped:4+lru"
    assert resolve_strategy("persistent", GEOMETRY, 23) == "persistent"


@given(st.floats(0, 1), st.floats(0, 1), st.integers(-9, 9))
def test_updates_follow_misses_and_streaks_within_bounds(low: float, high: float, s: int) -> None:
    low, high = sorted((low, high))
    calm, hot = choose_schedule(low, s), choose_schedule(high, s)
    for pace in (calm, hot, choose_schedule(high, s + 1)):
        assert MIN_INTERVAL <= pace.interval <= MAX_INTERVAL
        assert MIN_BUDGET <= pace.budget <= MAX_BUDGET
    assert hot.interval <= calm.interval and hot.budget >= calm.budget
    idle = choose_schedule(high, s + 1)
    assert idle.interval >= hot.interval and idle.budget <= hot.budget


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.44, 0.6, 1.0])
def test_updates_that_find_nothing_still_come_where_many_experts_miss(rate: float) -> None:
    """As often as docs/dispatch.md says, however long they have found nothing."""
    timer, gaps, last = UpdateTimer(), [], 0
    for token in range(1, 1000):
        timer.count(100, round(100 * rate))
        if timer.due():
            timer.done(0)
            gaps.append(token - last)
            last = token
    assert max(gaps) == gaps[-1] == round(longest_interval(rate))
    assert MIN_INTERVAL <= longest_interval(rate) <= MAX_INTERVAL


def test_an_update_comes_earlier_once_more_experts_miss() -> None:
    timer = UpdateTimer()
    for _ in range(1000):
        timer.count(100, 0)
        if timer.due():
            timer.done(0)
    assert timer.schedule.interval == MAX_INTERVAL
    timer.done(0)
    calm = 20
    for _ in range(calm):
        timer.count(100, 0)
        assert not timer.due()
    tokens = 1
    timer.count(100, 100)
    while not timer.due():
        timer.count(100, 100)
        tokens += 1
    assert tokens <= longest_interval(0.5)
