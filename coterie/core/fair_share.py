"""Virtual token counters: tokens that each tenant got, by its share, so that the next place goes to
who got least.

A tenant that returns starts at the lowest counter of those that are here: it cannot save up what it
did not use. After "Fairness in Serving Large Language Models" (Sheng et al., 2024).
"""

from __future__ import annotations

from collections import defaultdict

from coterie.core.lru import LruCache

# counters of tenants that are not here are kept for so many, the last ones to leave
MAX_ABSENT = 1024


class VirtualTokenCounters:
    def __init__(self) -> None:
        # only of tenants that are here
        self._tokens: dict[str, float] = {}
        self._here: defaultdict[str, int] = defaultdict(int)
        self._absent: LruCache[str, float] = LruCache(MAX_ABSENT)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def enter(self, tenant: str) -> None:
        """A request of this tenant came; each is followed by one `leave`."""
        if not self._here[tenant]:
            known = self._absent.pop(tenant) or 0.0
            self._tokens[tenant] = max(known, min(self._tokens.values(), default=known))
        self._here[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]
            self._absent.put(tenant, self._tokens.pop(tenant))

    def charge(self, tenant: str, num_tokens: float, share: float = 1.0) -> None:
        """`num_tokens` were computed for it. A tenant with twice the share pays half."""
        if tenant in self._tokens:
            self._tokens[tenant] += num_tokens / share

    def of(self, tenant: str) -> float:
        return self._tokens.get(tenant, 0.0)
