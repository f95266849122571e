"""Keeps the most used experts in slots, by live counts, with a few swaps at a time.

For strategies that compute a miss on the host and move nothing during a layer. `choose_schedule`
decides how often and how much to swap; an expert must clearly lead the one that it replaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.base import Demand, StrategyContext
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import Key

# the whole heatmap counts as much as this many live tokens
_PRIOR_TOKENS = 64
# counts are multiplied by this after an update
_KEEP = 0.9
# an expert must lead the one that it replaces by this factor, and by this many uses
_LEAD, _LEAD_USES = 1.25, 2.0


class LiveRepin:
    """Fills `limit` slots; with `pin` it pins the experts in them."""

    def __init__(self, context: StrategyContext, limit: int, *, pin: bool) -> None:
        self._context, self._limit, self._pins = context, limit, pin
        self._heat = Heatmap(context.geometry, _prior(context))
        self._owned: set[Key] = set()
        self._timer = UpdateTimer()
        self._demands = 0
        self._here, self._here_at = np.zeros(0, dtype=bool), -1

    @property
    def updates(self) -> int:
        return self._timer.rounds

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """Uses, [layers, experts]; older ones count less."""
        return self._heat.counts

    def own(self, key: Key) -> None:
        """`key` is in one of these slots from now on."""
        self._owned.add(key)
        if self._pins:
            self._context.slots.pin(key)

    def count(self, demand: Demand) -> None:
        self._heat.add(demand.layer, demand.experts, demand.counts)
        slots, layer = self._context.slots, demand.layer
        here = sum((layer, expert) in slots for expert in demand.experts)
        self._add(len(demand.experts), len(demand.experts) - here)

    def count_step(self, rows: npt.NDArray[np.int64]) -> None:
        """Count a step that ran without `decide`: rows per layer and expert."""
        self._heat.counts += rows
        asked = rows > 0
        self._add(int(asked.sum()), int((asked & ~self._in_slots()).sum()))

    def _in_slots(self) -> npt.NDArray[np.bool_]:
        """Whether each expert is in a slot, [layers, experts]; looked up again after a change."""
        slots, geometry = self._context.slots, self._context.geometry
        if self._here_at != slots.changes:
            self._here_at = slots.changes
            self._here = np.zeros(self._heat.counts.shape, dtype=bool)
            index = {layer: at for at, layer in enumerate(geometry.layers)}
            for layer, expert in list(slots.keys()):
                self._here[index[layer], expert] = True
        return self._here

    def _add(self, demands: int, misses: int) -> None:
        self._demands += demands
        self._timer.count(demands, misses)

    def update(self) -> tuple[tuple[Key, int], ...]:
        if not self._timer.due():
            return ()
        loads = self._swap(self._timer.schedule.budget)
        self._timer.done(len(loads))
        if self._demands:
            self._heat.counts *= _KEEP
        self._demands = 0
        return loads

    def _swap(self, budget: int) -> tuple[tuple[Key, int], ...]:
        slots, heat = self._context.slots, self._heat
        self._owned.intersection_update(slots.keys())
        chosen = heat.hottest(min(self._limit, len(self._owned) + slots.free()))
        rising = [key for key in chosen if key not in slots and heat.count(key) > 0][:budget]
        leaving = sorted(self._owned.difference(chosen), key=lambda key: (heat.count(key), key))
        loads = []
        for key in rising:
            if len(self._owned) >= self._limit or not slots.free():
                if not leaving or not _leads(heat.count(key), heat.count(leaving[0])):
                    break
                self._owned.discard(coldest := leaving.pop(0))
                if slots.is_pinned(coldest):
                    slots.unpin(coldest)
                slots.evict(coldest)
            loads.append((key, slots.place(key, early=True)))
            self.own(key)
        return tuple(loads)


def _leads(uses: float, other_uses: float) -> bool:
    return uses > _LEAD * other_uses + _LEAD_USES


def _prior(context: StrategyContext) -> npt.NDArray[np.float64] | None:
    if context.heatmap is None:
        return None
    counts = context.heatmap.counts
    asked = _PRIOR_TOKENS * context.geometry.top_k * len(context.geometry.layers)
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
    """`miss_rate` is the rate since the last update. `idle_streak` updates in a row swapped
    nothing, or (when negative) that many made as many swaps as they were allowed to."""
    heat = min(max(miss_rate, 0.0), 1.0)
    interval = 32.0 * (1.0 - heat) + MIN_INTERVAL
    budget = MAX_BUDGET * heat
    factor = 2.0 ** min(max(idle_streak, -3), 5)
    return UpdateSchedule(
        interval=round(min(max(interval * factor, MIN_INTERVAL), longest_interval(heat))),
        budget=round(min(max(budget / factor, MIN_BUDGET), MAX_BUDGET)),
    )


def longest_interval(miss_rate: float) -> float:
    """Tokens between updates that find nothing. Where many experts miss, a change of the text is
    worth finding early: 128 tokens if nothing misses, 72 at a quarter, 32 at a half."""
    return max(MAX_INTERVAL * (1.0 - miss_rate) ** 2, MIN_INTERVAL)


class UpdateTimer:
    """Counts tokens and demands since the last update. The schedule follows the misses seen since
    then, so that the next update comes earlier once the text changes."""

    def __init__(self) -> None:
        self.schedule = choose_schedule(1.0, 0)
        self._tokens = self._demands = self._misses = self._streak = 0
        # updates made
        self.rounds = 0

    def count(self, demands: int, misses: int) -> None:
        self._demands += demands
        self._misses += misses

    def due(self) -> bool:
        """Call it once for each token. Whether an update is due."""
        self._tokens += 1
        if self._demands and self._tokens >= MIN_INTERVAL:
            self.schedule = choose_schedule(self._misses / self._demands, self._streak)
        return self._tokens >= self.schedule.interval

    def done(self, swaps: int) -> None:
        """An update was made, with this many swaps."""
        self.rounds += 1
        if swaps == 0:
            self._streak = max(self._streak, 0) + 1
        else:
            self._streak = min(self._streak, 0) - 1 if swaps >= self.schedule.budget else 0
        rate = self._misses / self._demands if self._demands else 0.0
        self.schedule = choose_schedule(rate, self._streak)
        self._tokens = self._demands = self._misses = 0
