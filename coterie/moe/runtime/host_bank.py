"""All experts in RAM as a CUDA device's kernels read them: pinned and mapped, one after another.

The device reads a record here over the link exactly as it reads one in its own memory (layout:
`device_record`). Filled once (`bank_fill`); nothing changes it afterwards.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels.device_record import UNIT_BYTES, arrange, device_record
from coterie.moe.runtime.bank_fill import BankFill
from coterie.moe.runtime.tiers import MemoryArena

if TYPE_CHECKING:
    from coterie.moe.store.base import ExpertStore, Key

_log = logging.getLogger(__name__)

# reads at one time: each also waits for its checksum and for the device
_READERS = {"cuda": 16, "cpu": 8}


def has_device_records(store: ExpertStore) -> bool:
    """Whether the device's kernels support every layer's experts."""
    layers = store.geometry.layers
    return store.slot_bytes % UNIT_BYTES == 0 and all(
        device_record(store.layout(layer)) is not None for layer in layers
    )


class HostBank:
    """Layer after layer, expert after expert, `slot_bytes` apart; experts that the store does not
    have take no room. `device`: cuda pins and maps the memory; a cpu is for tests."""

    def __init__(self, store: ExpertStore, device: torch.device) -> None:
        geometry, self._store, self.device = store.geometry, store, device
        self.slot_bytes, self.nbytes = store.slot_bytes, geometry.total * store.slot_bytes
        # by layer: the first place, and the place of each expert behind it
        self._first: dict[int, int] = {}
        self._rank: dict[int, dict[int, int]] = {}
        count = 0
        for layer in geometry.layers:
            present = geometry.present(layer)
            self._first[layer] = count
            self._rank[layer] = {expert: rank for rank, expert in enumerate(present)}
            count += len(present)
        started = time.perf_counter()
        self._arena = MemoryArena(self.nbytes, pinned=device.type == "cuda")
        _log.info("%d bytes pinned in %.1f s", self.nbytes, time.perf_counter() - started)
        self.memory = self._arena.view(0, self.nbytes)

    def offset(self, layer: int, expert: int) -> int:
        """Bytes from the beginning of `memory`."""
        return (self._first[layer] + self._rank[layer][expert]) * self.slot_bytes

    def record(self, layer: int, expert: int) -> Tensor:
        begin = self.offset(layer, expert)
        return self.memory[begin : begin + self.slot_bytes]

    def layer(self, layer: int) -> Tensor:
        """[experts that the store has, slot_bytes]."""
        begin, count = self._first[layer], len(self._rank[layer])
        size = self.slot_bytes
        return self.memory[begin * size : (begin + count) * size].view(count, size)

    @property
    def address(self) -> int | None:
        """Where the device finds `memory`; None: it cannot read it."""
        if self.device.type != "cuda":
            return self.memory.data_ptr()
        return _device_address(self.memory.data_ptr()) if self._arena.pinned else None

    def begin_fill(self) -> BankFill:
        """Read and arrange all experts, on threads of its own."""
        place = _CudaPlacer(self) if self.device.type == "cuda" else _HostPlacer(self)
        return BankFill(place, self._store.geometry.keys(), _READERS[self.device.type])

    def fill(self) -> int:
        """Read and arrange all experts. Returns the bytes read."""
        fill = self.begin_fill()
        try:
            fill.wait()
        finally:
            fill.close()
        return fill.read_bytes

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._arena.close()


class _HostPlacer:
    """Reads an expert and arranges it with torch."""

    def __init__(self, bank: HostBank) -> None:
        self._bank, self._store = bank, bank._store

    def __call__(self, key: Key) -> int:
        layout = self._store.layout(key[0])
        record = torch.empty(layout.nbytes, dtype=torch.uint8)
        count = self._store.read(key, record)
        with torch.inference_mode():
            arrange(layout, record, self._bank.record(*key))
        return count

    def close(self) -> None:
        """Nothing is kept."""


class _CudaPlacer:
    """The same over the device: a record is sent there, arranged, and copied back."""

    def __init__(self, bank: HostBank) -> None:
        from coterie.kernels.triton.arrange import arrange_record

        self._bank, self._store, self._arrange = bank, bank._store, arrange_record
        self._own, self._lock = threading.local(), threading.Lock()
        self._arenas: list[MemoryArena] = []

    def __call__(self, key: Key) -> int:
        own, size = self._own, self._bank.slot_bytes
        device = self._bank.device
        if not hasattr(own, "stream"):
            arena = MemoryArena(size, pinned=True)
            with self._lock:
                self._arenas.append(arena)
            own.record = arena.view(0, size)
            own.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            own.parts = torch.empty((2, size), dtype=torch.uint8, device=device)
        layout = self._store.layout(key[0])
        count = self._store.read(key, own.record[: layout.nbytes])
        with torch.inference_mode(), torch.cuda.stream(own.stream):
            arriving, arranged = own.parts
            arriving[: layout.nbytes].copy_(own.record[: layout.nbytes], non_blocking=True)
            # kernels are compiled by one thread
            with self._lock:
                self._arrange(layout, arriving[: layout.nbytes], arranged)
            self._bank.record(*key).copy_(arranged, non_blocking=True)
            own.stream.synchronize()
        return count

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()


def _device_address(pointer: int) -> int | None:
    """The address of registered host memory for the current device."""
    found = ctypes.c_uint64(0)
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(pointer), 0)
    return int(found.value) if code == 0 else None
