"""Moves experts between tiers in the background: a few threads, a bounded number under way.

Loads that a step waits for go first; loads made on a guess run only while nobody waits. Every load
ends in its `ExpertLoad`, with bytes, times, or the error. Chooses nothing.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.core.errors import CoterieError, WeightsError
from coterie.moe.runtime.tiers import ExpertLoad, LoadTask, MemoryArena
from coterie.weights.shortage import MemoryShortage, is_shortage

if TYPE_CHECKING:
    from coterie.moe.runtime.tiers import DeviceTier, HostEntry, HostTier
    from coterie.moe.runtime.usage import UsageTally
    from coterie.moe.store.base import ExpertStore, Key

# reads and copies under way at most, and bytes that keep any disk busy: large records need fewer
DEPTH, _FLIGHT_BYTES = 8, 8 << 20
_FEWEST = 4


def depth_for(record_bytes: int) -> int:
    """Every thread more takes time from whoever computes."""
    return max(_FEWEST, min(DEPTH, _FLIGHT_BYTES // max(1, record_bytes)))


class TierTransfer:
    """The threads, and the roads between disk, host and device."""

    def __init__(self, store: ExpertStore, host: HostTier, device: DeviceTier) -> None:
        self._store, self._host, self._device = store, host, device
        depth = depth_for(store.slot_bytes)
        self._copies: CudaCopies | None = None
        if device.device.type == "cuda" and device.num_slots:
            self._copies = CudaCopies(device.device, depth, store.slot_bytes)
        self._crew = LoadWorkers(depth)
        # guesses that failed, and that nobody waits for
        self.failed = False

    @property
    def idle(self) -> bool:
        return self._crew.idle

    def to_host(self, entry: HostEntry) -> ExpertLoad:
        """Read an acquired entry's bytes; the caller keeps its pin."""
        arrival = entry.arrival
        assert arrival is not None
        self._crew.put(partial(self._read_entry, entry, arrival), urgent=True)
        return arrival

    def to_device(
        self, key: Key, slot: int, *, urgent: bool = True, sole: bool = False
    ) -> ExpertLoad:
        """Fill a slot that nothing computes from now. `sole`: keep no copy in the host tier."""
        arrival = ExpertLoad(key, slot)
        self._device.begin(key, slot)
        self._device.pending[slot] = arrival
        fence = self._copies.fence() if self._copies else None
        arrival.job = partial(self._fill, arrival, fence, sole)
        self._crew.put(arrival.job, urgent=urgent)
        return arrival

    def fill(self, keys: Iterator[Key], done: Callable[[Key, int], None]) -> None:
        """Read these into the host tier while nobody waits for anything, one after the other."""
        key = next(keys, None)
        if key is not None:
            self._crew.put(partial(self._fill_host, key, keys, done), urgent=False)

    def _fill_host(self, key: Key, keys: Iterator[Key], done: Callable[[Key, int], None]) -> None:
        arrival = ExpertLoad(key)
        entry = self._host.acquire(key, arrival)
        if entry is not None:
            try:
                if entry.arrival is arrival and self._host.claim(entry):
                    self._read_claimed(entry, arrival)
                    done(key, arrival.read_bytes)
            finally:
                self._host.release(entry)
        self.fill(keys, done)

    def hurry(self, arrival: ExpertLoad) -> None:
        """A step waits for what was loaded on a guess."""
        if arrival.job is not None and self._crew.withdraw(arrival.job):
            self._crew.put(arrival.job, urgent=True)

    def cancel(self, arrival: ExpertLoad) -> bool:
        """Whether a load on a guess could be called off before it began."""
        if arrival.job is None or not self._crew.withdraw(arrival.job):
            return False
        arrival.finish(WeightsError(f"expert {arrival.key}: load called off"))
        return True

    def close(self) -> None:
        self._crew.close()
        if self._copies:
            self._copies.close()

    def _fill(self, arrival: ExpertLoad, fence: Any, sole: bool) -> None:
        arrival.begun_s = time.perf_counter()
        slot, key = arrival.slot, arrival.key
        assert slot is not None
        try:
            mine = ExpertLoad(key)
            if self._device.shared:
                self._refer(arrival, mine)
                return
            target = self._device.record(key, slot)
            entry = self._host.find(key) if sole else self._host.acquire(key, mine)
            if entry is None:
                self._fill_past_host(arrival, target, fence)
            else:
                self._fill_from(entry, mine, arrival, target, fence)
                if sole:
                    self._host.drop(key)
        except CoterieError as problem:
            self.failed = True
            arrival.finish(problem)
        except Exception as problem:
            self.failed = True
            arrival.finish(_typed(f"expert {key} could not be loaded", problem))

    def _fill_from(
        self, entry: HostEntry, mine: ExpertLoad, arrival: ExpertLoad, target: Tensor, fence: Any
    ) -> None:
        try:
            self._have(entry, mine, arrival)
            self._copy(entry.record, arrival, target, fence)
        finally:
            self._host.release(entry)

    def _refer(self, arrival: ExpertLoad, mine: ExpertLoad) -> None:
        """The host tier has room for all: the slot becomes another name for its record."""
        entry = self._host.acquire(arrival.key, mine)
        assert entry is not None
        try:
            self._have(entry, mine, arrival)
            self._arrived(arrival, entry.record)
        finally:
            self._host.release(entry)

    def _have(self, entry: HostEntry, mine: ExpertLoad, arrival: ExpertLoad) -> None:
        """An acquired entry's bytes are there; whose read it was is told to `arrival`."""
        source = entry.arrival
        # a read that another load asked for is that one's to count
        arrival.host_hit = source is not mine
        if source is not None:
            if self._host.claim(entry):
                self._read_claimed(entry, source)
            source.wait()
            arrival.read_bytes = 0 if arrival.host_hit else source.read_bytes

    def _fill_past_host(self, arrival: ExpertLoad, target: Tensor, fence: Any) -> None:
        self._host.missed(arrival.key[0])
        if self._copies is None:
            arrival.read_bytes = self._store.read(arrival.key, target)
            self._arrived(arrival, target)
            return
        staging = self._copies.take()
        try:
            arrival.read_bytes = self._store.read(arrival.key, staging[: target.numel()])
            self._copy(staging, arrival, target, fence)
        finally:
            self._copies.put_back(staging)

    def _copy(self, source: Tensor, arrival: ExpertLoad, target: Tensor, fence: Any) -> None:
        size = target.numel()
        if self._copies is None:
            # ctypes lets other threads run meanwhile, and starts no threads of its own
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
            self._arrived(arrival, target)
            return
        arrival.event = self._copies.copy(source[:size], target, fence)
        self._arrived(arrival, target)
        # the source may be reused only when the copy is over
        arrival.event.synchronize()

    def _arrived(self, arrival: ExpertLoad, record: Tensor) -> None:
        assert arrival.slot is not None
        arrival.moved_bytes = record.numel()
        self._device.filled(arrival.key, arrival.slot, record)
        arrival.finish()

    def _read_entry(self, entry: HostEntry, arrival: ExpertLoad) -> None:
        if self._host.claim(entry):
            self._read_claimed(entry, arrival)

    def _read_claimed(self, entry: HostEntry, arrival: ExpertLoad) -> None:
        arrival.begun_s = time.perf_counter()
        try:
            arrival.read_bytes = self._store.read(entry.key, entry.record)
        except CoterieError as problem:
            arrival.finish(problem)
        except Exception as problem:
            arrival.finish(_typed(f"expert {entry.key} could not be read", problem))
        else:
            self._host.filled(entry)
            arrival.finish()


