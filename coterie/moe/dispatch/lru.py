"""lru: one pool of slots for all layers; the least recently used expert leaves."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.moe.dispatch.base import Demand, Scene, Strategy, Wave, fill, oldest_leaves


class Lru(Strategy):
    name = "lru"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._room = oldest_leaves(scene.slots)

    def decide(self, demand: Demand) -> Sequence[Wave]:
        return fill(self.scene.slots, demand, self._room)
