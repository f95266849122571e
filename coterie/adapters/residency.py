"""Which stacks are on the device, who uses them, and which are evicted when memory is needed.

The rule (LRU-2 with protection):
- A stack that is in use stays where it is.
- Of the others, the one whose second last use is longest ago is evicted first: a stack used once
  goes before one that is used again and again, however recent that use was. The use counts of a
  stack are kept after its eviction.
- Memory must be contiguous: of all runs of neighbouring blocks that are large enough, the run whose
  most useful stack is least useful is evicted.
- The protection: a stack that was loaded but not used yet is not evicted while it is being
  requested, until the stack that needs the memory has waited for HOLD_S. So stacks in a queue
  cannot evict each other before they were used.

Bookkeeping only. The caller must hold `changed` unless a docstring says otherwise.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.core.errors import CoterieError, InternalError
from coterie.core.lru import LruCache
from coterie.core.plan import AdapterChoice
from coterie.kernels.patch import PatchStack

HOLD_S = 2.0
# a stack that was requested this recently is being requested
RECENT_S = 1.0

Clock = Callable[[], float]


@dataclass(slots=True)
class StackFacts:
    """What is known of a stack without its bytes. A use is numbered by the takes of all stacks."""

    key: str
    adapters: tuple[AdapterChoice, ...]
    num_virtual_tokens: int
    # of its files; its size on the device is known once it is composed
    nbytes: int
    last_use: int = 0
    previous_use: int = 0

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(choice.digest for choice in self.adapters)


class StackEntry:
    """A stack that is resident, being loaded, or failed to load."""

    __slots__ = (
    "block", "error", "event", "facts", "is_new", "last_request_s", "source", "stack", "state",
    "users", "waiting_since_s",
    )  # fmt: skip

    def __init__(self, facts: StackFacts, now_s: float, source: str) -> None:
        self.facts = facts
        # where it was when it was requested: "host" or "disk"
        self.source = source
        self.state = "loading"
        self.users = 0
        self.stack: PatchStack | None = None
        self.block: SlabBlock | None = None
        self.error: CoterieError | None = None
        # CUDA: event of the copy, until the first user has waited for it
        self.event: Any = None
        self.last_request_s = now_s
        # not taken so far
        self.is_new = True
        # when it first did not fit; for a failed stack: when it failed
        self.waiting_since_s = now_s

    @property
    def key(self) -> str:
        return self.facts.key


class StackResidency:
    def __init__(self, slab: AdapterSlab, max_stacks: int, clock: Clock = time.monotonic) -> None:
        self.slab, self.clock = slab, clock
        self.changed = threading.Condition()
        self.entries: dict[str, StackEntry] = {}
        self.evictions = 0
        # increases when a stack becomes ready or is evicted
        self.version = 0
        # the lowest slot is used first, so that tables by slot stay short
        self._slots = list(range(max_stacks - 1, -1, -1))
        self._max_stacks = max_stacks
        self._uses = 0

    def take(self, entry: StackEntry) -> None:
        facts = entry.facts
        self._uses += 1
        facts.previous_use, facts.last_use = facts.last_use, self._uses
        entry.users += 1
        entry.is_new = False

    def release(self, entry: StackEntry) -> bool:
        """Whether this was its last user."""
        if entry.users <= 0:
            raise InternalError(f"adapters {entry.key[:12]}: released more often than taken")
        entry.users -= 1
        return entry.users == 0

    def make_room(self, entry: StackEntry, nbytes: int, waited_s: float) -> int | None:
        """Gives `entry` a block and returns its slot; None if there is not enough memory now."""
        victims = self._victims(nbytes, guarded=waited_s < HOLD_S)
        if victims is None:
            return None
        for key in victims:
            self.evict(self.entries[key])
        entry.block = self.slab.reserve(nbytes, entry.key)
        if entry.block is None:
            raise InternalError("slab: room that was made is not there")
        return self._slots.pop()

    def evict(self, entry: StackEntry) -> None:
        self.free(entry)
        del self.entries[entry.key]
        self.evictions += 1
        self.version += 1

    def free(self, entry: StackEntry) -> None:
        """Frees its block and slot."""
        if entry.users or entry.block is None or entry.stack is None:
            raise InternalError(f"adapters {entry.key[:12]}: in use, and told to go")
        self.slab.free(entry.block)
        self._slots.append(entry.stack.slot)
        entry.block = entry.stack = None

    def cancel(self, entry: StackEntry, slot: int) -> None:
        """Frees the block and slot of `make_room` if they were not filled."""
        if entry.block is not None:
            self.slab.free(entry.block)
            entry.block = None
        self._slots.append(slot)

    def _victims(self, nbytes: int, *, guarded: bool) -> list[str] | None:
        now_s = self.clock()

        def cost(key: str) -> tuple[float, ...] | None:
            entry = self.entries[key]
            if entry.users or entry.state != "ready":
                return None
            if guarded and entry.is_new and now_s - entry.last_request_s < RECENT_S:
                return None
            return (entry.facts.previous_use, entry.facts.last_use)

        victims = self.slab.cheapest(nbytes, cost)
        if victims is None or victims or self._slots:
            return victims
        idle = [(c, key) for key in self.entries if (c := self._cost_of(key, cost)) is not None]
        return [min(idle)[1]] if idle else None

    def _cost_of(
        self, key: str, cost: Callable[[str], tuple[float, ...] | None]
    ) -> tuple[float, ...] | None:
        return None if self.entries[key].block is None else cost(key)

    @property
    def resident(self) -> int:
        """Number of stacks on the device. Needs no lock."""
        return self._max_stacks - len(self._slots)

    def check(self) -> None:
        """Every block has its entry; every resident entry has its block and its own slot."""
        with self.changed:
            self.slab.check()
            placed = [entry for entry in self.entries.values() if entry.stack is not None]
            slots = [entry.stack.slot for entry in placed if entry.stack is not None]
            if len(set(slots) | set(self._slots)) != len(slots) + len(self._slots):
                raise InternalError("adapters: two stacks share a slot")
            used = sum(entry.block.nbytes for entry in placed if entry.block is not None)
            if used > self.slab.used_bytes:
                raise InternalError("adapters: a resident stack has no bytes")


# adapters whose load times are reported one by one
MAX_LISTED = 64
STAGES = ("disk", "compose", "place")


@dataclass(slots=True)
class LoadTimes:
    """One adapter's loads; a stack's times count for each of its adapters."""

    loads: int = 0
    disk_s: float = 0.0
    compose_s: float = 0.0
    place_s: float = 0.0


class LoadHistory:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._adapters: LruCache[str, LoadTimes] = LruCache(MAX_LISTED)

    def record_read(self, digest: str, seconds: float) -> None:
        self.counts["disk"] += 1
        self.seconds["disk"] += seconds
        self._of(digest).disk_s += seconds

    def record_cached(self) -> None:
        self.counts["host"] += 1

    def record_load(self, digests: Iterable[str], compose_s: float, place_s: float) -> None:
        self.counts["loads"] += 1
        self.seconds["compose"] += compose_s
        self.seconds["place"] += place_s
        for digest in dict.fromkeys(digests):
            times = self._of(digest)
            times.loads += 1
            times.compose_s += compose_s
            times.place_s += place_s

    def latest(self) -> dict[str, LoadTimes]:
        """The most recently loaded adapters."""
        return dict(self._adapters.items())

    def _of(self, digest: str) -> LoadTimes:
        return self._adapters.get_or_make(digest, LoadTimes)


# alignment of blocks: enough for the widest loads of every device
ALIGN = 256

Cost = TypeVar("Cost", bound=tuple[float, ...])


class SlabBlock:
    """`owner` is a stack's key; empty = free."""

    __slots__ = ("nbytes", "offset", "owner")

    def __init__(self, offset: int, nbytes: int, owner: str = "") -> None:
        self.offset, self.nbytes, self.owner = offset, nbytes, owner


