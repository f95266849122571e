"""lru: one pool of slots for all layers; the least recently used expert is evicted."""

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

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.decode_room = evict_oldest(context.slots)

    def decide(self, demand: Demand) -> Sequence[Wave]:
        return place_in_waves(self.context.slots, demand, self.decode_room)
