"""Experts of one layer computed from host RAM: what is there first, the rest as reads end.

Never holds more entries than the host tier has, so that one slot is enough; whatever happens, none
stays pinned. Knows no strategy and no device.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from coterie.moe.runtime.transfer import Arrival

if TYPE_CHECKING:
    from coterie.moe.runtime.layer_job import LayerJob
    from coterie.moe.runtime.tiers import Entry, HostTier
    from coterie.moe.runtime.transfer import Transfer
    from coterie.moe.store.geometry import Key


class HostSide:
    def __init__(self, host: HostTier, transfer: Transfer) -> None:
        self._host, self._transfer = host, transfer

    def run(self, job: LayerJob, experts: tuple[int, ...]) -> None:
        turn = _Turn(self._host, self._transfer, job)
        try:
            turn.run(experts)
        finally:
            turn.let_go()


class _Turn:
    """Entries held, read and still to come while one layer is computed."""

    def __init__(self, host: HostTier, transfer: Transfer, job: LayerJob) -> None:
        self._host, self._transfer, self._job = host, transfer, job
        self._ready: list[Entry] = []
        self._loading: dict[Key, Entry] = {}
        # reads that nobody else had asked for
        self._mine: set[Key] = set()
        self._sink: SimpleQueue[Arrival] = SimpleQueue()

    def run(self, experts: tuple[int, ...]) -> None:
        # those that are here are pinned before any read can push them out
        missing = [key for key in self._keys(experts) if not self._found(key)]
        missing.reverse()
        while self._ready or self._loading or missing:
            self._ask(missing)
            if self._ready:
                self._compute()
            elif self._loading:
                self._await()
            self._collect()

    def _keys(self, experts: tuple[int, ...]) -> list[Key]:
        return [(self._job.layer, expert) for expert in experts]

    def _found(self, key: Key) -> bool:
        entry = self._host.find(key)
        if entry is None:
            return False
        self._ready.append(entry)
        self._job.tally.host_hits += 1
        return True

    def _ask(self, missing: list[Key]) -> None:
        """Start as many reads as there is room for; wait for room only when idle otherwise."""
        while missing:
            mine = Arrival(missing[-1])
            block = not (self._ready or self._loading)
            entry = self._host.acquire(missing[-1], mine, block=block)
            if entry is None:
                return
            missing.pop()
            arrival = entry.arrival
            if arrival is None:
                self._ready.append(entry)
                self._job.tally.host_hits += 1
                continue
            self._loading[entry.key] = entry
            arrival.tell(self._sink)
            if arrival is mine:
                self._mine.add(entry.key)
                self._transfer.to_host(entry)

    def _compute(self) -> None:
        experts = [entry.key[1] for entry in self._ready]
        self._job.compute_host(self._host.tables[self._job.layer], experts)
        done, self._ready = self._ready, []
        self._host.release(*done)

    def _await(self) -> None:
        begin = time.perf_counter()
        arrival = self._sink.get()
        self._job.waited(begin)
        self._take(arrival)

    def _collect(self) -> None:
        try:
            while True:
                self._take(self._sink.get_nowait())
        except Empty:
            return

    def _take(self, arrival: Arrival) -> None:
        if arrival.error is not None:
            raise arrival.error
        self._ready.append(self._loading.pop(arrival.key))
        if arrival.key in self._mine:
            self._job.host_read(arrival)
        else:
            self._job.tally.host_hits += 1

    def let_go(self) -> None:
        for entry in self._loading.values():
            arrival = entry.arrival
            if arrival is not None:
                arrival.settle()  # its bytes are being written: the place is not free yet
        self._host.release(*self._ready, *self._loading.values())
