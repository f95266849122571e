"""Which stacks lie where on the device, who uses them, and who goes when room is needed.

The rule (LRU-2 with a guard):
- A stack somebody has taken stays where it is.
- Of the others, those go whose last use but one is longest ago: a stack used once goes before one
  that is used again and again, however recently. How often a stack was used outlives its eviction.
- Only neighbours make room: of all runs of blocks that are wide enough, the one whose most useful
  stack is least useful.
- The guard: a stack that was brought in and not taken yet is spared while somebody asks for it,
  until whoever needs the room has waited for HOLD_S. So stacks in a queue cannot push each other
  out before they were of use.

Bookkeeping alone; everything is called with `changed` held unless it says otherwise.
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
# asked for this recently = somebody asks for it
ASKED_S = 1.0

Clock = Callable[[], float]


@dataclass(slots=True)
class StackFacts:
    """What is known of a stack without its bytes. Uses are counted in takes of any stack."""

    key: str
    adapters: tuple[AdapterChoice, ...]
    num_virtual_tokens: int
    # of its files: what it takes on the device is known when it was composed
    nbytes: int
    last_use: int = 0
    use_before: int = 0

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(choice.digest for choice in self.adapters)


class StackEntry:
    """A stack that is resident, on its way, or failed on it."""

    __slots__ = (
        "asked_s", "block", "error", "event", "facts", "is_new", "source", "stack", "state",
        "users", "waits_since_s",
    )  # fmt: skip

    def __init__(self, facts: StackFacts, now_s: float, source: str) -> None:
        self.facts = facts
        # where it was when it was asked for: "host" or "disk"
        self.source = source
        self.state = "loading"
        self.users = 0
        self.stack: PatchStack | None = None
        self.block: SlabBlock | None = None
        self.error: CoterieError | None = None
        # CUDA: of the copy, until someone has waited for it
        self.event: Any = None
        self.asked_s = now_s
        # nobody has taken it
        self.is_new = True
        # when it first found no room; since when it failed
        self.waits_since_s = now_s

    @property
    def key(self) -> str:
        return self.facts.key


class StackResidency:
    def __init__(self, slab: AdapterSlab, max_stacks: int, clock: Clock = time.monotonic) -> None:
        self.slab, self.clock = slab, clock
        self.changed = threading.Condition()
        self.entries: dict[str, StackEntry] = {}
        self.evictions = 0
        # grows when a stack becomes ready or goes
        self.version = 0
        # lowest first, so that tables by slot stay short
        self._slots = list(range(max_stacks - 1, -1, -1))
        self._max_stacks = max_stacks
        self._uses = 0

    def take(self, entry: StackEntry) -> None:
        facts = entry.facts
        self._uses += 1
        facts.use_before, facts.last_use = facts.last_use, self._uses
        entry.users += 1
        entry.is_new = False

    def release(self, entry: StackEntry) -> bool:
        """Whether that was its last user."""
        if entry.users <= 0:
            raise InternalError(f"adapters {entry.key[:12]}: released more often than taken")
        entry.users -= 1
        return entry.users == 0

    def make_room(self, entry: StackEntry, nbytes: int, waited_s: float) -> int | None:
        """Give `entry` a block and answer its slot; None when there is no room now."""
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
        self.give_back(entry)
        del self.entries[entry.key]
        self.evictions += 1
        self.version += 1

    def give_back(self, entry: StackEntry) -> None:
        """Its block and slot are free again."""
        if entry.users or entry.block is None or entry.stack is None:
            raise InternalError(f"adapters {entry.key[:12]}: in use, and told to go")
        self.slab.free(entry.block)
        self._slots.append(entry.stack.slot)
        entry.block = entry.stack = None

    def cancel(self, entry: StackEntry, slot: int) -> None:
        """What `make_room` gave, and was not filled."""
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
            if guarded and entry.is_new and now_s - entry.asked_s < ASKED_S:
                return None
            return (entry.facts.use_before, entry.facts.last_use)

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
        """Stacks on the device. Needs no lock."""
        return self._max_stacks - len(self._slots)

    def check(self) -> None:
        """Every block has its entry, every resident entry its block and a slot of its own."""
        with self.changed:
            self.slab.check()
            placed = [entry for entry in self.entries.values() if entry.stack is not None]
            slots = [entry.stack.slot for entry in placed if entry.stack is not None]
            if len(set(slots) | set(self._slots)) != len(slots) + len(self._slots):
                raise InternalError("adapters: two stacks share a slot")
            used = sum(entry.block.nbytes for entry in placed if entry.block is not None)
            if used > self.slab.used_bytes:
                raise InternalError("adapters: a resident stack has no bytes")


# adapters that are told one by one
MAX_TOLD = 64
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
        self._adapters: LruCache[str, LoadTimes] = LruCache(MAX_TOLD)

    def read(self, digest: str, seconds: float) -> None:
        self.counts["disk"] += 1
        self.seconds["disk"] += seconds
        self._of(digest).disk_s += seconds

    def found(self) -> None:
        self.counts["host"] += 1

    def loaded(self, digests: Iterable[str], compose_s: float, place_s: float) -> None:
        self.counts["loads"] += 1
        self.seconds["compose"] += compose_s
        self.seconds["place"] += place_s
        for digest in dict.fromkeys(digests):
            times = self._of(digest)
            times.loads += 1
            times.compose_s += compose_s
            times.place_s += place_s

    def told(self) -> dict[str, LoadTimes]:
        """The adapters loaded last."""
        return dict(self._adapters.items())

    def _of(self, digest: str) -> LoadTimes:
        return self._adapters.get_or_make(digest, LoadTimes)


# blocks begin and end on this many bytes: what the widest loads of any device ask for
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
        # costs nothing on a CPU until it is written
        self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._blocks = [SlabBlock(0, self.nbytes)] if self.nbytes else []

    def view(self, block: SlabBlock) -> Tensor:
        return self._bytes[block.offset : block.offset + block.nbytes]

    def reserve(self, nbytes: int, owner: str) -> SlabBlock | None:
        """The first hole that is wide enough; None when there is none."""
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
        wide enough, the one whose costliest owner costs least. `cost` None = not to be evicted.
        None when no such run exists."""
        best: tuple[tuple[float, ...], list[str]] | None = None
        costs = {block.owner: cost(block.owner) for block in self._blocks if block.owner}
        for owners in self._runs(nbytes, costs):
            worst = max((costs[owner] or () for owner in owners), default=())
            if best is None or (worst, len(owners)) < (best[0], len(best[1])):
                best = (worst, owners)
        return None if best is None else best[1]

    def _runs(self, nbytes: int, costs: dict[str, Cost | None]) -> Iterator[list[str]]:
        """The shortest run from each block on."""
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
        """Blocks cover the buffer without gaps, no two holes touch, and the count is right."""
        at, was_free, used = 0, False, 0
        for block in self._blocks:
            if block.offset != at or block.nbytes <= 0 or (was_free and not block.owner):
                raise InternalError("slab: blocks do not add up")
            at += block.nbytes
            was_free = not block.owner
            used += block.nbytes if block.owner else 0
        if at != self.nbytes or used != self.used_bytes:
            raise InternalError("slab: bytes do not add up")
