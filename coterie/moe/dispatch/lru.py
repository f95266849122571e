"""lru: one pool of slots for all layers; the least recently used expert leaves."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.moe.dispatch.base import (
    Demand,
    Strategy,
    StrategyContext,
    Wave,
    evict_oldest,
    place_in_waves,
)


class Lru(Strategy):
    name = "lru"

    def __init__(self, scene: StrategyContext) -> None:
        super().__init__(scene)
        self._room = evict_oldest(scene.slots)

    def decide(self, demand: Demand) -> Sequence[Wave]:
        return place_in_waves(self.scene.slots, demand, self._room)
