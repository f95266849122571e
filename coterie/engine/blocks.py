"""A lane's KV blocks: the fixed pool, the prefix cache over it, and who gets which block.

`BlockPool` counts owners and knows nothing of what a block holds, `BlockTables` has the running
sequences' blocks as one array, as kernels want them, `PrefixCache` finds full blocks again by the
hash chain of everything before them, and `KVSpace` joins the three: the scheduler asks it alone.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from coterie.core.lane import LaneConfig
from coterie.core.lru import LruCache
from coterie.core.plan import AdapterChoice
from coterie.engine.sequence import Sequence


class BlockPool:
    """A block is free, owned (one or more owners), or unowned but held by the prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        """A free block with one owner. The caller checked `num_free`."""
        block = self._free.pop()
        self.owners[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner; also revives a block that only the prefix cache held."""
        self.owners[block] += 1

    def release(self, block: int) -> bool:
        """One owner less. True: nobody owns it now, and the caller frees or keeps it."""
        left = self.owners[block] - 1
        assert left >= 0, f"block {block} released more often than acquired"
        self.owners[block] = left
        return left == 0

    def free(self, block: int) -> None:
        assert self.owners[block] == 0, f"block {block} freed while owned"
        self._free.append(block)

    def check(self, tables: Iterable[list[int]], held: set[int]) -> None:
        """Every block is exactly one of free, owned as often as `tables` say, or `held`."""
        counts = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, owners in enumerate(self.owners):
            assert owners == counts[block], f"block {block}: {owners} owners, {counts[block]} known"
            states = (block in free) + (owners > 0) + (block in held)
            assert states == 1, f"block {block} is in {states} states"


class BlockTables:
    """Row r lists the blocks of the running sequence that holds r; unused entries are 0."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.array: NDArray[np.int32] = np.zeros((num_rows, width), dtype=np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        return self._free.pop()

    def release(self, row: int) -> None:
        self.array[row] = 0
        self._free.append(row)


DIGEST_BYTES = 16


def root_digest(lane: str, adapters: Seq[AdapterChoice], tenant: str) -> bytes:
    """Where a chain starts. Every part is length-prefixed, so no two inputs read the same."""
    hasher = blake2b(digest_size=DIGEST_BYTES, person=b"coterie-kv")
    parts = [lane, tenant]
    for adapter in adapters:
        parts += [adapter.digest, float(adapter.weight).hex()]
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def extend_chain(
    chain: list[bytes], root: bytes, tokens: Seq[int], block_size: int, num_blocks: int
) -> None:
    """Append the digests of the full blocks up to `num_blocks` that `chain` lacks."""
    parent = chain[-1] if chain else root
    for index in range(len(chain), num_blocks):
        data = array("q", tokens[index * block_size : (index + 1) * block_size]).tobytes()
        parent = blake2b(parent + data, digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


class PrefixCache:
    """Hands out blocks of `pool`, forgetting cached ones when none is free.

    A block's digest covers its owner (lane, adapters, tenant) and every token from the start, so
    equal digests mean equal KV. Unowned blocks stay until their room is needed: least recently used
    first, blocks of kept sessions last.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool, max_sessions: int) -> None:
        self._pool = pool
        self._enabled = enabled
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # unowned cached blocks, oldest first; those of kept sessions apart
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        # session -> its blocks, least recently finished first
        self._sessions: LruCache[Hashable, tuple[int, ...]] = LruCache(max_sessions)
        self._pins: dict[int, int] = {}
        # hex digests of the sessions' ends, newest last, rebuilt when they change
        self._ends: tuple[str, ...] = ()

    @property
    def num_available(self) -> int:
        """Blocks `take` can still hand out."""
        return self._pool.num_free + len(self._idle) + len(self._kept)

    @property
    def num_cached(self) -> int:
        return len(self._digest_of)

    @property
    def session_ends(self) -> tuple[str, ...]:
        return self._ends

    def match(self, chain: Seq[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `chain`. Changes nothing."""
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
        """One more owner of a matched block."""
        if self._pool.owners[block] == 0:
            self._idle.pop(block, None)
            self._kept.discard(block)
        self._pool.share(block)

    def take(self) -> int | None:
        """A block with one owner, evicting if need be; None when every block is owned."""
        if not self._pool.num_free and not self._evict():
            return None
        return self._pool.acquire()

    def release(self, block: int) -> None:
        if not self._pool.release(block):
            return
        if block not in self._digest_of:
            self._pool.free(block)
        elif block in self._pins:
            self._kept.add(block)
        else:
            self._idle[block] = None

    def insert(self, block: int, digest: bytes) -> None:
        """`block` (owned, full, computed) can be found by `digest`. A twin keeps the place."""
        if self._enabled and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def keep(self, session: Hashable, chain: Seq[bytes]) -> None:
        """`chain`'s cached blocks become the session's entry, in place of its former one."""
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
        self._list_ends()

    def check(self, tables: Seq[list[int]]) -> None:
        """Raises AssertionError when the books do not add up."""
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
        """Forget one unowned block; sessions give theirs up when nothing else is left."""
        while not self._idle and self._kept:
            self._unpin(self._sessions.pop_oldest())
            self._list_ends()
        if not self._idle:
            return False
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        self._pool.free(block)
        return True

    def _unpin(self, blocks: Seq[int]) -> None:
        # to the old end, head before tail, so that the tail of the chain is forgotten first
        for block in blocks:
            self._pins[block] -= 1
            if self._pins[block] == 0:
                del self._pins[block]
                if block in self._kept:
                    self._kept.discard(block)
                    self._idle[block] = None
                    self._idle.move_to_end(block, last=False)

    def _list_ends(self) -> None:
        self._ends = tuple(self._digest_of[blocks[-1]].hex() for blocks in self._sessions.values())


class KVSpace:
    """Which blocks a sequence gets, shares, copies and gives back."""

    def __init__(self, config: LaneConfig) -> None:
        config.require_quota()
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(
            self.pool, enabled=config.prefix_cache, max_sessions=config.kv_cache_slots
        )
        self.tables = BlockTables(config.max_sequences, config.table_width)
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._prefix_cache = config.prefix_cache

    def num_missing(self, sequence: Sequence) -> int:
        """Unowned blocks it takes to admit `sequence`: its tokens and one step more."""
        reused = self._match(sequence)
        return self._num_needed(sequence) - len(reused) + self.cache.num_unowned(reused)

    def admit(self, sequence: Sequence, spare_blocks: int) -> bool:
        """Reuse cached blocks, allocate the rest; False, and nothing changed, when it cannot.

        `spare_blocks` are left for the sequences that run already.
        """
        if not self.tables.num_free:
            return False
        reused = self._match(sequence)
        missing = self._num_needed(sequence) - len(reused)
        if missing + self.cache.num_unowned(reused) + spare_blocks > self.cache.num_available:
            return False
        sequence.row = self.tables.acquire()
        for block in reused:
            self.cache.share(block)
        self._append(sequence, reused)
        self._append(sequence, [self._take() for _ in range(missing)])
        sequence.num_computed = len(reused) * self.block_size
        if self._reads_cache(sequence) and not sequence.num_preemptions:
            self.prefix_query_tokens += len(sequence.tokens)
            self.prefix_hit_tokens += sequence.num_computed
        return True

    def num_stored(self, sequence: Sequence) -> int:
        """Tokens of its prompt, soft ones left out, that the same prompt finds once this one is
        computed, and could not before: never the last, which is computed each time."""
        if not self._prefix_cache:
            return 0
        num_full = (sequence.num_prompt - 1) // self.block_size
        self._hash(sequence, num_full)
        known = len(self.cache.match(sequence.chain[:num_full])) * self.block_size
        return max(num_full * self.block_size - max(known, sequence.num_virtual), 0)

    def is_ready(self, sequence: Sequence) -> bool:
        """Its next token can be written without another block."""
        index = sequence.num_computed // self.block_size
        blocks = sequence.blocks
        return index < len(blocks) and self.pool.owners[blocks[index]] == 1

    def extend(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Make the next token's place writable: a new block, or its own copy of a shared one."""
        index = sequence.num_computed // self.block_size
        block = self.cache.take()
        if block is None:
            return False
        if index == len(sequence.blocks):
            self._append(sequence, [block])
            return True
        shared = sequence.blocks[index]
        if sequence.num_computed % self.block_size:
            copies.append((shared, block))
        self.cache.release(shared)
        sequence.blocks[index] = block
        self.tables.array[sequence.row, index] = block
        return True

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """`child` shares everything `parent` has computed; False when no table row is free."""
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
        """`count` more tokens have their KV: full blocks can be found from now on."""
        before = sequence.num_computed // self.block_size
        sequence.num_computed += count
        after = sequence.num_computed // self.block_size
        if after > before and self._prefix_cache:
            self._hash(sequence, after)
            for index in range(before, after):
                self.cache.insert(sequence.blocks[index], sequence.chain[index])

    def keep(self, session: Hashable, sequence: Sequence) -> None:
        """The sequence ended well: its blocks become its session's."""
        self.cache.keep(session, sequence.chain[: sequence.num_computed // self.block_size])

    def release(self, sequence: Sequence) -> None:
        """Give everything back; full blocks stay findable until their room is needed."""
        # the tail first: it is then forgotten before the head that others may share
        for block in reversed(sequence.blocks):
            self.cache.release(block)
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
            assert table == sequence.blocks + [0] * unused
            assert sequence.num_computed <= len(sequence.blocks) * self.block_size

    def _num_needed(self, sequence: Sequence) -> int:
        positions = min(len(sequence.tokens) + 1, sequence.max_total)
        return -(-positions // self.block_size)

    def _reads_cache(self, sequence: Sequence) -> bool:
        # logprobs of the prompt need every position computed
        return self._prefix_cache and sequence.draw.prompt_logprobs is None

    def _match(self, sequence: Sequence) -> list[int]:
        """Reusable blocks; the last token is always computed, for its logits."""
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
        self.tables.array[sequence.row, held : held + len(blocks)] = blocks

    def _take(self) -> int:
        block = self.cache.take()
        assert block is not None, "admission counted blocks that are not there"
        return block
