"""layer_grouped: a prompt walks through N groups of layers; each group is loaded whole, once.

What moves does not depend on the prompt's length. A group that does not fit is split further;
where even one layer does not fit, the rest of it comes in waves. Decode is active_only's.
"""

from __future__ import annotations

from collections.abc import Sequence

from coterie.moe.dispatch.active_only import ActiveOnly
from coterie.moe.dispatch.base import StrategyContext, load_early
from coterie.moe.dispatch.persistent import groups_that_fit, split_layers
from coterie.moe.store.base import Key


class LayerGrouped(ActiveOnly):
    name = "layer_grouped"
    takes_number = True
    default_number = 2
    decodes_as = "active_only"

    def __init__(self, scene: StrategyContext) -> None:
        super().__init__(scene)
        count = groups_that_fit(scene.geometry, scene.slots.movable, scene.number)
        self._groups = split_layers(scene.geometry, count)

    def settled(self) -> bool:
        """A group is loaded for every prompt, whatever lies there."""
        return False

    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        return self._groups

    def load_group(self, index: int) -> Sequence[tuple[Key, int]]:
        geometry = self.scene.geometry
        layers = self._groups[index]
        keys = [(layer, expert) for layer in layers for expert in geometry.present(layer)]
        return load_early(self.scene.slots, keys, self._anywhere)
