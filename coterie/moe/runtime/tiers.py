"""The two tiers above the disk: experts cached in host RAM, and fixed slots on the device.

A tier records which expert is in which slot and what is in use, and never holds more than its
slots. It does not read or copy (transfer.py does). The only choice it makes is which expert the
host tier evicts.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.core.errors import CoterieError, InternalError
from coterie.kernels.cpu.expert_mlp import RecordTable

if TYPE_CHECKING:
    from coterie.moe.store.base import ExpertStore, Key

LoadTask = Callable[[], None]


class ExpertLoad:
    """One expert's bytes on their way to one place: done, failed, or still to come."""

    __slots__ = (
        "_lock", "_queues", "done_s", "error", "event", "host_hit", "key", "moved_bytes",
        "read_bytes", "slot", "started_s", "task",
    )  # fmt: skip

    def __init__(self, key: Key, slot: int | None = None) -> None:
        self.key, self.slot = key, slot
        self.error: CoterieError | None = None
        self.read_bytes = self.moved_bytes = 0
        self.host_hit = False
        self.started_s = self.done_s = 0.0
        # CUDA: recorded behind the copy; a stream that reads the slot waits for it
        self.event: Any = None
        # what a load thread runs; it can be withdrawn until it starts
        self.task: LoadTask | None = None
        self._lock = threading.Lock()
        self._queues: list[SimpleQueue[ExpertLoad]] | None = []

    @property
    def done(self) -> bool:
        return self._queues is None

    def notify(self, queue: SimpleQueue[ExpertLoad]) -> None:
        """Put this into `queue` when it is done (now, if it is)."""
        with self._lock:
            if self._queues is not None:
                self._queues.append(queue)
                return
        queue.put(self)

    def finish(self, error: CoterieError | None = None) -> None:
        with self._lock:
            queues, self._queues = self._queues, None
            self.error, self.done_s = error, time.perf_counter()
        for queue in queues or ():
            queue.put(self)

    def settle(self) -> ExpertLoad:
        """Wait until it is done or has failed."""
        if not self.done:
            queue: SimpleQueue[ExpertLoad] = SimpleQueue()
            self.notify(queue)
            queue.get()
        return self

    def wait(self) -> ExpertLoad:
        self.settle()
        if self.error is not None:
            raise self.error
        return self


class HostEntry:
    """An expert's place in host RAM. It is pinned while a thread reads or writes it."""

    __slots__ = ("key", "load", "pins", "place", "reading", "record")

    def __init__(self, key: Key, place: int, record: Tensor, load: ExpertLoad) -> None:
        self.key, self.place, self.record = key, place, record
        self.pins = 1
        # None once the bytes are here
        self.load: ExpertLoad | None = load
        # a thread has claimed the read of its bytes
        self.reading = False


