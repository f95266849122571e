"""KV blocks that a lane takes from experts while it needs them, and gives back behind that.

A slab of blocks is taken when neither a free block nor one that is only cached is left. It goes
back once its blocks have had no owner for some steps and enough others are left: what is needed
again and again stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coterie.moe.runtime.memory_trade import MemoryTrade

# steps after the last slab was taken until some are given back; blocks of kept sessions stay longer
PATIENCE, SESSION_PATIENCE = 64, 1024
_SORTED_EVERY = 8
# of the blocks in use, that must stay available beside them: one in so many
_SPARE = 8


class LaneBlocks(Protocol):
    """What is needed of `BlockPool`."""

    num_blocks: int
    owners: list[int]

    @property
    def num_absent(self) -> int: ...
    def add(self, blocks: Iterable[int]) -> None: ...
    def remove(self, blocks: Iterable[int]) -> None: ...
    def sort(self) -> None: ...


class CachedBlocks(Protocol):
    """What is needed of `PrefixCache`."""

    @property
    def num_present(self) -> int: ...
    def keeps(self, blocks: Iterable[int]) -> bool: ...
    def drop(self, blocks: Iterable[int]) -> None: ...


class LentBlocks:
    def __init__(self, trade: MemoryTrade, pool: LaneBlocks) -> None:
        self._trade, self._pool = trade, pool
        self._quiet = 0

    @property
    def num_left(self) -> int:
        """Blocks that can still be taken."""
        return self._trade.num_left * self._trade.layout.slab_blocks

    def take(self, count: int) -> bool:
        """At least so many more free blocks; False if there is no slab left."""
        layout = self._trade.layout
        slabs = self._trade.take(-(-count // layout.slab_blocks)) if self._trade.num_left else []
        for slab in slabs:
            self._pool.add(layout.blocks(slab))
        self._quiet = 0
        return bool(slabs)

    def ended_step(self, cache: CachedBlocks) -> None:
        """Give back what was not needed for a while."""
        self._quiet += 1
        if not self._trade.lent or self._quiet % _SORTED_EVERY:
            return
        # low numbers are used first from now on, so that slabs become empty
        self._pool.sort()
        if self._quiet % PATIENCE == 0:
            self._give_back(cache)

    def _give_back(self, cache: CachedBlocks) -> None:
        pool, layout = self._pool, self._trade.layout
        left = cache.num_present
        in_use = pool.num_blocks - pool.num_absent - left
        least = max(layout.slab_blocks, in_use // _SPARE)
        for slab in sorted(self._trade.lent, reverse=True):
            blocks = layout.blocks(slab)
            if left - len(blocks) < least:
                return
            if cache.keeps(blocks) and self._quiet < SESSION_PATIENCE:
                continue
            # also where others are in use: it is empty the sooner
            cache.drop(block for block in blocks if not pool.owners[block])
            if not any(pool.owners[block] for block in blocks):
                pool.remove(blocks)
                self._trade.give_back(slab)
                left -= len(blocks)
