"""A lane's KV space: which blocks a sequence gets, shares, copies and gives back.

Joins pool, prefix cache and block tables; the scheduler asks, this module answers.
"""

from __future__ import annotations

from collections.abc import Hashable

from coterie.engine.blocks import BlockPool, BlockTables
from coterie.engine.lane import LaneConfig
from coterie.engine.prefix import PrefixCache, extend_chain
from coterie.engine.sequence import Sequence


class KVSpace:
    def __init__(self, config: LaneConfig) -> None:
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
