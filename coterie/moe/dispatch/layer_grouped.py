"""layer_grouped: a prompt runs through N groups of layers; each group is loaded once, completely.

The bytes moved do not depend on the prompt's length. A group that does not fit is split further;
where even one layer does not fit, the rest of it is loaded in waves. active_only decodes.
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

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        count = groups_that_fit(context.geometry, context.slots.movable, context.number)
        self._groups = split_layers(context.geometry, count)

    def settled(self) -> bool:
        """Every prompt loads each group again, whatever is in the slots."""
        return False

    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        return self._groups

    def load_group(self, index: int) -> Sequence[tuple[Key, int]]:
        geometry = self.context.geometry
        layers = self._groups[index]
        keys = [(layer, expert) for layer in layers for expert in geometry.present(layer)]
        return load_early(self.context.slots, keys, self._any_slot)
