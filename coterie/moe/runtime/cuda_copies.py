"""Copies from RAM to a CUDA device that run beside the computation.

One stream, ordered by events: a copy begins when what was computed from its slot has ended, and
whoever computes from the slot next waits for the copy. Knows bytes, no experts.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from coterie.moe.runtime.arena import Arena


class CudaCopies:
    """Pinned staging and one stream for copies to a CUDA device."""

    def __init__(self, device: torch.device, depth: int, slot_bytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # one for every thread, when the host tier has no room: a constant beside the budget
        self._arena = Arena(depth * slot_bytes, pinned=True)
        self._staging: SimpleQueue[Tensor] = SimpleQueue()
        for index in range(depth):
            self._staging.put(self._arena.view(index * slot_bytes, slot_bytes))

    def fence(self) -> Any:
        """Everything the computing stream was given so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def take(self) -> Tensor:
        return self._staging.get()

    def put_back(self, staging: Tensor) -> None:
        self._staging.put(staging)

    def copy(self, source: Tensor, target: Tensor, fence: Any) -> Any:
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def close(self) -> None:
        self._stream.synchronize()
        while not self._staging.empty():
            self._staging.get()
        self._arena.close()
