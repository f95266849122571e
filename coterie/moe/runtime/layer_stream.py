"""Experts of a step with a prompt that are not on the device: copied layer by layer, ahead of it.

A prompt uses nearly all experts of a layer. So what is missing of a layer is copied as a whole from
the host's bank into one of two buffers on the device, before its gate has chosen, while the layer
before it computes. Experts in slots are skipped; neighbours travel as one copy. The host only
enqueues: copies on a stream of their own, and events between that and the computing stream.

The last two layers stay in the buffers until the next such step: steps that decode find them there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.kernels.device_record import UNIT_BYTES

if TYPE_CHECKING:
    from coterie.moe.store.base import ExpertGeometry

# one is read while the other is filled
BUFFERS = 2
# from this share of a slot on, records travel with what is between them
_WHOLE_SHARE = 0.95


# number of a layer with experts, expert, and where its record goes
Kept = tuple[int, int, Tensor]


class LayerBank(Protocol):
    """What is needed of `HostBank`."""

    def layer(self, layer: int) -> Tensor:
        """uint8 [experts that the store has, slot_bytes]"""


class LayerStream:
    """One step at a time: `start`, then `layer` for every layer with experts, in order."""

    def __init__(
        self,
        bank: LayerBank,
        geometry: ExpertGeometry,
        record_bytes: Sequence[int],
        arena: Tensor,
        first: int,
        slot_bytes: int,
    ) -> None:
        """`record_bytes`: of an expert, by layer. The buffers are the `buffer_slots` of `arena`
        from number `first` on."""
        shape = len(geometry.layers), geometry.num_experts
        most, device = buffer_slots(geometry) // BUFFERS, arena.device
        own = arena[first * slot_bytes :][: BUFFERS * most * slot_bytes]
        self._buffers = own.view(BUFFERS, most, slot_bytes)
        self._sources = [bank.layer(layer) for layer in geometry.layers]
        self._record_bytes = record_bytes
        # by layer: the experts that the store has, in the order of the bank and of the buffers
        self._experts = [list(geometry.present(layer)) for layer in geometry.layers]
        slots = np.zeros(shape, dtype=np.int64)
        for row, experts in enumerate(self._experts):
            slots[row, experts] = first + row % BUFFERS * most + np.arange(len(experts))
        # int64 [layers, experts] on the device: an expert's place, while its layer is in a buffer
        self.places = torch.from_numpy(slots * slot_bytes // UNIT_BYTES).to(device)
        # to copy in this step, by layer: (first, last + 1) in the order of the bank
        self._runs: list[list[tuple[int, int]]] = []
        self._skipped = np.zeros(shape, dtype=bool)
        # by layer: places in its buffer, and where they are copied to
        self._keep: dict[int, list[tuple[int, Tensor]]] = {}
        # whether all layers of the last step were enqueued
        self.is_complete = False
        # [layers, experts]: in a buffer when all that is enqueued has run
        self.held = np.zeros(shape, dtype=bool)
        # since start
        self.copied_bytes = self.steps = 0
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._device = device
            self._copies: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # by buffer: filled, and read for the last time
            self._filled, self._read = (
                [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            self.hand_over()

    def hand_over(self) -> None:
        """Nothing that is enqueued from now on reads the buffers, until the next `start`."""
        if self._on_cuda:
            stream = torch.cuda.current_stream(self._device)
            for event in self._read:
                event.record(stream)

    def wait(self, event: torch.cuda.Event) -> None:
        """Copy nothing before it: others have read the buffers."""
        self._copies.wait_event(event)

    def measure(self) -> float:
        """Bytes per second of copies: the first layer, twice. Nobody may use the buffers."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._runs = [[(0, len(self._experts[0]))]]
        for event in (begin, end):
            self._fill(0)
            event.record(self._copies)
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return len(self._experts[0]) * self._record_bytes[0] / max(1e-9, seconds)

    def record(self, row: int, expert: int) -> Tensor | None:
        """An expert of the layer with experts number `row`, if it is still in a buffer when all
        that is enqueued has run."""
        if not self.held[row, expert]:
            return None
        return self._buffers[row % BUFFERS, self._experts[row].index(expert)]

    def start(self, on_device: NDArray[np.bool_], keep: Sequence[Kept] = ()) -> int:
        """A step begins; `on_device` [layers, experts]: not to be copied. What it is to `keep` is
        also copied out of the buffers, when its layer has run. Returns the bytes that will
        travel."""
        self._runs = [_runs(~on_device[row, experts]) for row, experts in enumerate(self._experts)]
        for row in range(min(BUFFERS, len(self._runs))):
            self._fill(row)
        self._skipped = on_device
        self.held[:] = self.is_complete = False
        self._keep = {}
        for row, expert, target in keep:
            self._keep.setdefault(row, []).append((self._experts[row].index(expert), target))
        self.steps += 1
        counts = [sum(last - first for first, last in runs) for runs in self._runs]
        pairs = zip(counts, self._record_bytes, strict=True)
        sent = sum(count * size for count, size in pairs)
        self.copied_bytes += sent
        return sent

    @contextmanager
    def layer(self, row: int) -> Iterator[None]:
        """What is enqueued inside reads the experts of the layer with experts number `row`."""
        buffer = row % BUFFERS
        if self._on_cuda:
            torch.cuda.current_stream(self._device).wait_event(self._filled[buffer])
        try:
            yield
            for place, target in self._keep.get(row, ()):
                target.copy_(self._buffers[buffer, place, : len(target)], non_blocking=True)
        finally:
            if self._on_cuda:
                self._read[buffer].record(torch.cuda.current_stream(self._device))
        if row + BUFFERS < len(self._runs):
            self._fill(row + BUFFERS)
        elif row + 1 == len(self._runs):
            self.is_complete = True
            for last in range(len(self._runs))[-BUFFERS:]:
                experts = self._experts[last]
                self.held[last, experts] = ~self._skipped[last, experts]

    def _fill(self, row: int) -> None:
        number = row % BUFFERS
        buffer, source, size = self._buffers[number], self._sources[row], self._record_bytes[row]
        if not self._on_cuda:
            self._copy(buffer, source, self._runs[row], size)
            return
        self._copies.wait_event(self._read[number])
        with torch.cuda.stream(self._copies):
            self._copy(buffer, source, self._runs[row], size)
        self._filled[number].record(self._copies)

    @staticmethod
    def _copy(buffer: Tensor, source: Tensor, runs: list[tuple[int, int]], size: int) -> None:
        if size >= _WHOLE_SHARE * buffer.shape[1]:
            for first, last in runs:
                buffer[first:last].copy_(source[first:last], non_blocking=True)
            return
        # much smaller than a slot: what is between them does not travel
        for place in (each for first, last in runs for each in range(first, last)):
            buffer[place, :size].copy_(source[place, :size], non_blocking=True)

    def close(self) -> None:
        if self._on_cuda:
            self._copies.synchronize()
        self._sources.clear()
        self._buffers = torch.empty(0, dtype=torch.uint8)


def buffer_slots(geometry: ExpertGeometry) -> int:
    """Slots that the buffers take."""
    return BUFFERS * max(len(geometry.present(layer)) for layer in geometry.layers)


def _runs(wanted: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of neighbours that are wanted."""
    edges = np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8))
    return list(zip(*(np.flatnonzero(edges == sign).tolist() for sign in (1, -1)), strict=True))
