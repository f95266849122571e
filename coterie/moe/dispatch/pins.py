"""Pinned strategies: some experts stay in slots for good, the others are handled as active_only
does.

The pinned experts come from the heatmap at start, or without one from live counts as soon as there
are enough. Later, live counts change them, a bounded number of swaps at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from coterie.moe.dispatch.active_only import ActiveOnly
from coterie.moe.dispatch.base import Demand, StrategyContext, Wave
from coterie.moe.dispatch.repin import UpdateTimer
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry, Key

# steps to count before pinning without a heatmap
_WATCH_STEPS = 16
# counts are multiplied by this after an update
_KEEP = 0.9


def spare_slots(geometry: ExpertGeometry, num_slots: int) -> int:
    """Slots left unpinned so that misses can run: a small buffer for every layer where there is
    room for that, at most a quarter of all slots, at least one."""
    buffers = len(geometry.layers) * (geometry.top_k + 1)
    return max(1, min(buffers, num_slots // 4))


class PinnedStrategy(ActiveOnly):
    """Base of static_pin and weighted_pin."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._heat = Heatmap(context.geometry)
        if context.heatmap is not None:
            self._heat.counts += context.heatmap.counts
        self._watched = 0
        self._pinned: set[Key] = set()
        self._timer = UpdateTimer()
        self._limit = context.slots.num_slots - spare_slots(
            context.geometry, context.slots.num_slots
        )

    def choose(self, heat: Heatmap, limit: int) -> Collection[Key]:
        """The experts to pin, hottest first, at most `limit`."""
        raise TypeError(f"{self.name} does not choose")

    def start(self) -> tuple[tuple[Key, int], ...]:
        if self.context.known is None:
            return ()
        return self._pin(self._limit, early=False)

    def decide(self, demand: Demand) -> Sequence[Wave]:
        self._heat.add(demand.layer, demand.experts, demand.counts)
        self._watched += 1
        waves = super().decide(demand)
        self._timer.count(len(demand.experts), sum(len(wave.load) for wave in waves))
        return waves

    def worth(self) -> npt.NDArray[np.float64]:
        return self._heat.counts

    @property
    def updates(self) -> int:
        return self._timer.rounds

    def update(self) -> tuple[tuple[Key, int], ...]:
        due = self._timer.due()
        if not self._pinned:
            if self._watched < _WATCH_STEPS * len(self.context.geometry.layers):
                return ()
        elif not due:
            return ()
        loads = self._pin(self._timer.schedule.budget, early=True)
        self._timer.done(len(loads))
        self._heat.counts *= _KEEP
        return loads

    def _pin(self, budget: int, early: bool) -> tuple[tuple[Key, int], ...]:
        """Pin more of the chosen experts, with at most `budget` loads. An expert that is no longer
        chosen stays as an ordinary resident; the other phase's pins are not changed."""
        slots = self.context.slots
        self._pinned &= slots.pinned()
        limit = min(self._limit, slots.movable + len(self._pinned) - 1)
        chosen = self.choose(self._heat, limit)
        leaving = sorted(
            self._pinned.difference(chosen), key=lambda key: (-self._heat.count(key), key)
        )
        loads: list[tuple[Key, int]] = []
        for key in chosen:
            if slots.is_pinned(key) or (key not in slots and len(loads) == budget):
                continue
            if len(self._pinned) >= limit:
                if not leaving:
                    break
                self._pinned.discard(coldest := leaving.pop())
                slots.unpin(coldest)
            if key not in slots:
                if not self._any_slot(key, ()):
                    break
                loads.append((key, slots.place(key, early=early)))
            slots.pin(key)
            self._pinned.add(key)
        return tuple(loads)
