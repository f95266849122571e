"""persistent: all experts are loaded at start and stay. Nothing moves afterwards.

Where the slots do not hold all of them, layer_grouped prefills with the fewest groups that fit, and
active_only decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from coterie.moe.dispatch.base import (
    Demand,
    Strategy,
    StrategyContext,
    Wave,
    evict_oldest,
    place_in_waves,
)
from coterie.moe.store.base import ExpertGeometry, Key


class Persistent(Strategy):
    name = "persistent"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        # loads again what a failed read left out
        self._room = evict_oldest(context.slots)

    @classmethod
    def least_slots(cls, geometry: ExpertGeometry) -> int:
        return geometry.total

    @classmethod
    def fallback(cls, phase: str, geometry: ExpertGeometry, num_slots: int) -> str:
        if phase == "decode":
            return "active_only"
        count = groups_that_fit(geometry, num_slots, 2)
        return f"layer_grouped:{min(count, len(geometry.layers))}"

    def start(self) -> tuple[tuple[Key, int], ...]:
        slots, keys = self.context.slots, self.context.geometry.keys()
        wanted = [key for key in keys if key not in slots]
        return tuple((key, slots.place(key)) for key in wanted[: slots.free()])

    def decide(self, demand: Demand) -> Sequence[Wave]:
        return place_in_waves(self.context.slots, demand, self._room)


def split_layers(geometry: ExpertGeometry, count: int) -> tuple[tuple[int, ...], ...]:
    """`count` runs of neighbouring layers whose lengths differ by at most one."""
    layers = geometry.layers
    count = max(1, min(count, len(layers)))
    bounds = [index * len(layers) // count for index in range(count + 1)]
    return tuple(layers[a:b] for a, b in pairwise(bounds))


def groups_that_fit(geometry: ExpertGeometry, slots: int, least: int) -> int:
    """The smallest number of groups, `least` or more, of which each fits the slots; the number of
    layers when a single layer does not fit (it then runs in waves)."""
    for count in range(max(1, least), len(geometry.layers)):
        sizes = (
            sum(len(geometry.present(layer)) for layer in group)
            for group in split_layers(geometry, count)
        )
        if max(sizes) <= slots:
            return count
    return max(1, least, len(geometry.layers)) if geometry.layers else 1
