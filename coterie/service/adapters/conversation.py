"""Which adapters a conversation will want next: those it used, then those that used to follow.

Remembers keys and adapters of a bounded number of conversations, no words. Says what to load ahead;
whether there is time for it, others know.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

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

    recent: OrderedDict[str, Stack] = field(default_factory=OrderedDict)
    last: str = ""
    foreseen: frozenset[str] = frozenset()


class ConversationPredictor:
    def __init__(self, registry: MetricRegistry) -> None:
        self._memories: OrderedDict[tuple[str, str], ConversationState] = OrderedDict()
        # by key: what came after it, in any conversation
        self._after: OrderedDict[str, Counter[str]] = OrderedDict()
        self._stacks: OrderedDict[str, Stack] = OrderedDict()
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
            memory = self._memories[request.tenant, request.session] = ConversationState()
            _forget(self._memories, MAX_CONVERSATIONS)
            self._size.set(len(self._memories))
        else:
            if key:
                (self._hits if key in memory.foreseen else self._misses).add()
            self._follows(memory.last, key)
        self._memories.move_to_end((request.tenant, request.session))
        memory.last = key
        if key:
            self._stacks[key] = memory.recent[key] = adapters
            self._stacks.move_to_end(key)
            memory.recent.move_to_end(key)
            _forget(self._stacks, MAX_KNOWN)
            _forget(memory.recent, MAX_RECENT)

    def ahead(self, request: InferenceRequest) -> list[Stack]:
        """What the next turn is likely to run on, likeliest first."""
        if request.session is None:
            return []
        memory = self._memories.get((request.tenant, request.session))
        if memory is None:
            return []
        likely = dict(reversed(memory.recent.items()))
        for key in self._followers(memory.last):
            likely.setdefault(key, self._stacks[key])
        chosen = dict(list(likely.items())[:MAX_AHEAD])
        memory.foreseen = frozenset(chosen)
        return list(chosen.values())

    def _follows(self, before: str, after: str) -> None:
        counts = self._after.setdefault(before, Counter())
        counts[after] += 1
        self._after.move_to_end(before)
        _forget(self._after, MAX_KNOWN)
        if len(counts) > MAX_FOLLOWERS:
            del counts[min(counts, key=counts.__getitem__)]

    def _followers(self, key: str) -> list[str]:
        counts = self._after.get(key, Counter[str]())
        least = max(MIN_COUNT, MIN_SHARE * counts.total())
        return [
            found
            for found, count in counts.most_common(MAX_AHEAD)
            if count >= least and found in self._stacks
        ]


def _forget(known: OrderedDict[Any, Any], limit: int) -> None:
    while len(known) > limit:
        known.popitem(last=False)