def _typed(what: str, problem: Exception) -> WeightsError:
    kind = MemoryShortage if is_shortage(problem) else WeightsError
    return kind(f"{what}: {problem}")


class CudaCopies:
    """Pinned staging and one stream for copies to a CUDA device."""

    def __init__(self, device: torch.device, depth: int, slot_bytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # one for every thread, when the host tier has no room: a constant beside the budget
        self._arena = MemoryArena(depth * slot_bytes, pinned=True)
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


class PendingLoads:
    def __init__(self, device: DeviceTier, transfer: TierTransfer) -> None:
        self.device, self._transfer = device, transfer
        # hears of every load that ended, and of the layer that was running (None between steps)
        self.retired: Callable[[ExpertLoad, UsageTally | None], None] = lambda arrival, tally: None
        # the device holds it for good: no second copy in RAM
        self.sole: Callable[[Key], bool] = lambda key: False
        self.hurry = transfer.hurry

    def start(
        self, key: Key, slot: int, tally: UsageTally | None, *, urgent: bool = True
    ) -> ExpertLoad:
        """Fill `slot` once what is under way to it has ended."""
        old = self.device.pending.get(slot)
        if old is not None:
            if not self._transfer.cancel(old):
                self._transfer.hurry(old)
                old.settle()
            self.retire(old, tally)
        return self._transfer.to_device(key, slot, urgent=urgent, sole=self.sole(key))

    def retire(self, arrival: ExpertLoad, tally: UsageTally | None) -> None:
        """A load has ended: count it, and let the computing stream see its bytes."""
        slot = arrival.slot
        if slot is not None and self.device.pending.get(slot) is arrival:
            del self.device.pending[slot]
            if arrival.event is not None:
                torch.cuda.current_stream(self.device.device).wait_event(arrival.event)
            self.retired(arrival, tally)

    def sweep(self) -> None:
        """Count loads that have ended and that nobody waited for."""
        for arrival in list(self.device.pending.values()):
            if arrival.done:
                self.retire(arrival, None)

    def settle(self) -> list[ExpertLoad]:
        """Wait for all loads under way; answers those that failed."""
        ended = [arrival.settle() for arrival in list(self.device.pending.values())]
        for arrival in ended:
            self.retire(arrival, None)
        return [arrival for arrival in ended if arrival.error is not None]


class LoadWorkers:
    """Threads that run jobs: urgent ones in order; others when no urgent one waits or runs."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads: list[threading.Thread] = []
        self._urgent: deque[LoadTask] = deque()
        self._spare: deque[LoadTask] = deque()
        self._waiting = self._urgent_running = self._spare_running = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def idle(self) -> bool:
        return not (self._urgent or self._spare or self._urgent_running or self._spare_running)

    def put(self, job: LoadTask, *, urgent: bool) -> None:
        with self._changed:
            if self._closed and not urgent:
                return
            (self._urgent if urgent else self._spare).append(job)
            # a thread that was told of a job counts as waiting until it has taken it
            jobs = len(self._urgent) + len(self._spare)
            if jobs > self._waiting and len(self._threads) < self._size:
                thread = threading.Thread(target=self._work, name="experts", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def withdraw(self, job: LoadTask) -> bool:
        """Take back a job that is not urgent, if it has not begun."""
        with self._changed:
            if job not in self._spare:
                return False
            self._spare.remove(job)
            return True

    def close(self) -> None:
        """Ends what runs and what is urgent; what nobody waits for is dropped."""
        with self._changed:
            self._closed = True
            self._spare.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> tuple[LoadTask, bool] | None:
        if self._urgent:
            self._urgent_running += 1
            return self._urgent.popleft(), True
        if self._spare and not self._urgent_running:
            self._spare_running += 1
            return self._spare.popleft(), False
        return None

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    while (taken := self._next()) is None and not self._closed:
                        self._waiting += 1
                        self._changed.wait()
                        self._waiting -= 1
                if taken is None:
                    return
                job, urgent = taken
                try:
                    job()
                finally:
                    with self._changed:
                        self._urgent_running -= urgent
                        self._spare_running -= not urgent
                        if self._spare and not (self._urgent or self._urgent_running):
                            self._changed.notify()
                del job, taken
