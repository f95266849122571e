"""Predicts which adapters a conversation uses next: those it used, then those that often followed.

Stores the keys and adapters of a limited number of conversations, no text. The result says what to
load in advance; the caller decides whether there is time for it.
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
# stacks that are stored per conversation, and how many are predicted
MAX_RECENT = 4
MAX_AHEAD = 2
# a stack that followed less often than this, or in a smaller share of cases, followed by chance
MIN_COUNT = 2
MIN_SHARE = 0.25

Stack = tuple[AdapterChoice, ...]


@dataclass(slots=True)
class ConversationState:
    """One conversation: its stacks by key, the latest last. The key "" is the base model alone."""

    recent: LruCache[str, Stack] = field(default_factory=lambda: LruCache(MAX_RECENT))
    last: str = ""
    predicted: frozenset[str] = frozenset()


class ConversationPredictor:
    def __init__(self, registry: MetricRegistry) -> None:
        self._states: LruCache[tuple[str, str], ConversationState] = LruCache(MAX_CONVERSATIONS)
        # key -> counts of the keys that came after it, in any conversation
        self._after: LruCache[str, Counter[str]] = LruCache(MAX_KNOWN)
        self._stacks: LruCache[str, Stack] = LruCache(MAX_KNOWN)
        self._hits = registry.value("coterie_conversation_turns", "hit")
        self._misses = registry.value("coterie_conversation_turns", "miss")
        self._size = registry.value("coterie_conversations")

    def turn(self, request: InferenceRequest, adapters: Stack) -> None:
        """Note that a turn starts with these adapters. Ignores requests without a session."""
        if request.session is None:
            return
        key = stack_key(adapters)
        state = self._states.get((request.tenant, request.session))
        if state is None:
            state = ConversationState()
            self._states.put((request.tenant, request.session), state)
            self._size.set(len(self._states))
        else:
            if key:
                (self._hits if key in state.predicted else self._misses).add()
            self._count_successor(state.last, key)
        state.last = key
        if key:
            self._stacks.put(key, adapters)
            state.recent.put(key, adapters)

    def ahead(self, request: InferenceRequest) -> list[Stack]:
        """The stacks that the next turn is likely to use, the likeliest first."""
        if request.session is None:
            return []
        state = self._states.peek((request.tenant, request.session))
        if state is None:
            return []
        likely = dict(reversed(state.recent.items()))
        for key, stack in self._followers(state.last):
            likely.setdefault(key, stack)
        chosen = dict(list(likely.items())[:MAX_AHEAD])
        state.predicted = frozenset(chosen)
        return list(chosen.values())

    def _count_successor(self, before: str, after: str) -> None:
        counts = self._after.get_or_make(before, Counter)
        counts[after] += 1
        if len(counts) > MAX_FOLLOWERS:
            del counts[min(counts, key=counts.__getitem__)]

    def _followers(self, key: str) -> list[tuple[str, Stack]]:
        counts = self._after.peek(key) or Counter[str]()
        least = max(MIN_COUNT, MIN_SHARE * counts.total())
        likely = [after for after, count in counts.most_common(MAX_AHEAD) if count >= least]
        stacks = ((after, self._stacks.peek(after)) for after in likely)
        return [(after, stack) for after, stack in stacks if stack is not None]
