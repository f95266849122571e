"""chunked: in each layer of each step, loads all experts of the layer, one chunk after another.

It also moves experts that no row needs, and moves them again in the next step. This simple method
is kept because it needs no cache and its cost is known in advance.
"""

from __future__ import annotations

from collections.abc import Sequence

from coterie.moe.dispatch.base import Demand, Strategy, Wave


class Chunked(Strategy):
    name = "chunked"
    loads_again = True

    def settled(self) -> bool:
        return False

    def decide(self, demand: Demand) -> Sequence[Wave]:
        slots, layer = self.context.slots, demand.layer
        wanted = set(demand.experts)
        present = self.context.geometry.present(layer)
        fixed = [e for e in present if slots.is_pinned((layer, e))]
        moving = [e for e in present if not slots.is_pinned((layer, e))]
        # experts that the other phase's strategy pinned run from their slots
        waves = [Wave(device=ready)] if (ready := tuple(e for e in fixed if e in wanted)) else []
        size = slots.movable
        if not size:
            return [*waves, Wave(host=tuple(e for e in moving if e in wanted))]
        for start in range(0, len(moving), size):
            chunk = moving[start : start + size]
            for key in list(slots.by_age()):
                slots.evict(key)
            load = tuple(((layer, e), slots.place((layer, e))) for e in chunk)
            waves.append(Wave(load, tuple(e for e in chunk if e in wanted)))
        return waves
