"""Copies the arrays of a step to the device in one transfer that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# bytes at which every array starts: kernels are compiled for aligned addresses
ALIGNMENT = 128
# one that is filled, one that a step in flight may still be copied from, and one spare
NUM_BUFFERS = 3

_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that was enqueued so far; None on a device that computes at once."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class StepEvents:
    """Recorded before a step's first kernel, and behind the last that its result needs. Nothing on
    a device that computes at once."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, ...] = ()
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def begin(self) -> StepEvents:
        if self._events:
            self._events[0].record()
        return self

    def end(self) -> None:
        if self._events:
            self._events[1].record()

    def seconds(self) -> float | None:
        """Waits for the end. By the device's clock; None: it has none."""
        if not self._events:
            return None
        began, done = self._events
        done.synchronize()
        return float(began.elapsed_time(done)) / 1e3


class UploadRing:
    """Pinned buffers that are used in turn. The copy from pageable memory would wait for all that
    was launched before it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn = device, 0
        self._buffers = [_StagingBuffer(device) for _ in range(NUM_BUFFERS)]

    def send(self, arrays: Seq[NDArray[Any]]) -> list[Tensor]:
        """The arrays on the device, all in one allocation. The caller may change them at once."""
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        host = buffer.room(size)
        for start, array in zip(starts, arrays, strict=True):
            first = start // array.itemsize
            flat = array if array.ndim == 1 else array.reshape(-1)
            host[array.dtype][first : first + array.size] = flat
        sent = buffer.send(size)
        # one view for each type, then one for each array: views cost time too
        typed: dict[np.dtype[Any], Tensor] = {np.dtype(np.int64): sent}
        tensors = []
        for start, array in zip(starts, arrays, strict=True):
            whole = typed.get(array.dtype)
            if whole is None:
                whole = typed[array.dtype] = sent.view(_TYPES[array.dtype])
            first = start // array.itemsize
            part = whole[first : first + array.size]
            tensors.append(part if array.ndim == 1 else part.view(array.shape))
        return tensors


class _StagingBuffer:
    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, device.type == "cuda"
        self._host = torch.empty(0, dtype=torch.int64)
        # the same memory by type
        self._views: dict[np.dtype[Any], NDArray[Any]] = {}
        # behind the last copy from this buffer
        self._sent: torch.cuda.Event | None = None

    def room(self, size: int) -> dict[np.dtype[Any], NDArray[Any]]:
        """At least `size` bytes that no copy reads any more."""
        if self._sent is not None:
            self._sent.synchronize()
        if self._host.nbytes < size or not self._views:
            self._host = torch.empty(size // 4 + 16, dtype=torch.int64, pin_memory=self._pins)
            words = self._host.numpy()
            self._views = {kind: words.view(kind) for kind in _TYPES}
        return self._views

    def send(self, size: int) -> Tensor:
        words = size // 8
        sent = torch.empty(words, dtype=torch.int64, device=self._device)
        sent.copy_(self._host[:words], non_blocking=True)
        if self._sent is None:
            self._sent = recorded_event(self._device)
        else:
            self._sent.record()
        return sent
