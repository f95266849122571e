"""Experts that a strategy wants in slots since a step with a prompt.

Their copies would delay the next prompt, which copies all experts itself: they wait. The next step
with a prompt takes them out of its buffers; otherwise they are copied once a step has decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from coterie.moe.runtime.bank_uploads import Loads
    from coterie.moe.runtime.slot_map import SlotMap
    from coterie.moe.runtime.tiers import DeviceTier
    from coterie.moe.store.base import Key


class WaitingLoads:
    def __init__(self, slots: SlotMap, tier: DeviceTier) -> None:
        self._slots, self._tier = slots, tier
        self._by_slot: dict[int, Key] = {}

    def add(self, loads: Loads) -> None:
        self._by_slot.update((slot, key) for key, slot in loads)

    def take(self, most: int) -> Loads:
        """What is still wanted, the first so many; the others wait on."""
        found = self._wanted()
        self._by_slot = {slot: key for key, slot in found[most:]}
        return found[:most]

    def take_free(self, rows: Mapping[int, int], copied: NDArray[np.bool_]) -> Loads:
        """Those of `copied` [layers, experts] whose slot is free once the layer of the expert has
        run: the slot's own expert is of that layer or an earlier one. `rows`: the order of the
        layers."""
        free = []
        for key, slot in self._wanted():
            old, row = self._tier.key_at(slot), rows[key[0]]
            if copied[row, key[1]] and (old is None or rows[old[0]] <= row):
                free.append((key, slot))
                del self._by_slot[slot]
        return free

    def _wanted(self) -> Loads:
        slots, tier = self._slots, self._tier
        return [
            (key, slot)
            for slot, key in self._by_slot.items()
            if slots.slot_of(key) == slot and tier.slot_of(key) != slot
        ]