class HostTier:
    """A cache of the store in RAM; evicts the least recently used. All methods are thread-safe.

    With room for every expert nothing is evicted.
    """

    def __init__(self, store: ExpertStore, num_slots: int, *, pinned: bool = False) -> None:
        geometry = store.geometry
        self.num_slots = min(num_slots, geometry.total)
        self.complete = self.num_slots == geometry.total
        self._nbytes = {layer: store.layout(layer).nbytes for layer in geometry.layers}
        self._places = self._cut(store)
        self.budget_bytes = sum(nbytes for _, nbytes in self._places)
        self._arena = MemoryArena(self.budget_bytes, pinned)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._entries: OrderedDict[Key, HostEntry] = OrderedDict()
        self._changed = threading.Condition()
        self._ready: dict[int, set[int]] = {layer: set() for layer in geometry.layers}
        self.tables = {layer: RecordTable(geometry.num_experts) for layer in geometry.layers}
        # lookups that found an expert here (or being read), and those that had to read the disk
        self.hits: Counter[int] = Counter()
        self.misses: Counter[int] = Counter()
        self.evictions: Counter[int] = Counter()

    def _cut(self, store: ExpertStore) -> list[tuple[int, int]]:
        if not self.complete:
            return [(at * store.slot_bytes, store.slot_bytes) for at in range(self.num_slots)]
        # every expert has a place of exactly its size, in the order of keys
        places, offset = [], 0
        keys = store.geometry.keys()
        for layer, _ in keys:
            places.append((offset, self._nbytes[layer]))
            offset += self._nbytes[layer]
        self._home = {key: place for place, key in enumerate(keys)}
        return places

    def acquire(self, key: Key, load: ExpertLoad, *, block: bool = False) -> HostEntry | None:
        """Pin `key`'s entry, and make it for `load` if there is none; None when every slot is in
        use. An entry whose `load` is not None has no bytes yet: see `claim`."""
        with self._changed:
            while True:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.pins += 1
                    self._entries.move_to_end(key)
                    self.hits[key[0]] += 1
                    return entry
                place = self._make_room(key)
                if place is not None:
                    return self._enter(key, place, load)
                if not block:
                    return None
                self._changed.wait()

    def find(self, key: Key) -> HostEntry | None:
        """Pin `key`'s entry if its bytes are here. Counts a hit, never a miss."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is None or entry.load is not None:
                return None
            entry.pins += 1
            self._entries.move_to_end(key)
            self.hits[key[0]] += 1
            return entry

    def find_all(self, layer: int, experts: Sequence[int]) -> list[HostEntry] | None:
        """Pin all of these, or none if one is not here."""
        if not self._ready[layer].issuperset(experts):
            return None
        with self._changed:
            if not self._ready[layer].issuperset(experts):
                return None
            entries = [self._entries[layer, expert] for expert in experts]
            for entry in entries:
                entry.pins += 1
                if not self.complete:
                    self._entries.move_to_end(entry.key)
            self.hits[layer] += len(entries)
            return entries

    def holds(self, layer: int, experts: Sequence[int]) -> bool:
        """Whether the bytes of all of them are here."""
        return self._ready[layer].issuperset(experts)

    def ready(self, layer: int) -> frozenset[int]:
        """The experts of a layer whose bytes are here."""
        with self._changed:
            return frozenset(self._ready[layer])

    def claim(self, entry: HostEntry) -> bool:
        """Whether the caller must read this entry's bytes (True for one caller only)."""
        with self._changed:
            mine = entry.load is not None and not entry.reading
            entry.reading = entry.reading or mine
            self.misses[entry.key[0]] += mine
            return mine

    def missed(self, layer: int) -> None:
        """Count a read that does not go through this tier."""
        with self._changed:
            self.misses[layer] += 1

    def filled(self, entry: HostEntry) -> None:
        with self._changed:
            layer, expert = entry.key
            entry.load = None
            self.tables[layer].set(expert, entry.record)
            self._ready[layer].add(expert)

    def release(self, *entries: HostEntry) -> None:
        with self._changed:
            for entry in entries:
                entry.pins -= 1
                if entry.pins == 0 and entry.load is not None:
                    self._remove(entry)  # its read failed
            self._changed.notify_all()

    def drop(self, key: Key) -> None:
        """Remove `key` (unless it is in use), because the device holds it for good."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None and entry.pins == 0:
                self._remove(entry)

    def close(self) -> None:
        with self._changed:
            for entry in list(self._entries.values()):
                self._remove(entry)
        self._arena.close()

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return sum(self._places[entry.place][1] for entry in self._entries.values())

    def keys_in_use(self, wait_s: float) -> list[Key]:
        """Once there are none, or after so long: a load that has ended releases its entry a moment
        later."""

        def keys() -> list[Key]:
            return [entry.key for entry in self._entries.values() if entry.pins]

        with self._changed:
            self._changed.wait_for(lambda: not keys(), wait_s)
            return keys()

    def check(self) -> None:
        """Raise unless every place is free or has exactly one entry, and tables list what is
        here."""
        with self._changed:
            taken = [entry.place for entry in self._entries.values()]
            if sorted(taken + self._free) != list(range(self.num_slots)):
                raise InternalError("host tier: slots do not add up")
            here = {key for key, entry in self._entries.items() if entry.load is None}
            named = {(layer, e) for layer, experts in self._ready.items() for e in experts}
            if here != named:
                raise InternalError("host tier: a table names an expert that is not here")

    def _enter(self, key: Key, place: int, load: ExpertLoad) -> HostEntry:
        offset, _ = self._places[place]
        record = self._arena.view(offset, self._nbytes[key[0]])
        entry = self._entries[key] = HostEntry(key, place, record, load)
        return entry

    def _make_room(self, key: Key) -> int | None:
        if self.complete:
            place = self._home[key]
            self._free.remove(place)
            return place
        if not self._free:
            victim = next((e for e in self._entries.values() if e.pins == 0), None)
            if victim is None:
                return None
            self.evictions[victim.key[0]] += 1
            self._remove(victim)
        return self._free.pop()

    def _remove(self, entry: HostEntry) -> None:
        layer, expert = entry.key
        del self._entries[entry.key]
        self._free.append(entry.place)
        self._ready[layer].discard(expert)
        self.tables[layer].clear(expert)


class DeviceTier:
    """Slots of equal size on the device. On a machine without one they are a second arena in RAM,
    or, where the host tier holds every expert for good (`shared`), references to its records.

    `SlotMap` records what strategies have placed in a slot, this class what is really there. The
    engine's thread calls `begin`; the thread that filled a slot calls `filled`.
    """

    def __init__(
        self,
        store: ExpertStore,
        num_slots: int,
        device: torch.device,
        *,
        shared: bool = False,
        buffers: int = 0,
        beside: int = 0,
    ) -> None:
        """`buffers`: room for so many experts behind the slots, for steps with a prompt. `beside`:
        so many bytes behind these are not for experts."""
        self.num_slots, self.device, self.shared = num_slots, device, shared
        self.buffers = buffers
        self.budget_bytes = 0 if shared else (num_slots + buffers) * store.slot_bytes
        self._arena: MemoryArena | None = None
        total = self.budget_bytes + beside
        if device.type == "cpu":
            self._arena = MemoryArena(total)
            whole = self._arena.view(0, total)
        else:
            whole = torch.empty(total, dtype=torch.uint8, device=device)
        # all slots and buffers, one after another; and with what is beside them
        self.arena, self.memory = whole[: self.budget_bytes], whole
        size = self.slot_bytes = store.slot_bytes
        self._slots = [whole[at * size : (at + 1) * size] for at in range(num_slots)]
        self._nbytes = {layer: store.layout(layer).nbytes for layer in store.geometry.layers}
        self._keys: list[Key | None] = [None] * num_slots
        # running loads, by slot
        self.pending: dict[int, ExpertLoad] = {}
        geometry = store.geometry
        self._where: dict[Key, int] = {}
        self._lock = threading.Lock()
        self._ready: dict[int, set[int]] = {layer: set() for layer in geometry.layers}
        self.tables = {layer: RecordTable(geometry.num_experts) for layer in geometry.layers}
        self.evictions: Counter[int] = Counter()

    def record(self, key: Key, slot: int) -> Tensor:
        return self._slots[slot][: self._nbytes[key[0]]]

    def slot_of(self, key: Key) -> int | None:
        """The slot that holds (or is being filled with) `key`."""
        return self._where.get(key)

    def key_at(self, slot: int) -> Key | None:
        return self._keys[slot]

    def begin(self, key: Key, slot: int) -> None:
        """Reserve `slot` for `key`; it must not be read until `filled`."""
        self.vacate(slot, evicted=True)
        old = self._where.get(key)
        if old is not None:
            self.vacate(old)
        with self._lock:
            self._keys[slot], self._where[key] = key, slot

    def filled(self, key: Key, slot: int, record: Tensor) -> None:
        """The bytes are in `record`. Has no effect when `key` has another slot by now."""
        with self._lock:
            if self._where.get(key) == slot:
                self.tables[key[0]].set(key[1], record)
                self._ready[key[0]].add(key[1])

    def holds(self, layer: int, experts: tuple[int, ...]) -> bool:
        """Whether the bytes of all are here, or their copies are queued on the device's stream."""
        return self._ready[layer].issuperset(experts)

    def vacate(self, slot: int, *, evicted: bool = False) -> None:
        with self._lock:
            key = self._keys[slot]
            if key is None:
                return
            self._keys[slot] = None
            del self._where[key]
            self._ready[key[0]].discard(key[1])
            self.tables[key[0]].clear(key[1])
            self.evictions[key[0]] += evicted

    def keys(self) -> list[Key]:
        return list(self._where)

    def close(self) -> None:
        for slot in range(self.num_slots):
            self.vacate(slot)
        self._slots.clear()
        self.arena = self.memory = torch.empty(0, dtype=torch.uint8)
        if self._arena is not None:
            self._arena.close()

    def check(self) -> None:
        """Raise unless slots and keys agree in both directions."""
        named = {key: slot for slot, key in enumerate(self._keys) if key is not None}
        if named != self._where:
            raise InternalError("device tier: a slot is not where it is said to be")


PAGE = 4096
# below this size huge pages cost more memory by rounding than they give in speed
_HUGE_FROM_BYTES = 8 * 2**20

# flags of cudaHostRegister
_REGISTER_PORTABLE, _REGISTER_MAPPED = 1, 2

_log = logging.getLogger(__name__)


class MemoryArena:
    """`nbytes` of zeroed memory; the system gives each page when it is first written."""

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self.pinned = False
        if self.nbytes == 0:
            self._bytes = torch.empty(0, dtype=torch.uint8)
            return
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.nbytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        # the tensor keeps the mapping alive until the last view is deleted
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
        # by all threads: the driver would give the pages one after another
        self._bytes.view(-1, PAGE)[:, 0].zero_()
        # torch's pinned allocator rounds up to powers of two, which would exceed the budget
        flags = _REGISTER_PORTABLE | _REGISTER_MAPPED
        code = _cudart().cudaHostRegister(self._bytes.data_ptr(), self.nbytes, flags)
        self.pinned = int(code) == 0
        if not self.pinned:
            _log.warning("%d bytes of RAM could not be pinned: copies will be slower", self.nbytes)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
