"""A lane's KV blocks: the fixed pool, the prefix cache, and which sequence gets which block.

`BlockPool` counts the owners of each block. `BlockTables` has the blocks of all running sequences
in one array, as kernels need them. `PrefixCache` finds full blocks by the hash chain of all tokens
before and in them. `KVSpace` joins the three; the scheduler uses only `KVSpace`. Lanes of one block
size may share the memory of one cache, each with its own blocks and rows (`SharedCache`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.lane import LaneConfig
from coterie.core.lru import LruCache
from coterie.core.prefix import MAX_PUBLISHED, SHORT_BYTES, extend_chain, is_published
from coterie.engine.lent_blocks import LentBlocks
from coterie.engine.sequence import Sequence

if TYPE_CHECKING:
    from coterie.moe.runtime.memory_trade import MemoryTrade


class BlockPool:
    """A block is free, owned (once or more), or without owner but in the prefix cache."""

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        """Its blocks have the numbers from `first` on."""
        self.num_blocks, self._first = num_blocks, first
        self.owners = [0] * (first + num_blocks)
        self._free = list(range(first + num_blocks - 1, first - 1, -1))
        # those that somebody else has now
        self._absent: set[int] = set()

    @property
    def num_absent(self) -> int:
        return len(self._absent)

    def remove(self, blocks: Iterable[int]) -> None:
        """Free blocks that somebody else gets."""
        gone = set(blocks)
        self._absent |= gone
        left = [block for block in self._free if block not in gone]
        assert len(self._free) - len(left) == len(gone), "a block was removed that is not free"
        self._free = left

    def add(self, blocks: Iterable[int]) -> None:
        """Absent blocks are free from now on, and used after those that already are."""
        back = sorted(blocks, reverse=True)
        self._absent.difference_update(back)
        self._free = back + self._free

    def sort(self) -> None:
        """Give the lowest free blocks first."""
        self._free.sort(reverse=True)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        """A free block with one owner. The caller checked `num_free`."""
        block = self._free.pop()
        self.owners[block] = 1
        return block

    def acquire_all(self, count: int) -> list[int]:
        """The same blocks as `count` calls of `acquire` give."""
        first = len(self._free) - count
        blocks = self._free[first:]
        blocks.reverse()
        del self._free[first:]
        for block in blocks:
            self.owners[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add an owner; also to a block that only the prefix cache kept."""
        self.owners[block] += 1

    def release(self, block: int) -> bool:
        """Remove an owner. True if it has no owner now: then the caller frees or keeps it."""
        left = self.owners[block] - 1
        assert left >= 0, f"block {block} released more often than acquired"
        self.owners[block] = left
        return left == 0

    def release_all(self, blocks: Seq[int]) -> None:
        """Remove an owner of each, in order, and free those without one."""
        owners, free = self.owners, self._free
        for block in blocks:
            left = owners[block] = owners[block] - 1
            assert left >= 0, f"block {block} released more often than acquired"
            if not left:
                free.append(block)

    def free(self, block: int) -> None:
        assert self.owners[block] == 0, f"block {block} freed while owned"
        self._free.append(block)

    def check(self, tables: Iterable[list[int]], held: set[int]) -> None:
        """Check that each block is one of: free, owned as often as in `tables`, `held`."""
        counts = Counter(block for table in tables for block in table)
        free, absent = set(self._free), self._absent
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block in range(self._first, self._first + self.num_blocks):
            owners = self.owners[block]
            assert owners == counts[block], f"block {block}: {owners} owners, {counts[block]} known"
            states = (block in free) + (owners > 0) + (block in held) + (block in absent)
            assert states == 1, f"block {block} is in {states} states"


