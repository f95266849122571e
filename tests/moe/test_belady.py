"""Belady's bound: the best of all choices on small cases, above every strategy on large ones."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest

from coterie.moe.dispatch.base import Demand
from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.planner.simulate import ReplaySetup, belady, replay
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry, Key
from tests.helpers.moe.routing_traces import TASTES, make


def by_search(sets: list[frozenset[Key]], slots: int) -> int:
    """All ways to keep at most `slots` experts, tried out."""

    @cache
    def most(index: int, held: frozenset[Key]) -> int:
        if index == len(sets):
            return 0
        pool = sorted(held | sets[index])
        keep = combinations(pool, min(slots, len(pool)))
        return len(held & sets[index]) + max(most(index + 1, frozenset(kept)) for kept in keep)

    every = sorted(frozenset().union(*sets))
    starts = combinations(every, min(slots, len(every)))
    return max(most(0, frozenset(start)) for start in starts)


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    trace = Trace(ExpertGeometry((0, 1), 3, 2))
    sets = []
    for _ in range(4):
        for layer in (0, 1):
            experts = tuple(sorted(rng.sample(range(3), rng.randint(1, 2))))
            trace.record(Demand(layer, "decode", experts, (1,) * len(experts)))
            sets.append(frozenset((layer, expert) for expert in experts))
        trace.end_step()
    for slots in (0, 1, 2, 4):
        assert belady(trace, slots).hits == by_search(sets, slots)


@pytest.mark.parametrize("kind", TASTES)
def test_no_strategy_beats_it(kind: str) -> None:
    geometry = ExpertGeometry((0, 1, 2, 3), 8, 2)
    trace = make(kind, geometry, 40, prompts=20)
    for slots in (1, 5, 16, 30):
        bound = belady(trace, slots)
        for text in STRATEGIES:
            for heat in (None, trace.heatmap()):
                result = replay(text, trace, ReplaySetup(slots, heatmap=heat))
                assert result.total.hits <= bound.hits, f"{text} at {slots}"
                assert result.total.demands == bound.demands
    assert belady(trace, geometry.total).misses == 0
