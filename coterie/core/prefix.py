"""Digests of prompt beginnings, block by block: how cached KV is found, in an engine and from the
gateway.

The digest of a block covers its scope (lane, adapters, tenant) and all tokens from the start, so
equal digests mean equal KV. A lane publishes the digests at a few depths only, 1, 2, 3, 4, 6, 8,
12 ... blocks: a long prompt has few of them, and the gateway still knows within a third how much of
a prompt is cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b

from coterie.core.plan import AdapterChoice

DIGEST_BYTES = 16
# of a published digest; two different ones among a thousand are equal once in 10^13 cases
SHORT_BYTES = 8
# most digests that a lane publishes; the least recently used are left out first
MAX_PUBLISHED = 512
# blocks of a prompt that the gateway hashes
MAX_DEPTH = 256


@lru_cache(maxsize=1024)
def root_digest(lane: str, adapters: tuple[AdapterChoice, ...], tenant: str) -> bytes:
    """The start of a hash chain. Every part has its length before it, so different inputs cannot
    give the same bytes."""
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
    """Append the missing digests of the full blocks, up to `num_blocks`."""
    parent = chain[-1] if chain else root
    for index in range(len(chain), num_blocks):
        data = array("q", tokens[index * block_size : (index + 1) * block_size]).tobytes()
        parent = blake2b(parent + data, digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


def is_published(depth: int) -> bool:
    """Whether the digest of a prefix of `depth` blocks is published: powers of two, and three times
    those."""
    odd = depth // 3 if depth % 3 == 0 else depth
    return depth > 0 and odd & (odd - 1) == 0


class PromptPrefixes:
    """The beginnings of one prompt that a lane may have published. Hashed when first needed."""

    def __init__(
        self, lane: str, adapters: tuple[AdapterChoice, ...], tenant: str, tokens: Sequence[int]
    ) -> None:
        self._scope = (lane, adapters, tenant)
        self._tokens = tokens
        # by block size: (tokens, short digest) of each published depth
        self._known: dict[int, list[tuple[int, bytes]]] = {}

    def first(self, block_size: int) -> bytes | None:
        """The digest of its first block; None if it has no full one."""
        digests = self._digests(block_size) if block_size else ()
        return digests[0][1] if digests else None

    def num_cached(self, published: Collection[bytes], block_size: int) -> int:
        """Tokens of the longest beginning that is among `published`."""
        if not published or not block_size:
            return 0
        found = 0
        for num_tokens, digest in self._digests(block_size):
            if digest not in published:
                break
            found = num_tokens
        return found

    def _digests(self, block_size: int) -> list[tuple[int, bytes]]:
        known = self._known.get(block_size)
        if known is None:
            # the last token of a prompt is always computed
            num_blocks = min((len(self._tokens) - 1) // block_size, MAX_DEPTH)
            chain: list[bytes] = []
            extend_chain(chain, root_digest(*self._scope), self._tokens, block_size, num_blocks)
            known = self._known[block_size] = [
                (depth * block_size, digest[:SHORT_BYTES])
                for depth, digest in enumerate(chain, 1)
                if is_published(depth)
            ]
        return known
