"""Replay: deterministic, complete, and it tells the strategies apart."""

from __future__ import annotations

import pytest

from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.planner.simulate import ReplayCounts, ReplaySetup, replay
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry
from tests.helpers.moe.routing_traces import make

GEOMETRY = ExpertGeometry((0, 2, 3, 5), 8, 2)
SLOTS = 12


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make("skewed", GEOMETRY, 80, prompts=20)


@pytest.mark.parametrize("text", [*STRATEGIES, "layer_grouped:4+lru"])
def test_the_same_twice_and_nothing_lost(trace: Trace, text: str) -> None:
    stage = ReplaySetup(SLOTS, heatmap=trace.heatmap())
    once, again = replay(text, trace, stage), replay(text, trace, stage)
    assert once == again
    asked = sum(len(v.demand.experts) for step in trace.steps for _, v in step.visits())
    assert once.total.demands == asked
    for parts in (once.phases, once.layers):
        assert sum(counts.demands for counts in parts.values()) == asked
        assert sum(counts.moves for counts in parts.values()) == once.total.moves
    assert once.steps == {"prefill": 4, "decode": 80}
    assert once.moved_bytes(10) == 10 * once.moves


def test_each_name_moves_what_it_says(trace: Trace) -> None:
    heat = trace.heatmap()
    got = {text: replay(text, trace, ReplaySetup(SLOTS, heatmap=heat)) for text in STRATEGIES}
    assert got["cpu_only"].moves == got["cpu_only"].start_moves == 0
    static = got["hot_cached_static"]
    assert static.moves == static.update_moves and static.start_moves == SLOTS
    # every layer of every chunk: 80 tokens and 4 prompts of two chunks
    assert got["chunked"].moves == GEOMETRY.total * (80 + 8)
    assert got["active_only"].moves == got["active_only"].total.misses
    assert got["static_pin"].total != got["weighted_pin"].total
    assert got["persistent"] == got["layer_grouped"]
    assert len({str(result) for result in got.values()}) == len(got) - 1
    whole = replay("persistent", trace, ReplaySetup(GEOMETRY.total))
    assert whole.moves == 0 and whole.total.hit_rate == 1.0


def test_loads_before_the_demand_are_counted_apart(trace: Trace) -> None:
    result = replay("layer_grouped:2", trace, ReplaySetup(16))
    prefill = result.phases["prefill"]
    assert prefill.misses == 0 and prefill.prefetch_hits > 0
    # the second chunk finds what the first one used
    assert prefill.hits > 0
    assert result.group_moves <= GEOMETRY.total * 4


@pytest.mark.parametrize("predict", ["protect", "prefetch"])
def test_a_perfect_prediction_helps(predict: str) -> None:
    guessed = Trace(GEOMETRY)
    for step in make("uniform", GEOMETRY, 80).steps:
        for _, visit in step.visits():
            guessed.hint(visit.demand.layer, visit.demand.experts)
            guessed.record(visit.demand)
        guessed.end_step()
    without = replay("adaptive", guessed, ReplaySetup(24, host_can_run=False))
    helped = replay("adaptive", guessed, ReplaySetup(24, host_can_run=False, predict=predict))
    met = helped.total.hits + helped.total.prefetch_hits
    assert met > without.total.hits
    assert (helped.prefetch_moves > 0) == (predict == "prefetch")
    assert helped.total.prefetch_hits <= helped.prefetch_moves + helped.update_moves


def test_an_empty_trace_is_no_error() -> None:
    assert replay("adaptive", Trace(GEOMETRY), ReplaySetup(4)).total == ReplayCounts()
    assert ReplayCounts().hit_rate == 0.0
