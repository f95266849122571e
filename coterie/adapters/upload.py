"""How a stack's bytes reach the slab: written in place on a CPU, one copy beside the work on CUDA.

On CUDA a copy begins when everything that was computed from its bytes has ended, and whoever
computes from them next waits for the copy. Knows bytes, no adapters.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.adapters.image import Image

# pinned once at start; a larger stack goes in pieces
STAGING_BYTES = 32 << 20


class Upload(Protocol):
    def copy(self, image: Image, target: Tensor) -> Any:
        """Begin (and on a CPU end) filling `target`; what `arrived` must be given."""

    def arrived(self, event: Any) -> None:
        """Whatever is computed from now on waits for that copy. Computing thread only."""

    def fence(self) -> None:
        """Copies from now on wait for what was computed so far. Computing thread only."""

    def close(self) -> None:
        """Waits for the last copy."""


class HostUpload:
    def copy(self, image: Image, target: Tensor) -> None:
        image.write(target)

    def arrived(self, event: Any) -> None:
        """It has."""

    def fence(self) -> None:
        """A CPU has computed when it says so."""

    def close(self) -> None:
        """Nothing is under way."""


class CudaUpload:
    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        size = min(STAGING_BYTES, largest)
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._last: Any = None
        self._fence: Any = None

    def copy(self, image: Image, target: Tensor) -> Any:
        fence, size = self._fence, self._staging.numel()
        if fence is not None:
            self._stream.wait_event(fence)
        for begin in range(0, image.nbytes, size):
            # the staging is read until the copy before is over
            if self._last is not None:
                self._last.synchronize()
            piece = self._staging[: min(size, image.nbytes - begin)]
            image.write(piece, begin)
            with torch.cuda.stream(self._stream):
                target[begin : begin + piece.numel()].copy_(piece, non_blocking=True)
                self._last = self._stream.record_event()
        return self._last

    def arrived(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def fence(self) -> None:
        self._fence = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        self._stream.synchronize()


def upload_for(device: torch.device, largest: int) -> Upload:
    return CudaUpload(device, largest) if device.type == "cuda" else HostUpload()
