"""The fixed pool of KV blocks: a free list and the number of owners of each block.

`BlockTables` holds the running sequences' blocks as one array, row by row, as kernels want them.
Neither knows what a block contains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """A block is free, owned (one or more owners), or unowned but held by the prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        """A free block with one owner. The caller checked `num_free`."""
        block = self._free.pop()
        self.owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner; also revives a block that only the prefix cache held."""
        self.owners[block] += 1

    def release(self, block: int) -> bool:
        """One owner less. True: nobody owns it now, and the caller frees or keeps it."""
        left = self.owners[block] - 1
        assert left >= 0, f"block {block} released more often than acquired"
        self.owners[block] = left
        return left == 0

    def free(self, block: int) -> None:
        assert self.owners[block] == 0, f"block {block} freed while owned"
        self._free.append(block)

    def check(self, tables: Iterable[list[int]], held: set[int]) -> None:
        """Every block is exactly one of free, owned as often as `tables` say, or `held`."""
        counts = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, owners in enumerate(self.owners):
            assert owners == counts[block], f"block {block}: {owners} owners, {counts[block]} known"
            states = (block in free) + (owners > 0) + (block in held)
            assert states == 1, f"block {block} is in {states} states"


class BlockTables:
    """Row r lists the blocks of the running sequence that holds r; unused entries are 0."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.array: NDArray[np.int32] = np.zeros((num_rows, width), dtype=np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        return self._free.pop()

    def release(self, row: int) -> None:
        self.array[row] = 0
        self._free.append(row)
