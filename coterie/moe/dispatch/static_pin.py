"""static_pin: active_only, with the hottest experts of the whole model pinned."""

from __future__ import annotations

from collections.abc import Collection

from coterie.moe.dispatch.pins import PinnedStrategy
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import Key


class StaticPin(PinnedStrategy):
    name = "static_pin"

    def choose(self, heat: Heatmap, limit: int) -> Collection[Key]:
        return heat.hottest(limit)
