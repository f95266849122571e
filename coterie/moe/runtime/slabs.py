"""How one piece of device memory is divided between experts' slots and KV blocks.

It begins with the slots; KV's own blocks are behind them. The last slots are grouped into slabs: a
slab is some slots or some KV blocks, whichever has it now. A block is contiguous, over all layers.
Kernels find it by the number of its first cell (one plane of one layer) from the beginning of the
memory, so that a block may lie in any slab, and captured steps stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coterie.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

# of the slots, that experts always keep: one in so many
_KEPT = 4
# of a slab, that its KV blocks should fill
_FILLED = 0.85
# slots more than the fewest, in which a slab of that kind is looked for
_SEARCHED = 32


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """The KV that shares memory with experts."""

    # one plane of one layer of a block
    cell_bytes: int
    # of a block: planes times layers
    cells: int
    # tokens of a block
    block_size: int
    # blocks that are always KV's
    own: int

    @property
    def block_bytes(self) -> int:
        return self.cell_bytes * self.cells

    @property
    def nbytes(self) -> int:
        """What its own blocks take, wherever the slots before them end."""
        return self.own * self.block_bytes + self.cell_bytes


@dataclass(frozen=True, slots=True)
class SlabLayout:
    kv: KvBlocks
    slot_bytes: int
    # bytes of all slots and buffers, which KV's own blocks follow
    before: int
    # the slots of slabs begin here, so many each
    first_slot: int
    slab_slots: int
    num_slabs: int

    @property
    def slab_bytes(self) -> int:
        return self.slab_slots * self.slot_bytes

    @property
    def nbytes(self) -> int:
        """All of the memory, a whole number of cells."""
        return -(-(self.before + self.kv.nbytes) // self.kv.cell_bytes) * self.kv.cell_bytes

    @property
    def num_blocks(self) -> int:
        """The most blocks that KV can have."""
        return self.kv.own + self.num_slabs * self.slab_blocks

    def slots(self, slab: int) -> range:
        first = self.first_slot + slab * self.slab_slots
        return range(first, first + self.slab_slots)

    def blocks(self, slab: int) -> range:
        """Their numbers: KV's own come first, then those of the slabs in order."""
        first = self.kv.own + slab * self.slab_blocks
        return range(first, first + self.slab_blocks)

    def span(self, slab: int) -> tuple[int, int]:
        """Where its bytes begin and end."""
        slots = self.slots(slab)
        return slots.start * self.slot_bytes, slots.stop * self.slot_bytes

    @property
    def slab_blocks(self) -> int:
        """KV blocks of a slab: what fits wherever its first cell begins."""
        return _fitting(self.slab_bytes, self.slot_bytes, self.kv)

    def first_cells(self) -> NDArray[np.int32]:
        """By block: the number of its first cell."""
        kv = self.kv
        begins = [self.before, *(self.span(slab)[0] for slab in range(self.num_slabs))]
        counts = [kv.own, *[self.slab_blocks] * self.num_slabs]
        parts = [
            -(-begin // kv.cell_bytes) + kv.cells * np.arange(count, dtype=np.int64)
            for begin, count in zip(begins, counts, strict=True)
        ]
        return np.concatenate(parts).astype(np.int32)

    def kv_views(
        self, memory: Tensor, dtype: torch.dtype, planes: int, cell_shape: Sequence[int]
    ) -> list[Tensor]:
        """The cache of every layer, [planes, cells of all the memory, *cell_shape]: a block is at
        its first cell. Other cells are other layers', or experts."""
        whole = memory.view(dtype)
        size, layers = self.kv.cell_bytes // dtype.itemsize, self.kv.cells // planes
        inner = [int(np.prod(cell_shape[at + 1 :])) for at in range(len(cell_shape))]
        views = []
        for layer in range(layers):
            count = len(whole) // size - layer * planes - (planes - 1)
            shape, strides = (planes, count, *cell_shape), (size, size, *inner)
            views.append(whole.as_strided(shape, strides, layer * planes * size))
        return views


def plan_slabs(kv: KvBlocks, slot_bytes: int, slots: int, buffers: int, least: int) -> SlabLayout:
    """`least`: slots that the strategies need. Raises when there is nothing to divide."""
    kept = max(least, slots // _KEPT, 1)
    size = _slab_slots(slot_bytes, kv)
    count = (slots - kept) // size
    if count < 1:
        raise ConfigError(
            f"elastic_memory: {slots} slots for experts are too few to share: {kept} stay "
            f"experts', and {size} more make one slab",
            param="elastic_memory",
        )
    before = (slots + buffers) * slot_bytes
    return SlabLayout(kv, slot_bytes, before, slots - count * size, size, count)


def _slab_slots(slot_bytes: int, kv: KvBlocks) -> int:
    """The fewest slots that KV blocks fill well, or best."""
    fewest = -(-(kv.block_bytes + kv.cell_bytes) // slot_bytes)
    best, filled = fewest, 0.0
    for slots in range(fewest, fewest + _SEARCHED):
        used = _fitting(slots * slot_bytes, slot_bytes, kv) * kv.block_bytes / (slots * slot_bytes)
        if used >= _FILLED:
            return slots
        if used > filled:
            best, filled = slots, used
    return best


def _fitting(nbytes: int, slot_bytes: int, kv: KvBlocks) -> int:
    """A slab begins at any multiple of a slot, its first cell at the next multiple of a cell."""
    lost = kv.cell_bytes - int(np.gcd(slot_bytes, kv.cell_bytes))
    return (nbytes - lost) // kv.block_bytes
