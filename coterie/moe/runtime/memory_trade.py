"""Slabs of device memory that experts and KV lend each other between steps.

Experts have them until KV needs one: then those of its experts that are worth least go back to RAM
(or disk), and the slab is KV's until it gives it back. Nothing is allocated or freed. What is
enqueued later runs later: steps in flight still find their experts, and KV is written behind them.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from coterie.moe.runtime.slabs import SlabLayout
    from coterie.moe.runtime.slot_map import SlotMap
    from coterie.moe.store.base import Key


class SlotOwner(Protocol):
    """What is needed of `ExpertRuntime`."""

    def withdraw(self, slots: Sequence[int]) -> None:
        """Nothing reads or writes these slots in steps that are enqueued from now on."""

    def restore(self, slots: Sequence[int]) -> None:
        """They are free slots again."""

    def worth(self) -> Callable[[Key], float]:
        """What it is worth to have an expert in a slot, 0 or more."""


class MemoryTrade:
    """Only the engine's thread may call it."""

    def __init__(
        self, layout: SlabLayout, memory: Tensor, slots: SlotMap, experts: SlotOwner
    ) -> None:
        self.layout, self._memory = layout, memory
        self._slots, self._experts = slots, experts
        # slabs that are KV's
        self.lent: set[int] = set()
        # slabs since start: to KV, and back
        self.taken = self.returned = 0

    @property
    def num_left(self) -> int:
        """Slabs that KV can still take."""
        return self.layout.num_slabs - len(self.lent)

    @property
    def first_cells(self) -> NDArray[np.int32]:
        return self.layout.first_cells()

    def kv_views(self, dtype: torch.dtype, planes: int, cell_shape: Sequence[int]) -> list[Tensor]:
        return self.layout.kv_views(self._memory, dtype, planes, cell_shape)

    @torch.inference_mode()
    def take(self, count: int) -> list[int]:
        """So many slabs, or all that are left: KV's from now on, filled with zeros."""
        layout, worth = self.layout, self._experts.worth()
        left = (slab for slab in range(layout.num_slabs) if slab not in self.lent)
        chosen = nsmallest(count, left, key=lambda slab: (self._value(slab, worth), -slab))
        self._experts.withdraw([slot for slab in chosen for slot in layout.slots(slab)])
        for slab in chosen:
            begin, end = layout.span(slab)
            # bytes of an expert may be no numbers, and kernels multiply some of them by 0
            self._memory[begin:end].zero_()
        self.lent.update(chosen)
        self.taken += len(chosen)
        return chosen

    def give_back(self, slab: int) -> None:
        """No step that is enqueued from now on uses its blocks."""
        self.lent.remove(slab)
        self.returned += 1
        self._experts.restore(self.layout.slots(slab))

    def report(self) -> dict[str, int]:
        return {
            "slabs": self.layout.num_slabs,
            "slab_bytes": self.layout.slab_bytes,
            "slab_blocks": self.layout.slab_blocks,
            "slab_slots": self.layout.slab_slots,
            "kv_slabs": len(self.lent),
            "taken": self.taken,
            "returned": self.returned,
        }

    def check(self) -> None:
        """Raise unless slots and slabs add up."""
        layout, slots = self.layout, self._slots
        assert slots.num_slots + len(self.lent) * layout.slab_slots == slots.most_slots
        assert self.taken - self.returned == len(self.lent)
        for slab in self.lent:
            assert all(slots.key_at(slot) is None for slot in layout.slots(slab))

    def _value(self, slab: int, worth: Callable[[Key], float]) -> float:
        keys = (self._slots.key_at(slot) for slot in self.layout.slots(slab))
        return sum(worth(key) for key in keys if key is not None)
