"""Keeps the slots with those who are asked for most, by live counts, a few swaps at a time.

For strategies that compute a miss on the host and move nothing while a layer waits. How often and
how much is `pace.py`'s choice; a newcomer must clearly lead whose place it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.base import Demand, StrategyContext
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import Key

# tokens that all of a heatmap counts for beside live ones
_PRIOR_TOKENS = 64
# what counts are worth after an update
_KEEP = 0.9
# a newcomer leads by this factor, and by this many uses
_LEAD, _LEAD_USES = 1.25, 2.0


class LiveRepin:
    """`limit` slots are its own to fill; `pin`: who is in is pinned."""

    def __init__(self, scene: StrategyContext, limit: int, *, pin: bool) -> None:
        self._scene, self._limit, self._pins = scene, limit, pin
        self._heat = Heatmap(scene.geometry, _prior(scene))
        self._mine: set[Key] = set()
        self._clock = UpdateTimer()
        self._demands = 0
        self._here, self._here_at = np.zeros(0, dtype=bool), -1

    @property
    def updates(self) -> int:
        return self._clock.rounds

    def own(self, key: Key) -> None:
        """`key` lies in one of these slots now."""
        self._mine.add(key)
        if self._pins:
            self._scene.slots.pin(key)

    def saw(self, demand: Demand) -> None:
        self._heat.add(demand.layer, demand.experts, demand.counts)
        slots, layer = self._scene.slots, demand.layer
        here = sum((layer, expert) in slots for expert in demand.experts)
        self._count(len(demand.experts), len(demand.experts) - here)

    def saw_step(self, rows: npt.NDArray[np.int64]) -> None:
        """Rows per layer and expert of a step that nobody was asked about."""
        self._heat.counts += rows
        asked = rows > 0
        self._count(int(asked.sum()), int((asked & ~self._lying()).sum()))

    def _lying(self) -> npt.NDArray[np.bool_]:
        """Who lies in a slot, [layers, experts]; looked up again when that has changed."""
        slots, geometry = self._scene.slots, self._scene.geometry
        if self._here_at != slots.changes:
            self._here_at = slots.changes
            self._here = np.zeros(self._heat.counts.shape, dtype=bool)
            index = {layer: at for at, layer in enumerate(geometry.layers)}
            for layer, expert in list(slots.keys()):
                self._here[index[layer], expert] = True
        return self._here

    def _count(self, demands: int, misses: int) -> None:
        self._demands += demands
        self._clock.saw(demands, misses)

    def update(self) -> tuple[tuple[Key, int], ...]:
        if not self._clock.due():
            return ()
        loads = self._swap(self._clock.pace.budget)
        self._clock.done(len(loads))
        if self._demands:
            self._heat.counts *= _KEEP
        self._demands = 0
        return loads

    def _swap(self, budget: int) -> tuple[tuple[Key, int], ...]:
        slots, heat = self._scene.slots, self._heat
        self._mine.intersection_update(slots.keys())
        chosen = heat.hottest(min(self._limit, len(self._mine) + slots.free()))
        rising = [key for key in chosen if key not in slots and heat.count(key) > 0][:budget]
        leaving = sorted(self._mine.difference(chosen), key=lambda key: (heat.count(key), key))
        loads = []
        for key in rising:
            if len(self._mine) >= self._limit or not slots.free():
                if not leaving or not _leads(heat.count(key), heat.count(leaving[0])):
                    break
                self._mine.discard(coldest := leaving.pop(0))
                if slots.is_pinned(coldest):
                    slots.unpin(coldest)
                slots.evict(coldest)
            loads.append((key, slots.place(key, early=True)))
            self.own(key)
        return tuple(loads)


def _leads(newcomer: float, member: float) -> bool:
    return newcomer > _LEAD * member + _LEAD_USES


def _prior(scene: StrategyContext) -> npt.NDArray[np.float64] | None:
    if scene.heatmap is None:
        return None
    counts = scene.heatmap.counts
    asked = _PRIOR_TOKENS * scene.geometry.top_k * len(scene.geometry.layers)
    return counts * min(1.0, asked / max(1.0, float(counts.sum())))


MIN_INTERVAL, MAX_INTERVAL = 4, 128
MIN_BUDGET, MAX_BUDGET = 2, 48


@dataclass(frozen=True, slots=True)
class UpdateSchedule:
    # tokens until the next update
    interval: int
    # swaps it may make
    budget: int


def choose_schedule(miss_rate: float, idle_streak: int) -> UpdateSchedule:
    """`miss_rate` since the last update; `idle_streak` updates in a row swapped nothing, or (when
    negative) that many swapped all they were allowed to."""
    heat = min(max(miss_rate, 0.0), 1.0)
    interval = 32.0 * (1.0 - heat) + MIN_INTERVAL
    budget = MAX_BUDGET * heat
    factor = 2.0 ** min(max(idle_streak, -3), 5)
    return UpdateSchedule(
        interval=round(min(max(interval * factor, MIN_INTERVAL), MAX_INTERVAL)),
        budget=round(min(max(budget / factor, MIN_BUDGET), MAX_BUDGET)),
    )


class UpdateTimer:
    """Counts tokens and demands between updates and asks `choose_schedule` for the next pace."""

    def __init__(self) -> None:
        self.pace = choose_schedule(1.0, 0)
        self._tokens = self._demands = self._misses = self._streak = 0
        # updates made
        self.rounds = 0

    def saw(self, demands: int, misses: int) -> None:
        self._demands += demands
        self._misses += misses

    def due(self) -> bool:
        """One token has passed: is it time?"""
        self._tokens += 1
        return self._tokens >= self.pace.interval

    def done(self, swaps: int) -> None:
        """An update was made, with so many swaps."""
        self.rounds += 1
        if swaps == 0:
            self._streak = max(self._streak, 0) + 1
        else:
            self._streak = min(self._streak, 0) - 1 if swaps >= self.pace.budget else 0
        rate = self._misses / self._demands if self._demands else 0.0
        self.pace = choose_schedule(rate, self._streak)
        self._tokens = self._demands = self._misses = 0
