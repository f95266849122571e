"""weighted_pin: active_only, with pins divided between layers in proportion to their skew.

A layer that often uses the same few experts gets more pins than one that uses all equally.
"""

from __future__ import annotations

from collections.abc import Collection

from coterie.moe.dispatch.pins import PinnedStrategy
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import Key


class WeightedPin(PinnedStrategy):
    name = "weighted_pin"

    def choose(self, heat: Heatmap, limit: int) -> Collection[Key]:
        budgets = pin_budgets(heat, limit)
        chosen = [
            (layer, expert)
            for layer, budget in budgets.items()
            for expert in heat.hottest_of(layer)[:budget]
        ]
        return sorted(chosen, key=lambda key: (-heat.count(key), key))


def pin_budgets(heat: Heatmap, limit: int) -> dict[int, int]:
    """Pins per layer: proportional to skew, at most the layer's experts, `limit` in all (or every
    expert). What a full layer cannot take goes to the others."""
    room = {layer: len(heat.geometry.present(layer)) for layer in heat.geometry.layers}
    # even spread when no layer is skewed at all
    weight = {layer: heat.skew(layer) + 1e-6 for layer in room}
    budgets = dict.fromkeys(room, 0)
    left = min(limit, sum(room.values()))
    while left:
        open_layers = [layer for layer in room if budgets[layer] < room[layer]]
        scale = left / sum(weight[layer] for layer in open_layers)
        given = 0
        for layer in open_layers:
            extra = min(int(weight[layer] * scale), room[layer] - budgets[layer])
            budgets[layer] += extra
            given += extra
        if not given:
            # less than one pin for each layer: the largest shares get one
            for layer in sorted(open_layers, key=lambda layer: -weight[layer])[:left]:
                budgets[layer] += 1
                given += 1
        left -= given
    return budgets
