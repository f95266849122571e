"""The device's side of a layer, wave by wave: loads start, residents are computed, then arrivals.

A slot is filled only when nothing computes from it any more; the next wave's loads start as soon
as that holds. Knows no host experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from coterie.core.errors import InternalError

if TYPE_CHECKING:
    from coterie.moe.dispatch.base import Wave
    from coterie.moe.runtime.layer_job import LayerJob
    from coterie.moe.runtime.pending_loads import Loads
    from coterie.moe.runtime.transfer import Arrival
    from coterie.moe.store.geometry import Key


class DeviceSide:
    """The device's side of a layer."""

    def __init__(self, loads: Loads, job: LayerJob) -> None:
        self._loads, self._job = loads, job
        self._device = loads.device
        self._sink: SimpleQueue[Arrival] = SimpleQueue()
        self._started: set[tuple[Key, int]] = set()
        self._waiting: set[Key] = set()
        self._ready: list[int] = []
        # slots whose experts this wave has still to compute
        self._busy: set[int] = set()

    def run(self, wave: Wave, ahead: Wave | None) -> None:
        for key, slot in wave.load:
            if (key, slot) not in self._started:
                self._load(key, slot)
        self._started = set()
        self._busy = set()
        self._sort(wave.device)
        while self._ready or self._waiting:
            self._look_ahead(ahead)
            if self._ready:
                self._compute()
            else:
                begin = time.perf_counter()
                arrival = self._sink.get()
                self._job.waited(begin)
                self._take(arrival)
            self._collect()

    def _load(self, key: Key, slot: int) -> None:
        begin = time.perf_counter()
        pending = self._device.pending.get(slot)
        self._loads.start(key, slot, self._job.tally)
        if pending is not None:
            self._job.waited(begin)

    def _sort(self, experts: Sequence[int]) -> None:
        for expert in experts:
            key = (self._job.layer, expert)
            slot = self._device.slot_of(key)
            if slot is None:
                raise InternalError(f"expert {key} was to run from a slot and lies in none")
            self._busy.add(slot)
            arrival = self._device.pending.get(slot)
            if arrival is None:
                self._ready.append(expert)
                continue
            self._waiting.add(key)
            self._loads.hurry(arrival)
            arrival.tell(self._sink)

    def _look_ahead(self, ahead: Wave | None) -> None:
        """Start the next wave's loads whose slots are free by now."""
        for key, slot in ahead.load if ahead else ():
            if slot in self._busy or (key, slot) in self._started:
                continue
            pending = self._device.pending.get(slot)
            if pending is None or pending.done:
                self._load(key, slot)
                self._started.add((key, slot))

    def _compute(self) -> None:
        layer = self._job.layer
        self._job.compute_device(self._device.tables[layer], self._ready)
        for expert in self._ready:
            slot = self._device.slot_of((layer, expert))
            self._busy.discard(-1 if slot is None else slot)
        self._ready = []

    def _take(self, arrival: Arrival) -> None:
        self._loads.retire(arrival, self._job.tally)
        if arrival.error is not None:
            raise arrival.error
        self._waiting.discard(arrival.key)
        self._ready.append(arrival.key[1])

    def _collect(self) -> None:
        try:
            while True:
                self._take(self._sink.get_nowait())
        except Empty:
            return
