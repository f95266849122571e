"""The device's room for adapters: one buffer, cut into blocks, first fit, neighbours joined again.

Says where bytes may go and who they are for; never moves a block, reads or writes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from coterie.core.errors import InternalError

# blocks begin and end on this many bytes: what the widest loads of any device ask for
ALIGN = 256

Cost = TypeVar("Cost", bound=tuple[float, ...])


class SlabBlock:
    """`owner` is a stack's key; empty = free."""

    __slots__ = ("nbytes", "offset", "owner")

    def __init__(self, offset: int, nbytes: int, owner: str = "") -> None:
        self.offset, self.nbytes, self.owner = offset, nbytes, owner


class AdapterSlab:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes // ALIGN * ALIGN
        self.used_bytes = 0
        # costs nothing on a CPU until it is written
        self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._blocks = [SlabBlock(0, self.nbytes)] if self.nbytes else []

    def view(self, block: SlabBlock) -> Tensor:
        return self._bytes[block.offset : block.offset + block.nbytes]

    def reserve(self, nbytes: int, owner: str) -> SlabBlock | None:
        """The first hole that is wide enough; None when there is none."""
        need = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        for index, block in enumerate(self._blocks):
            if block.owner or block.nbytes < need:
                continue
            if block.nbytes > need:
                rest = SlabBlock(block.offset + need, block.nbytes - need)
                self._blocks.insert(index + 1, rest)
                block.nbytes = need
            block.owner = owner
            self.used_bytes += need
            return block
        return None

    def free(self, block: SlabBlock) -> None:
        if not block.owner:
            raise InternalError("slab: a block is freed twice")
        index = self._blocks.index(block)
        block.owner = ""
        self.used_bytes -= block.nbytes
        if index + 1 < len(self._blocks) and not self._blocks[index + 1].owner:
            block.nbytes += self._blocks.pop(index + 1).nbytes
        if index and not self._blocks[index - 1].owner:
            self._blocks[index - 1].nbytes += block.nbytes
            del self._blocks[index]

    def cheapest(self, nbytes: int, cost: Callable[[str], Cost | None]) -> list[str] | None:
        """Owners to evict so that `nbytes` fit in one piece: of all runs of neighbours that are
        wide enough, the one whose costliest owner costs least. `cost` None = not to be evicted.
        None when no such run exists."""
        best: tuple[tuple[float, ...], list[str]] | None = None
        costs = {block.owner: cost(block.owner) for block in self._blocks if block.owner}
        for owners in self._runs(nbytes, costs):
            worst = max((costs[owner] or () for owner in owners), default=())
            if best is None or (worst, len(owners)) < (best[0], len(best[1])):
                best = (worst, owners)
        return None if best is None else best[1]

    def _runs(self, nbytes: int, costs: dict[str, Cost | None]) -> Iterator[list[str]]:
        """The shortest run from each block on."""
        for first in range(len(self._blocks)):
            width, owners = 0, []
            for block in self._blocks[first:]:
                if block.owner:
                    if costs[block.owner] is None:
                        break
                    owners.append(block.owner)
                width += block.nbytes
                if width >= nbytes:
                    yield owners
                    break

    def close(self) -> None:
        self._blocks.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def check(self) -> None:
        """Blocks cover the buffer without gaps, no two holes touch, and the count is right."""
        at, was_free, used = 0, False, 0
        for block in self._blocks:
            if block.offset != at or block.nbytes <= 0 or (was_free and not block.owner):
                raise InternalError("slab: blocks do not add up")
            at += block.nbytes
            was_free = not block.owner
            used += block.nbytes if block.owner else 0
        if at != self.nbytes or used != self.used_bytes:
            raise InternalError("slab: bytes do not add up")
