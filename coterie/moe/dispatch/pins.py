"""Pinned strategies: a choice of experts stays in slots for good, the rest works as active_only.

The choice comes from the heatmap at start, or without one from live counts as soon as there are
enough; live counts move it later, a bounded number of swaps at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coterie.moe.dispatch.active_only import ActiveOnly
from coterie.moe.dispatch.base import Demand, StrategyContext, Wave
from coterie.moe.dispatch.repin import UpdateTimer
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry, Key

# steps to watch before pinning without a heatmap
_WATCH_STEPS = 16
# what counts are worth after an update
_KEEP = 0.9


def spare_slots(geometry: ExpertGeometry, num_slots: int) -> int:
    """Slots left unpinned so that misses can run: a compact buffer for every layer where there is
    room for that, never more than a quarter, at least one."""
    buffers = len(geometry.layers) * (geometry.top_k + 1)
    return max(1, min(buffers, num_slots // 4))


class PinnedStrategy(ActiveOnly):
    """Base of static_pin and weighted_pin."""

    def __init__(self, scene: StrategyContext) -> None:
        super().__init__(scene)
        self._heat = Heatmap(scene.geometry)
        if scene.heatmap is not None:
            self._heat.counts += scene.heatmap.counts
        self._watched = 0
        self._mine: set[Key] = set()
        self._clock = UpdateTimer()
        self._limit = scene.slots.num_slots - spare_slots(scene.geometry, scene.slots.num_slots)

    def choose(self, heat: Heatmap, limit: int) -> Collection[Key]:
        """Whom to pin, hottest first, `limit` at most."""
        raise TypeError(f"{self.name} does not choose")

    def start(self) -> tuple[tuple[Key, int], ...]:
        if self.scene.heatmap is None:
            return ()
        return self._pin(self._limit, early=False)

    def decide(self, demand: Demand) -> Sequence[Wave]:
        self._heat.add(demand.layer, demand.experts, demand.counts)
        self._watched += 1
        waves = super().decide(demand)
        self._clock.saw(len(demand.experts), sum(len(wave.load) for wave in waves))
        return waves

    @property
    def updates(self) -> int:
        return self._clock.rounds

    def update(self) -> tuple[tuple[Key, int], ...]:
        due = self._clock.due()
        if not self._mine:
            if self._watched < _WATCH_STEPS * len(self.scene.geometry.layers):
                return ()
        elif not due:
            return ()
        loads = self._pin(self._clock.pace.budget, early=True)
        self._clock.done(len(loads))
        self._heat.counts *= _KEEP
        return loads

    def _pin(self, budget: int, early: bool) -> tuple[tuple[Key, int], ...]:
        """Bring the pins nearer to the choice with at most `budget` loads. Who is no longer chosen
        stays as an ordinary resident; pins of a partner are left alone."""
        slots = self.scene.slots
        self._mine &= slots.pinned()
        limit = min(self._limit, slots.movable + len(self._mine) - 1)
        chosen = self.choose(self._heat, limit)
        leaving = sorted(
            self._mine.difference(chosen), key=lambda key: (-self._heat.count(key), key)
        )
        loads: list[tuple[Key, int]] = []
        for key in chosen:
            if slots.is_pinned(key) or (key not in slots and len(loads) == budget):
                continue
            if len(self._mine) >= limit:
                if not leaving:
                    break
                self._mine.discard(coldest := leaving.pop())
                slots.unpin(coldest)
            if key not in slots:
                if not self._anywhere(key, ()):
                    break
                loads.append((key, slots.place(key, early=early)))
            slots.pin(key)
            self._mine.add(key)
        return tuple(loads)
