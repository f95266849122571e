"""The prefix cache: full blocks found again by the hash chain of everything before them.

A block's digest covers its owner (lane, adapters, tenant) and every token from the start, so equal
digests mean equal KV. Unowned blocks stay until their room is needed: least recently used first,
blocks of kept sessions last.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from coterie.core.plan import AdapterChoice
from coterie.engine.blocks import BlockPool

DIGEST_BYTES = 16


def root_digest(lane: str, adapters: Sequence[AdapterChoice], tenant: str) -> bytes:
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
    chain: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Append the digests of the full blocks up to `num_blocks` that `chain` lacks."""
    parent = chain[-1] if chain else root
    for index in range(len(chain), num_blocks):
        data = array("q", tokens[index * block_size : (index + 1) * block_size]).tobytes()
        parent = blake2b(parent + data, digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


class PrefixCache:
    """Hands out blocks of `pool`, forgetting cached ones when none is free."""

    def __init__(self, pool: BlockPool, *, enabled: bool, max_sessions: int) -> None:
        self._pool = pool
        self._enabled = enabled
        self._max_sessions = max_sessions
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        # unowned cached blocks, oldest first; those of kept sessions apart
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        # session -> its blocks, least recently finished first
        self._sessions: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()
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

    def match(self, chain: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `chain`. Changes nothing."""
        blocks = []
        for digest in chain:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unowned(self, blocks: Sequence[int]) -> int:
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

    def keep(self, session: Hashable, chain: Sequence[bytes]) -> None:
        """`chain`'s cached blocks become the session's entry, in place of its former one."""
        blocks = tuple(self.match(chain))
        if not blocks or not self._max_sessions:
            return
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1
            if block in self._idle:
                del self._idle[block]
                self._kept.add(block)
        if session in self._sessions:
            self._unpin(self._sessions.pop(session))
        self._sessions[session] = blocks
        if len(self._sessions) > self._max_sessions:
            self._unpin(self._sessions.popitem(last=False)[1])
        self._list_ends()

    def check(self, tables: Sequence[list[int]]) -> None:
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
        assert pins == self._pins and len(self._sessions) <= self._max_sessions

    def _evict(self) -> bool:
        """Forget one unowned block; sessions give theirs up when nothing else is left."""
        while not self._idle and self._kept:
            self._unpin(self._sessions.popitem(last=False)[1])
            self._list_ends()
        if not self._idle:
            return False
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        self._pool.free(block)
        return True

    def _unpin(self, blocks: Sequence[int]) -> None:
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
