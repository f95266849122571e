"""Moves experts between tiers in the background, on a small fixed number of threads.

Loads that a step waits for run first; prefetches run only while no step waits. Every load ends with
its bytes and times, or its error, in its `ExpertLoad`. This module chooses nothing.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.core.errors import CoterieError, WeightsError
from coterie.kernels.device_record import arrange, device_record
from coterie.moe.runtime.tiers import ExpertLoad, LoadTask, MemoryArena
from coterie.weights.shortage import MemoryShortage, is_shortage, started

if TYPE_CHECKING:
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.moe.runtime.tiers import DeviceTier, HostEntry, HostTier
    from coterie.moe.runtime.usage import LayerTally
    from coterie.moe.store.base import ExpertStore, Key

# the most reads and copies at one time, and the bytes that keep any disk busy: large records need
# fewer
DEPTH, _FLIGHT_BYTES = 8, 8 << 20
_FEWEST = 4
# where a device computes: a thread that read an expert waits for its checksum and its copy too
_CUDA_DEPTH, _CUDA_STAGING = 16, 128 << 20


def depth_for(record_bytes: int, cuda: bool = False) -> int:
    """On a CPU each additional thread takes time from the computation."""
    if cuda:
        return max(DEPTH, min(_CUDA_DEPTH, _CUDA_STAGING // max(1, record_bytes)))
    return max(_FEWEST, min(DEPTH, _FLIGHT_BYTES // max(1, record_bytes)))


class TierTransfer:
    """Moves experts between disk, host and device. The engine's thread calls the public methods;
    the load threads run the private ones below `close`."""

    def __init__(self, store: ExpertStore, host: HostTier, device: DeviceTier) -> None:
        self._store, self._host, self._device = store, host, device
        depth = depth_for(store.slot_bytes, device.device.type == "cuda")
        self._copies: CudaCopies | None = None
        if device.device.type == "cuda" and device.num_slots:
            self._copies = CudaCopies(device.device, depth, store.slot_bytes)
        self._workers = LoadWorkers(depth)
        # a model that is dropped without `close` leaves no threads
        weakref.finalize(self, self._workers.stop).atexit = False
        # called with every load that ended, and the tally of the layer that waited for it (None
        # between layers)
        self.retired: Callable[[ExpertLoad, LayerTally | None], None] = lambda load, tally: None
        # whether the device keeps this expert for good, so that RAM needs no second copy
        self.device_only: Callable[[Key], bool] = lambda key: False
        # a load that no step waits for has failed
        self.failed = False

    @property
    def idle(self) -> bool:
        return self._workers.idle

    def start(self, key: Key, slot: int, tally: LayerTally | None, *, urgent: bool = True) -> None:
        """Fill `slot`, from which nothing computes now. If another load fills it, that one is
        cancelled or awaited first."""
        device, old = self._device, self._device.pending.get(slot)
        if old is not None:
            begin = time.perf_counter()
            if not self._cancel(old):
                self.hurry(old)
                old.settle()
            self.retire(old, tally)
            if tally is not None:
                tally.waited(begin, disk=not old.host_hit)
        load = ExpertLoad(key, slot)
        device.begin(key, slot)
        device.pending[slot] = load
        fence = self._copies.fence() if self._copies else None
        load.task = partial(self._fill, load, fence, self.device_only(key))
        self._workers.put(load.task, urgent=urgent)

    def to_host(self, entry: HostEntry) -> None:
        """Read an acquired entry's bytes. The caller keeps its pin."""
        load = entry.load
        assert load is not None
        self._workers.put(partial(self._read_entry, entry, load), urgent=True)

    def fill_host(self, keys: Iterator[Key], done: Callable[[Key, int], None]) -> None:
        """Read these into the host tier, one after another, while no urgent load waits."""
        key = next(keys, None)
        if key is not None:
            self._workers.put(partial(self._fill_host, key, keys, done), urgent=False)

    def hurry(self, load: ExpertLoad) -> None:
        """Make a prefetch urgent, because a step waits for it."""
        if load.task is not None and self._workers.withdraw(load.task):
            self._workers.put(load.task, urgent=True)

    def retire(self, load: ExpertLoad, tally: LayerTally | None) -> None:
        """Count a load that has ended, and let the computing stream see its bytes."""
        slot = load.slot
        if slot is not None and self._device.pending.get(slot) is load:
            del self._device.pending[slot]
            if load.event is not None:
                torch.cuda.current_stream(self._device.device).wait_event(load.event)
            self.retired(load, tally)

    def sweep(self) -> None:
        """Count loads that have ended without anybody waiting for them. One that failed stays: a
        layer that needs its expert meanwhile must get its error."""
        for load in list(self._device.pending.values()):
            if load.done and load.error is None:
                self.retire(load, None)

    def wait(self, seconds: float) -> set[ExpertLoad]:
        """Wait for the loads that were started, at most so long. Returns those that still run;
        none if one failed."""
        deadline, done = time.perf_counter() + seconds, SimpleQueue[ExpertLoad]()
        running = set(self._device.pending.values())
        for load in running:
            load.notify(done)
        while running:
            try:
                load = done.get(timeout=max(0.0, deadline - time.perf_counter()))
            except Empty:
                break
            if load.error is not None:
                return set()
            running.discard(load)
        self.sweep()
        return running

    def call_off(self) -> None:
        """Drop the loads that nobody waits for and that have not begun."""
        for load in list(self._device.pending.values()):
            if self._cancel(load):
                self.retire(load, None)

    def settle(self) -> list[ExpertLoad]:
        """Wait for all loads that are running. Returns those that failed."""
        ended = [load.settle() for load in list(self._device.pending.values())]
        for load in ended:
            self.retire(load, None)
        return [load for load in ended if load.error is not None]

    def close(self) -> None:
        self._workers.close()
        if self._copies:
            self._copies.close()

    def _cancel(self, load: ExpertLoad) -> bool:
        """Withdraw a prefetch that has not started. False when it has."""
        if load.task is None or not self._workers.withdraw(load.task):
            return False
        load.finish(WeightsError(f"expert {load.key}: load called off"))
        return True

    def _fill_host(self, key: Key, keys: Iterator[Key], done: Callable[[Key, int], None]) -> None:
        load = ExpertLoad(key)
        entry = self._host.acquire(key, load)
        if entry is not None:
            try:
                if entry.load is load and self._host.claim(entry):
                    self._read_claimed(entry, load)
                    done(key, load.read_bytes)
            finally:
                self._host.release(entry)
        self.fill_host(keys, done)

    def _fill(self, load: ExpertLoad, fence: Any, device_only: bool) -> None:
        load.started_s = time.perf_counter()
        slot, key = load.slot, load.key
        assert slot is not None
        try:
            own_read = ExpertLoad(key)
            if self._device.shared:
                self._refer(load, own_read)
                return
            target = self._device.record(key, slot)
            entry = self._host.find(key) if device_only else self._host.acquire(key, own_read)
            if entry is None:
                self._fill_past_host(load, target, fence)
            else:
                self._fill_from(entry, own_read, load, target, fence)
                if device_only:
                    self._host.drop(key)
        except CoterieError as problem:
            self.failed = True
            load.finish(problem)
        except Exception as problem:
            self.failed = True
            load.finish(_typed(f"expert {key} could not be loaded", problem))

    def _fill_from(
        self, entry: HostEntry, own_read: ExpertLoad, load: ExpertLoad, target: Tensor, fence: Any
    ) -> None:
        try:
            self._await_entry(entry, own_read, load)
            self._copy(entry.record, load, target, fence)
        finally:
            self._host.release(entry)

    def _refer(self, load: ExpertLoad, own_read: ExpertLoad) -> None:
        """The host tier has room for all experts: let the slot refer to its record."""
        entry = self._host.acquire(load.key, own_read)
        assert entry is not None
        try:
            self._await_entry(entry, own_read, load)
            self._finish(load, entry.record)
        finally:
            self._host.release(entry)

    def _await_entry(self, entry: HostEntry, own_read: ExpertLoad, load: ExpertLoad) -> None:
        """Return when an acquired entry has its bytes; `load` records whether this load read
        them."""
        source = entry.load
        # the load that asked for a read counts it
        load.host_hit = source is not own_read
        if source is not None:
            if self._host.claim(entry):
                self._read_claimed(entry, source)
            source.wait()
            load.read_bytes = 0 if load.host_hit else source.read_bytes

    def _fill_past_host(self, load: ExpertLoad, target: Tensor, fence: Any) -> None:
        """Read from disk into the slot; the host tier has no place for it."""
        self._host.missed(load.key[0])
        if self._copies is None:
            load.read_bytes = self._store.read(load.key, target)
            self._finish(load, target)
            return
        staging = self._copies.take()
        try:
            load.read_bytes = self._store.read(load.key, staging[: target.numel()])
            self._copy(staging, load, target, fence)
        finally:
            self._copies.put_back(staging)

    def _copy(self, source: Tensor, load: ExpertLoad, target: Tensor, fence: Any) -> None:
        size = target.numel()
        if self._copies is None:
            # ctypes lets other threads run meanwhile, and starts no threads of its own
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
            self._finish(load, target)
            return
        layout = self._store.layout(load.key[0])
        load.event = self._copies.copy(source[:size], target, fence, layout)
        self._finish(load, target)
        # the source may be reused only when the copy is over
        load.event.synchronize()

    def _finish(self, load: ExpertLoad, record: Tensor) -> None:
        assert load.slot is not None
        load.moved_bytes = record.numel()
        self._device.filled(load.key, load.slot, record)
        load.finish()

    def _read_entry(self, entry: HostEntry, load: ExpertLoad) -> None:
        if self._host.claim(entry):
            self._read_claimed(entry, load)

    def _read_claimed(self, entry: HostEntry, load: ExpertLoad) -> None:
        load.started_s = time.perf_counter()
        try:
            load.read_bytes = self._store.read(entry.key, entry.record)
        except CoterieError as problem:
            load.finish(problem)
        except Exception as problem:
            load.finish(_typed(f"expert {entry.key} could not be read", problem))
        else:
            self._host.filled(entry)
            load.finish()


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
        # one thread at a time fills the buffer of arriving records
        self._lock = threading.Lock()
        for index in range(depth):
            self._staging.put(self._arena.view(index * slot_bytes, slot_bytes))
        self._arrange = _arranger()
        # a record as the store has it, before it is arranged; the stream orders its uses
        self._arriving = torch.empty(slot_bytes, dtype=torch.uint8, device=device)

    def fence(self) -> Any:
        """Everything the computing stream was given so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def take(self) -> Tensor:
        return self._staging.get()

    def put_back(self, staging: Tensor) -> None:
        self._staging.put(staging)

    def copy(self, source: Tensor, target: Tensor, fence: Any, layout: ExpertLayout) -> Any:
        """A store's record into a slot, arranged for the device's kernels if they support it."""
        with self._lock, torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            if device_record(layout) is None:
                target.copy_(source, non_blocking=True)
            else:
                arriving = self._arriving[: len(source)]
                arriving.copy_(source, non_blocking=True)
                self._arrange(layout, arriving, target)
            return self._stream.record_event()

    def close(self) -> None:
        self._stream.synchronize()
        while not self._staging.empty():
            self._staging.get()
        self._arena.close()


def _arranger() -> Callable[[ExpertLayout, Tensor, Tensor], None]:
    """One kernel where triton is installed, or its twin in torch."""
    try:
        from coterie.kernels.triton.arrange import arrange_record
    except ImportError:
        return arrange
    return arrange_record


class LoadWorkers:
    """Threads that run tasks: urgent ones in order, others when no urgent one waits or runs. All
    start here, or as many as the system has memory for: a step that found no thread for its load
    would wait for ever."""

    def __init__(self, size: int) -> None:
        self._urgent: deque[LoadTask] = deque()
        self._other: deque[LoadTask] = deque()
        self._urgent_running = self._other_running = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = started(self._work, "experts", size)

    @property
    def idle(self) -> bool:
        return not (self._urgent or self._other or self._urgent_running or self._other_running)

    def put(self, task: LoadTask, *, urgent: bool) -> None:
        with self._changed:
            if self._closed and not urgent:
                return
            (self._urgent if urgent else self._other).append(task)
            self._changed.notify()

    def withdraw(self, task: LoadTask) -> bool:
        """Remove a task that is not urgent. False when it has started."""
        with self._changed:
            if task not in self._other:
                return False
            self._other.remove(task)
            return True

    def stop(self) -> None:
        """The threads end after running and urgent tasks; the others are dropped. Does not wait."""
        with self._changed:
            self._closed = True
            self._other.clear()
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def _next(self) -> tuple[LoadTask, bool] | None:
        if self._urgent:
            self._urgent_running += 1
            return self._urgent.popleft(), True
        if self._other and not self._urgent_running:
            self._other_running += 1
            return self._other.popleft(), False
        return None

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    while (taken := self._next()) is None and not self._closed:
                        self._changed.wait()
                if taken is None:
                    return
                task, urgent = taken
                try:
                    task()
                finally:
                    with self._changed:
                        self._urgent_running -= urgent
                        self._other_running -= not urgent
                        if self._other and not (self._urgent or self._urgent_running):
                            self._changed.notify()
                del task, taken
