"""Block pool, prefix chains, eviction order and sessions, each on its own."""

from __future__ import annotations

import pytest

from coterie.core.plan import AdapterChoice
from coterie.core.prefix import (
    MAX_PUBLISHED,
    PromptPrefixes,
    extend_chain,
    is_published,
    root_digest,
)
from coterie.engine.blocks import BlockPool, BlockTables, PrefixCache


def chain_of(tokens: list[int], root: bytes = b"r", block_size: int = 2) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, root, tokens, block_size, len(tokens) // block_size)
    return chain


def make_cache(num_blocks: int = 6, sessions: int = 2, enabled: bool = True) -> PrefixCache:
    return PrefixCache(BlockPool(num_blocks), enabled=enabled, max_sessions=sessions)


def fill(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Compute `tokens` in fresh blocks, as a sequence would."""
    blocks = []
    for depth, digest in enumerate(chain_of(tokens), 1):
        block = cache.take()
        assert block is not None
        cache.insert(block, digest, depth)
        blocks.append(block)
    return blocks


def give_back(cache: PrefixCache, blocks: list[int]) -> None:
    for block in reversed(blocks):
        cache.release(block)


def test_pool_counts_owners() -> None:
    pool = BlockPool(3)
    first, second = pool.acquire(), pool.acquire()
    pool.share(first)
    pool.check([[first, second], [first]], set())
    assert not pool.release(first) and pool.release(first) and pool.release(second)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(first)
    pool.free(first)
    pool.free(second)
    pool.check([], set())
    assert pool.num_free == 3


def test_check_finds_broken_books() -> None:
    leaked = BlockPool(2)
    leaked.acquire()
    with pytest.raises(AssertionError):
        leaked.check([], set())
    twice = BlockPool(2)
    twice.free(0)
    with pytest.raises(AssertionError, match="twice"):
        twice.check([], set())
    held = BlockPool(2)
    with pytest.raises(AssertionError, match="states"):
        held.check([], {1})


def test_tables_clear_a_released_row() -> None:
    tables = BlockTables.empty(2, 3)
    row = tables.acquire()
    tables.array[row, :2] = [4, 5]
    tables.release(row)
    assert not tables.array.any() and tables.num_free == 2


def test_chains_cover_everything_before_them() -> None:
    base = chain_of([1, 2, 3, 4])
    assert chain_of([1, 2, 3, 4, 5, 6])[:2] == base
    assert chain_of([9, 2, 3, 4])[1] != base[1]
    assert chain_of([3, 4])[0] != base[1]
    assert chain_of([1, 2, 3, 4], root=b"s")[0] != base[0]
    grown: list[bytes] = []
    for count in (1, 2):
        extend_chain(grown, b"r", [1, 2, 3, 4], 2, count)
    assert grown == base


def test_roots_tell_owners_apart() -> None:
    adapter, other = AdapterChoice("n", "d1"), AdapterChoice("n", "d2")
    heavier = AdapterChoice("n", "d1", 0.5)
    roots = [
        root_digest("lane", (), "t"),
        root_digest("lan", (), "et"),
        root_digest("lane", (), "u"),
        root_digest("other", (), "t"),
        root_digest("lane", (adapter,), "t"),
        root_digest("lane", (other,), "t"),
        root_digest("lane", (heavier,), "t"),
        root_digest("lane", (adapter, other), "t"),
        root_digest("lane", (other, adapter), "t"),
    ]
    assert len(set(roots)) == len(roots)
    # the name is only a label: the bytes decide
    assert root_digest("lane", (AdapterChoice("m", "d1"),), "t") == roots[4]


def test_match_is_the_longest_prefix() -> None:
    cache = make_cache()
    blocks = fill(cache, [1, 2, 3, 4, 5, 6])
    assert cache.match(chain_of([1, 2, 3, 4, 9, 9])) == blocks[:2]
    assert cache.match(chain_of([9, 2, 3, 4])) == []
    cache.check([blocks])


def test_a_disabled_cache_finds_nothing() -> None:
    cache = make_cache(enabled=False)
    blocks = fill(cache, [1, 2, 3, 4])
    assert cache.match(chain_of([1, 2, 3, 4])) == []
    give_back(cache, blocks)
    assert cache.num_cached == 0 and cache.num_available == 6


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    cache = make_cache(num_blocks=4, sessions=0)
    old = fill(cache, [1, 2, 3, 4])
    new = fill(cache, [5, 6, 7, 8])
    give_back(cache, old)
    give_back(cache, new)
    assert [cache.take() for _ in range(4)] == [old[1], old[0], new[1], new[0]]
    assert cache.take() is None and cache.num_cached == 0


def test_reuse_makes_recent() -> None:
    cache = make_cache(num_blocks=4, sessions=0)
    old, new = fill(cache, [1, 2]), fill(cache, [5, 6])
    give_back(cache, old)
    give_back(cache, new)
    cache.share(old[0])
    give_back(cache, old)
    taken = [cache.take() for _ in range(3)]
    assert taken[2] == new[0]
    cache.check([[block for block in taken if block is not None]])


def test_owned_blocks_are_never_evicted() -> None:
    cache = make_cache(num_blocks=3, sessions=1)
    blocks = fill(cache, [1, 2, 3, 4])
    cache.keep("s", chain_of([1, 2, 3, 4]))
    assert cache.take() is not None and cache.take() is None
    assert cache.match(chain_of([1, 2, 3, 4])) == blocks


def test_a_twin_does_not_take_the_place() -> None:
    cache = make_cache()
    first = fill(cache, [1, 2])
    second = fill(cache, [1, 2])
    assert cache.match(chain_of([1, 2])) == first
    give_back(cache, second)
    cache.check([first])
    assert cache.num_cached == 1


def test_sessions_outlive_others() -> None:
    cache = make_cache(num_blocks=4)
    kept = fill(cache, [1, 2, 3, 4])
    cache.keep("s", chain_of([1, 2, 3, 4]))
    give_back(cache, kept)
    other = fill(cache, [5, 6, 7, 8])
    give_back(cache, other)
    # the session is older, yet the others go first; then it gives way too
    assert {cache.take(), cache.take()} == set(other)
    assert cache.match(chain_of([1, 2, 3, 4])) == kept
    cache.check([other])
    assert [cache.take(), cache.take()] == [kept[1], kept[0]]
    assert not len(cache._sessions) and not cache.digests


def test_sessions_are_bounded_and_the_oldest_leaves() -> None:
    cache = make_cache(num_blocks=8, sessions=2)
    chains = {}
    for name, start in (("a", 1), ("b", 10), ("a", 20), ("c", 30)):
        tokens = [start, start, start + 1, start + 1]
        blocks = fill(cache, tokens)
        cache.keep(name, chain_of(tokens))
        give_back(cache, blocks)
        cache.check([])
        chains[name] = chain_of(tokens)
    # "a" was renewed after "b", so "b" is out
    assert [name for name, _ in cache._sessions.items()] == ["a", "c"]
    for _ in range(4):
        cache.take()
    assert cache.match(chains["b"]) == []
    assert len(cache.match(chains["a"])) == len(cache.match(chains["c"])) == 2


def test_sessions_may_share_blocks() -> None:
    cache = make_cache(num_blocks=5, sessions=2)
    blocks = fill(cache, [1, 2, 3, 4])
    cache.keep("a", chain_of([1, 2]))
    cache.keep("b", chain_of([1, 2, 3, 4]))
    give_back(cache, blocks)
    cache.keep("a", chain_of([1, 2]))
    cache.check([])
    for _ in range(3):
        cache.take()
    # "b" is the older one now: its own block goes, the shared one stays with "a"
    assert cache.take() == blocks[1]
    assert cache.match(chain_of([1, 2, 3, 4])) == blocks[:1]


def test_a_prompt_matches_what_is_published() -> None:
    assert [d for d in range(1, 50) if is_published(d)] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    cache = make_cache(num_blocks=16)
    root, tokens = root_digest("lane", (), "t"), list(range(20))
    chain: list[bytes] = []
    extend_chain(chain, root, tokens, 2, 10)
    for depth, digest in enumerate(chain, 1):
        block = cache.take()
        assert block is not None
        cache.insert(block, digest, depth)
    published = cache.digests
    assert published is cache.digests and len(published) == 6

    def cached(*prompt: int, lane: str = "lane", tenant: str = "t", block_size: int = 2) -> int:
        prefixes = PromptPrefixes(lane, (), tenant, prompt)
        return prefixes.num_cached(frozenset(published), block_size)

    # eight blocks are published, and of those a prompt shares as many as its tokens are equal
    assert cached(*tokens, 99) == 16 and cached(*tokens[:9], 99, 99) == 8
    # the last token is always computed
    assert cached(*tokens[:8]) == 6 and cached(0) == cached() == 0
    # another tenant, lane or block size finds nothing
    assert cached(*tokens, tenant="u") == cached(*tokens, lane="other") == 0
    assert cached(*tokens, block_size=4) == cached(*tokens, block_size=0) == 0


def test_published_digests_are_bounded_and_leave_with_their_blocks() -> None:
    cache = make_cache(num_blocks=2 * MAX_PUBLISHED)
    blocks = [fill(cache, [n, n])[0] for n in range(2 * MAX_PUBLISHED)]
    assert len(cache.digests) == MAX_PUBLISHED
    newest = chain_of([2 * MAX_PUBLISHED - 1] * 2)[0]
    assert newest[:8] in cache.digests and chain_of([0, 0])[0][:8] not in cache.digests
    # who is reused stays
    first_kept = chain_of([MAX_PUBLISHED] * 2)[0]
    cache.used(first_kept)
    give_back(cache, blocks)
    cache.take()
    # the newest was given back first, so it is evicted first
    assert newest[:8] not in cache.digests and len(cache.digests) == MAX_PUBLISHED - 1
    assert first_kept[:8] in cache.digests
    for _ in range(2 * MAX_PUBLISHED - 1):
        cache.take()
    assert cache.digests == frozenset()
