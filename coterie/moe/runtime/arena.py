"""Memory that tiers cut into slots: page aligned, huge pages advised, touched only when written.

On a machine with CUDA it can be registered for asynchronous copies. Knows no expert.
"""

from __future__ import annotations

import logging
import mmap
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
# below this, huge pages would round more than they speed up
_HUGE_FROM_BYTES = 8 * 2**20

_log = logging.getLogger(__name__)


class Arena:
    """`nbytes` of zeroed memory that costs nothing until it is written."""

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self.pinned = False
        if self.nbytes == 0:
            self._bytes = torch.empty(0, dtype=torch.uint8)
            return
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.nbytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        # the tensor keeps the mapping alive; it goes when the last view does
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            self._register()

    def view(self, offset: int, nbytes: int) -> Tensor:
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        if self.pinned:
            _cudart().cudaHostUnregister(self._bytes.data_ptr())
            self.pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _register(self) -> None:
        # torch's own pinned allocator rounds up to powers of two, which would break the budget
        code = _cudart().cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)
        self.pinned = int(code) == 0
        if not self.pinned:
            _log.warning("%d bytes of RAM could not be pinned: copies will be slower", self.nbytes)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
