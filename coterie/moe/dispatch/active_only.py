"""active_only: only what the router picked moves, and only when it is not there already.

Decode keeps compact per-layer buffers across tokens. A prompt asks for far more of a layer than
its share, so prefill may use every slot, least recently used first.
"""

from __future__ import annotations

from collections.abc import Sequence

from coterie.moe.dispatch.base import Demand, Scene, Strategy, Wave
from coterie.moe.dispatch.buffers import Buffers
from coterie.moe.dispatch.waves import fill, oldest_leaves


class ActiveOnly(Strategy):
    name = "active_only"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._buffers = Buffers(scene.geometry, scene.slots)
        self._anywhere = oldest_leaves(scene.slots)

    def decide(self, demand: Demand) -> Sequence[Wave]:
        room = self._buffers.room if demand.phase == "decode" else self._anywhere
        return fill(self.scene.slots, demand, room)