class AdapterSlab:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes // ALIGN * ALIGN
        self.used_bytes = 0
        # on a CPU no memory is used until it is written
        self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._blocks = [SlabBlock(0, self.nbytes)] if self.nbytes else []

    def view(self, block: SlabBlock) -> Tensor:
        return self._bytes[block.offset : block.offset + block.nbytes]

    def reserve(self, nbytes: int, owner: str) -> SlabBlock | None:
        """The first free block that is large enough; None if there is none."""
        need = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        for index, block in enumerate(self._blocks):
            if block.owner or block.nbytes < need:
                continue
            if block.nbytes > need:
                rest = SlabBlock(block.offset + need, block.nbytes - need)
                self._blocks.insert(index + 1, rest)
                block.nbytes = need
            block.owner = owner
            self.used_bytes += need
            return block
        return None

    def free(self, block: SlabBlock) -> None:
        if not block.owner:
            raise InternalError("slab: a block is freed twice")
        index = self._blocks.index(block)
        block.owner = ""
        self.used_bytes -= block.nbytes
        if index + 1 < len(self._blocks) and not self._blocks[index + 1].owner:
            block.nbytes += self._blocks.pop(index + 1).nbytes
        if index and not self._blocks[index - 1].owner:
            self._blocks[index - 1].nbytes += block.nbytes
            del self._blocks[index]

    def cheapest(self, nbytes: int, cost: Callable[[str], Cost | None]) -> list[str] | None:
        """Owners to evict so that `nbytes` fit in one piece: of all runs of neighbours that are
        large enough, the one whose most expensive owner is cheapest. `cost` None = must not be
        evicted. None if there is no such run."""
        best: tuple[tuple[float, ...], list[str]] | None = None
        costs = {block.owner: cost(block.owner) for block in self._blocks if block.owner}
        for owners in self._runs(nbytes, costs):
            worst = max((costs[owner] or () for owner in owners), default=())
            if best is None or (worst, len(owners)) < (best[0], len(best[1])):
                best = (worst, owners)
        return None if best is None else best[1]

    def _runs(self, nbytes: int, costs: dict[str, Cost | None]) -> Iterator[list[str]]:
        """The shortest run that starts at each block."""
        for first in range(len(self._blocks)):
            width, owners = 0, []
            for block in self._blocks[first:]:
                if block.owner:
                    if costs[block.owner] is None:
                        break
                    owners.append(block.owner)
                width += block.nbytes
                if width >= nbytes:
                    yield owners
                    break

    def close(self) -> None:
        self._blocks.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def check(self) -> None:
        """Blocks cover the buffer without gaps, free blocks are merged, and the sum is correct."""
        at, was_free, used = 0, False, 0
        for block in self._blocks:
            if block.offset != at or block.nbytes <= 0 or (was_free and not block.owner):
                raise InternalError("slab: blocks do not add up")
            at += block.nbytes
            was_free = not block.owner
            used += block.nbytes if block.owner else 0
        if at != self.nbytes or used != self.used_bytes:
            raise InternalError("slab: bytes do not add up")