class BlockTables:
    """Row r has the blocks of the running sequence with row r; unused entries are 0."""

    def __init__(self, array: NDArray[np.int32], rows: range) -> None:
        """`rows` of `array`; the others belong to other lanes."""
        self.array = array
        self._free = list(reversed(rows))

    @staticmethod
    def empty(num_rows: int, width: int) -> BlockTables:
        return BlockTables(np.zeros((num_rows, width), dtype=np.int32), range(num_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        return self._free.pop()

    def release(self, row: int) -> None:
        self.array[row] = 0
        self._free.append(row)


class PrefixCache:
    """Allocates blocks of `pool`, and evicts cached blocks if none is free.

    The digest of a block covers its scope (lane, adapters, tenant) and all tokens from the start,
    so equal digests mean equal KV. Blocks without owner stay until their memory is needed: the
    least recently used are evicted first, blocks of kept sessions last.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool, max_sessions: int) -> None:
        self._pool = pool
        self._enabled = enabled
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # cached blocks without owner, oldest first; those of kept sessions are in the second
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        # session -> its blocks, least recently finished first
        self._sessions: LruCache[Hashable, tuple[int, ...]] = LruCache(max_sessions)
        self._pins: dict[int, int] = {}
        # short digests of cached blocks at the depths that are published, least recently used first
        self._published: OrderedDict[bytes, None] = OrderedDict()
        # the same as a value; None = not up to date
        self._digests: frozenset[bytes] | None = frozenset()
        # what experts lend; None: nothing
        self.lent: LentBlocks | None = None

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` can still return."""
        return self.num_present + (0 if self.lent is None else self.lent.num_left)

    @property
    def num_present(self) -> int:
        """The same without those that experts would have to lend first."""
        return self._pool.num_free + self.num_idle

    @property
    def num_idle(self) -> int:
        """Number of cached blocks without owner."""
        return len(self._idle) + len(self._kept)

    @property
    def num_cached(self) -> int:
        return len(self._digest_of)

    @property
    def digests(self) -> frozenset[bytes]:
        """Short digests of cached prefixes, at some depths: with them others can estimate what a
        prompt would find here. The same object until it changes."""
        if self._digests is None:
            self._digests = frozenset(self._published)
        return self._digests

    def match(self, chain: Seq[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `chain`."""
        blocks = []
        for digest in chain:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unowned(self, blocks: Seq[int]) -> int:
        return sum(self._pool.owners[block] == 0 for block in blocks)

    def share(self, block: int) -> None:
        """Add an owner to a matched block."""
        if self._pool.owners[block] == 0:
            self._idle.pop(block, None)
            self._kept.discard(block)
        self._pool.share(block)

    def take(self) -> int | None:
        """A block with one owner; evicts a cached block if needed. None if all blocks are owned."""
        if not self._pool.num_free and not self._evict() and not self._borrow(1):
            return None
        return self._pool.acquire()

    def take_all(self, count: int) -> list[int]:
        """So many blocks with one owner each. The caller checked `num_available`."""
        while self._pool.num_free < count:
            evicted = self._evict() or self._borrow(count - self._pool.num_free)
            assert evicted, "admission counted blocks that are not there"
        return self._pool.acquire_all(count)

    def _borrow(self, count: int) -> bool:
        return self.lent is not None and self.lent.take(count)

    def release(self, block: int) -> None:
        if not self._pool.release(block):
            return
        if block not in self._digest_of:
            self._pool.free(block)
        elif block in self._pins:
            self._kept.add(block)
        else:
            self._idle[block] = None

    def release_all(self, blocks: Seq[int]) -> None:
        if self._digest_of:
            for block in blocks:
                self.release(block)
        else:
            # nothing is cached: what nobody owns is free
            self._pool.release_all(blocks)

    def insert(self, block: int, digest: bytes, depth: int) -> None:
        """Let `block` (owned, full, computed; the `depth`-th of its chain) be found by `digest`.
        If another block with the digest is already cached, that one stays."""
        if self._enabled and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            if is_published(depth):
                self._published[digest[:SHORT_BYTES]] = None
                if len(self._published) > MAX_PUBLISHED:
                    self._published.popitem(last=False)
                self._digests = None

    def used(self, digest: bytes) -> None:
        """Note that a prefix with this digest was reused."""
        short = digest[:SHORT_BYTES]
        if short in self._published:
            self._published.move_to_end(short)

    def keep(self, session: Hashable, chain: Seq[bytes]) -> None:
        """Make the cached blocks of `chain` the session's entry, instead of its previous one."""
        blocks = tuple(self.match(chain))
        if not blocks or not self._sessions.limit:
            return
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1
            if block in self._idle:
                del self._idle[block]
                self._kept.add(block)
        self._unpin(self._sessions.pop(session) or ())
        for oldest in self._sessions.put(session, blocks):
            self._unpin(oldest)

    def keeps(self, blocks: Iterable[int]) -> bool:
        """Whether a session keeps some of them."""
        return any(block in self._kept for block in blocks)

    def drop(self, blocks: Iterable[int]) -> None:
        """Forget what is cached in blocks without owner: they are free."""
        for block in blocks:
            while block in self._kept:
                self._unpin(self._sessions.pop_oldest())
            if block in self._idle:
                del self._idle[block]
                self._forget(block)

    def check(self, tables: Seq[list[int]]) -> None:
        """Raises AssertionError if the counts are inconsistent."""
        self._pool.check(tables, set(self._idle) | self._kept)
        assert not self._kept & set(self._idle)
        assert {b: d for d, b in self._block_of.items()} == self._digest_of
        assert all(block in self._digest_of for block in (*self._idle, *self._kept, *self._pins))
        assert all(block in self._pins for block in self._kept)
        assert not any(block in self._pins for block in self._idle)
        pins: dict[int, int] = {}
        for blocks in self._sessions.values():
            for block in blocks:
                pins[block] = pins.get(block, 0) + 1
        assert pins == self._pins and len(self._sessions) <= self._sessions.limit

    def _evict(self) -> bool:
        """Evict one block without owner; blocks of sessions only if there are no others."""
        while not self._idle and self._kept:
            self._unpin(self._sessions.pop_oldest())
        if not self._idle:
            return False
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        return True

    def _forget(self, block: int) -> None:
        digest = self._digest_of.pop(block)
        del self._block_of[digest]
        if self._published.pop(digest[:SHORT_BYTES], False) is None:
            self._digests = None
        self._pool.free(block)

    def _unpin(self, blocks: Seq[int]) -> None:
        # put them at the old end, the head first, so that the tail of the chain is evicted first
        for block in blocks:
            self._pins[block] -= 1
            if self._pins[block] == 0:
                del self._pins[block]
                if block in self._kept:
                    self._kept.discard(block)
                    self._idle[block] = None
                    self._idle.move_to_end(block, last=False)


class KVSpace:
    """Allocates, shares, copies and frees the blocks of sequences."""

    def __init__(
        self,
        config: LaneConfig,
        tables: BlockTables | None = None,
        first_block: int = 0,
        trade: MemoryTrade | None = None,
    ) -> None:
        """`tables` and `first_block`: the lane's part of a KV cache that several lanes share.
        `trade`: experts lend the blocks behind its own, and tables have the blocks' places."""
        config.require_quota()
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks, first_block)
        self.cache = PrefixCache(
            self.pool, enabled=config.prefix_cache, max_sessions=config.kv_cache_slots
        )
        self.tables = tables or BlockTables.empty(config.max_sequences, config.table_width)
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._prefix_cache = config.prefix_cache
        # by block: what kernels find it by; None: its number
        self._places: NDArray[np.int32] | None = None
        if trade is not None:
            self._places = trade.first_cells
            # by a cache that is not used any more
            for slab in sorted(trade.lent):
                trade.give_back(slab)
            self.pool.remove(range(trade.layout.kv.own, config.num_blocks))
            self.cache.lent = LentBlocks(trade, self.pool)

    def ended_step(self) -> None:
        """Give back what experts have lent, if it was not needed for a while."""
        if self.cache.lent is not None:
            self.cache.lent.ended_step(self.cache)

    def _place(self, block: int) -> int:
        return block if self._places is None else int(self._places[block])

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks without owner that `sequence` needs: for its tokens and one more step."""
        reused = self._match(sequence)
        return self._num_needed(sequence) - len(reused) + self.cache.num_unowned(reused)

    def admit(self, sequence: Sequence, spare_blocks: int) -> bool:
        """Reuse cached blocks and allocate the rest. False if there are too few; then nothing
        changes.

        `spare_blocks` are left for the running sequences.
        """
        if not self.tables.num_free:
            return False
        reused = self._match(sequence)
        missing = self._num_needed(sequence) - len(reused)
        if missing + self.cache.num_unowned(reused) + spare_blocks > self.cache.num_available:
            return False
        sequence.row = self.tables.acquire()
        for block, digest in zip(reused, sequence.chain, strict=False):
            self.cache.share(block)
            self.cache.used(digest)
        self._append(sequence, reused + self.cache.take_all(missing))
        sequence.num_computed = len(reused) * self.block_size
        if self._reads_cache(sequence) and not sequence.num_preemptions:
            self.prefix_query_tokens += len(sequence.tokens)
            self.prefix_hit_tokens += sequence.num_computed
        return True

    def num_stored(self, sequence: Sequence) -> int:
        """Number of prompt tokens, without soft tokens, that this prompt adds to the cache. The
        last token is never counted: it is always computed."""
        if not self._prefix_cache:
            return 0
        num_full = (sequence.num_prompt - 1) // self.block_size
        self._hash(sequence, num_full)
        known = len(self.cache.match(sequence.chain[:num_full])) * self.block_size
        return max(num_full * self.block_size - max(known, sequence.num_virtual), 0)

    def is_ready(self, sequence: Sequence, position: int) -> bool:
        """Whether its token at `position` can be written without another block."""
        index = position // self.block_size
        blocks = sequence.blocks
        return index < len(blocks) and self.pool.owners[blocks[index]] == 1

    def extend(self, sequence: Sequence, position: int, copies: list[tuple[int, int]]) -> bool:
        """Make `position`, that of its next token, writable: add a block, or copy a shared one."""
        index = position // self.block_size
        block = self.cache.take()
        if block is None:
            return False
        if index == len(sequence.blocks):
            self._append(sequence, [block])
            return True
        shared = sequence.blocks[index]
        if position % self.block_size:
            copies.append((self._place(shared), self._place(block)))
        self.cache.release(shared)
        sequence.blocks[index] = block
        self.tables.array[sequence.row, index] = self._place(block)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let `child` share what `parent` has computed. False if no table row is free."""
        if not self.tables.num_free:
            return False
        child.row = self.tables.acquire()
        shared = parent.blocks[: -(-parent.num_computed // self.block_size)]
        for block in shared:
            self.pool.share(block)
        self._append(child, shared)
        child.num_computed = parent.num_computed
        child.chain = list(parent.chain)
        return True

    def computed(self, sequence: Sequence, count: int) -> None:
        """Note that `count` more tokens have KV: full blocks can be found from now on."""
        before = sequence.num_computed // self.block_size
        sequence.num_computed += count
        after = sequence.num_computed // self.block_size
        if after > before and self._prefix_cache:
            self._hash(sequence, after)
            for index in range(before, after):
                self.cache.insert(sequence.blocks[index], sequence.chain[index], index + 1)

    def keep(self, session: Hashable, sequence: Sequence) -> None:
        """The sequence ended normally: its blocks become those of its session."""
        self.cache.keep(session, sequence.chain[: sequence.num_computed // self.block_size])

    def release(self, sequence: Sequence) -> None:
        """Free everything. Full blocks stay cached until their memory is needed."""
        # the tail first, so that it is evicted before the head, which others may share
        sequence.blocks.reverse()
        self.cache.release_all(sequence.blocks)
        sequence.blocks.clear()
        sequence.num_computed = 0
        if sequence.row is not None:
            self.tables.release(sequence.row)
            sequence.row = None

    def check(self, sequences: list[Sequence]) -> None:
        self.cache.check([sequence.blocks for sequence in sequences])
        for sequence in sequences:
            if sequence.row is None:
                assert not sequence.blocks and not sequence.num_computed
                continue
            table = self.tables.array[sequence.row].tolist()
            unused = len(table) - len(sequence.blocks)
            assert table == [self._place(block) for block in sequence.blocks] + [0] * unused
            assert sequence.num_computed <= len(sequence.blocks) * self.block_size

    def _num_needed(self, sequence: Sequence) -> int:
        positions = min(len(sequence.tokens) + 1, sequence.max_total)
        return -(-positions // self.block_size)

    def _reads_cache(self, sequence: Sequence) -> bool:
        # logprobs of the prompt need every position computed
        return self._prefix_cache and sequence.draw.prompt_logprobs is None

    def _match(self, sequence: Sequence) -> list[int]:
        """The blocks to reuse. The last token is always computed, for its logits."""
        if not self._reads_cache(sequence):
            return []
        num_full = (len(sequence.tokens) - 1) // self.block_size
        self._hash(sequence, num_full)
        return self.cache.match(sequence.chain[:num_full])

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        chain = sequence.chain
        if len(chain) < num_blocks:
            extend_chain(chain, sequence.root, sequence.tokens, self.block_size, num_blocks)

    def _append(self, sequence: Sequence, blocks: list[int]) -> None:
        held = len(sequence.blocks)
        sequence.blocks += blocks
        places = blocks if self._places is None else self._places[blocks]
        self.tables.array[sequence.row, held : held + len(blocks)] = places


class SharedCache(NamedTuple):
    """A KV cache and block tables for lanes of one block size, each with its own part."""

    lanes: Seq[LaneConfig]
    tables: BlockTables

    @property
    def config(self) -> LaneConfig:
        """That of one lane as large as all of them."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        return replace(
            self.lanes[0],
            num_blocks=sum(lane.num_blocks for lane in self.lanes),
            max_sequences=sum(lane.max_sequences for lane in self.lanes),
            max_step_tokens=sum(lane.max_step_tokens for lane in self.lanes),
        )

    def spaces(self, trade: MemoryTrade | None = None) -> Iterator[tuple[LaneConfig, KVSpace]]:
        """`trade`: only with one lane."""
        row = block = 0
        for lane in self.lanes:
            rows = range(row, row + lane.max_sequences)
            yield lane, KVSpace(lane, BlockTables(self.tables.array, rows), block, trade)
            row, block = rows.stop, block + lane.num_blocks


def plan_caches(lanes: Seq[LaneConfig], *, shared: bool) -> list[SharedCache]:
    """One KV cache for each lane or, if `shared`, for all lanes with the same block size."""
    groups: dict[int, list[LaneConfig]] = {}
    for index, lane in enumerate(lanes):
        lane.require_quota()
        groups.setdefault(lane.block_size if shared else index, []).append(lane)
    return [
        SharedCache(
            some,
            BlockTables.empty(
                sum(lane.max_sequences for lane in some), max(lane.table_width for lane in some)
            ),
        )
        for some in groups.values()
    ]
