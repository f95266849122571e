"""Token-fair shares of tenants at admission, per specialist.

While a tenant that got fewer tokens was refused and waits, the others are admitted only if that
leaves some room: the next place is for who got least. With nobody refused there is no difference.
"""

from __future__ import annotations

from collections.abc import Callable

from coterie.core.fair_share import VirtualTokenCounters
from coterie.service.submit.load import ReplicaRequest

# a refused tenant counts as waiting for this long, if it was not admitted since
BACKLOG_S = 10.0
MAX_BACKLOG = 64
# a tenant is ahead if it got more than others by this many requests
LEAD_REQUESTS = 4.0
# room that is left for those behind: sequences, and share of those in flight
GUARD, GUARD_SHARE = 1, 0.5
# weight of the newest request in the mean size
NEWEST = 0.02


class TenantShares:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._now = clock
        self._counters = VirtualTokenCounters()
        # refused tenants and when, the oldest first; while here, they are in the counters too
        self._backlog: dict[str, float] = {}
        self._mean_tokens = 0.0

    def guard(self, tenant: str, num_in_flight: int) -> int:
        """Sequences for which there must be room besides a request of this tenant."""
        self._expire()
        behind = [self._counters.of(other) for other in self._backlog if other != tenant]
        # a tenant that is not here will start at the lowest counter
        if not behind or tenant not in self._counters:
            return 0
        if self._counters.of(tenant) - min(behind) <= LEAD_REQUESTS * self._mean_tokens:
            return 0
        return GUARD + int(GUARD_SHARE * num_in_flight)

    def is_ahead(self, tenant: str, other: str) -> bool:
        """Whether `tenant` got clearly more than `other`."""
        lead = self._counters.of(tenant) - self._counters.of(other)
        return lead > LEAD_REQUESTS * self._mean_tokens

    def admitted(self, request: ReplicaRequest) -> None:
        tenant, tokens = request.tenant, request.prompt_tokens + request.max_tokens
        self._counters.enter(tenant)
        if self._backlog.pop(tenant, None) is not None:
            self._counters.leave(tenant)
        self._mean_tokens += NEWEST * (tokens - self._mean_tokens)
        self._counters.charge(tenant, tokens, request.share)

    def refused(self, tenant: str) -> None:
        if self._backlog.pop(tenant, None) is None:
            self._counters.enter(tenant)
        self._backlog[tenant] = self._now()
        if len(self._backlog) > MAX_BACKLOG:
            self._drop(next(iter(self._backlog)))

    def ended(self, request: ReplicaRequest) -> None:
        self._counters.leave(request.tenant)
        # what was charged and not used is given back
        unused = max(request.max_tokens - request.num_output, 0)
        self._counters.charge(request.tenant, -unused, request.share)

    def _expire(self) -> None:
        now = self._now()
        while self._backlog:
            tenant = next(iter(self._backlog))
            if self._backlog[tenant] + BACKLOG_S > now:
                return
            self._drop(tenant)

    def _drop(self, tenant: str) -> None:
        del self._backlog[tenant]
        self._counters.leave(tenant)
