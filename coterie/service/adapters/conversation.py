"""Which adapters a conversation will want next: those it used, then those that used to follow.

Remembers keys and adapters of a bounded number of conversations, no words. Says what to load ahead;
whether there is time for it, others know.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from coterie.core.lru import LruCache
from coterie.core.plan import AdapterChoice, stack_key
from coterie.core.request import InferenceRequest
from coterie.obs.metrics import MetricRegistry

MAX_CONVERSATIONS = 4096
# stacks whose successors are counted, and how many successors of each
MAX_KNOWN = 1024
MAX_FOLLOWERS = 32
# stacks of one conversation that are remembered, and how many are foreseen
MAX_RECENT = 4
MAX_AHEAD = 2
# a stack that followed less often, or in a smaller share of cases, followed by chance
MIN_COUNT = 2
MIN_SHARE = 0.25

Stack = tuple[AdapterChoice, ...]


@dataclass(slots=True)
class ConversationState:
    """One conversation: its stacks by key, the latest last ("" = the base alone)."""

    recent: LruCache[str, Stack] = field(default_factory=lambda: LruCache(MAX_RECENT))
    last: str = ""
    foreseen: frozenset[str] = frozenset()


class ConversationPredictor:
    def __init__(self, registry: MetricRegistry) -> None:
        self._memories: LruCache[tuple[str, str], ConversationState] = LruCache(MAX_CONVERSATIONS)
        # by key: what came after it, in any conversation
        self._after: LruCache[str, Counter[str]] = LruCache(MAX_KNOWN)
        self._stacks: LruCache[str, Stack] = LruCache(MAX_KNOWN)
        self._hits = registry.value("coterie_conversation_turns", "hit")
        self._misses = registry.value("coterie_conversation_turns", "miss")
        self._size = registry.value("coterie_conversations")

    def turn(self, request: InferenceRequest, adapters: Stack) -> None:
        """A turn begins with these. Without a session's name there is no conversation."""
        if request.session is None:
            return
        key = stack_key(adapters)
        memory = self._memories.get((request.tenant, request.session))
        if memory is None:
            memory = ConversationState()
            self._memories.put((request.tenant, request.session), memory)
            self._size.set(len(self._memories))
        else:
            if key:
                (self._hits if key in memory.foreseen else self._misses).add()
            self._follows(memory.last, key)
        memory.last = key
        if key:
            self._stacks.put(key, adapters)
            memory.recent.put(key, adapters)

    def ahead(self, request: InferenceRequest) -> list[Stack]:
        """What the next turn is likely to run on, likeliest first."""
        if request.session is None:
            return []
        memory = self._memories.peek((request.tenant, request.session))
        if memory is None:
            return []
        likely = dict(reversed(memory.recent.items()))
        for key, stack in self._followers(memory.last):
            likely.setdefault(key, stack)
        chosen = dict(list(likely.items())[:MAX_AHEAD])
        memory.foreseen = frozenset(chosen)
        return list(chosen.values())

    def _follows(self, before: str, after: str) -> None:
        counts = self._after.get_or_make(before, Counter)
        counts[after] += 1
        if len(counts) > MAX_FOLLOWERS:
            del counts[min(counts, key=counts.__getitem__)]

    def _followers(self, key: str) -> list[tuple[str, Stack]]:
        counts = self._after.peek(key) or Counter[str]()
        least = max(MIN_COUNT, MIN_SHARE * counts.total())
        likely = [found for found, count in counts.most_common(MAX_AHEAD) if count >= least]
        stacks = ((found, self._stacks.peek(found)) for found in likely)
        return [(found, stack) for found, stack in stacks if stack is not None]
