"""How often each user may ask: one token bucket per (tenant, user), a bounded number of them.

Knows no HTTP. Who has not asked for long is forgotten first, which gives back a full bucket.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from coterie.core.errors import Overloaded

# a user who was quiet may ask this many seconds' worth at once
BURST_S = 10.0
MAX_USERS = 100_000

User = tuple[str, str]


class UserRate:
    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        max_users: int = MAX_USERS,
    ) -> None:
        """`per_second` 0 limits nobody."""
        self.per_second = per_second
        self.burst = max(1.0, per_second * BURST_S)
        self._clock = clock
        self._max_users = max_users
        # (tokens left, when that was)
        self._buckets: OrderedDict[User, tuple[float, float]] = OrderedDict()

    def take(self, tenant: str, user: str) -> None:
        """One request of this user; refused with the time of the next one."""
        if not self.per_second:
            return
        now, key = self._clock(), (tenant, user)
        left, since = self._buckets.pop(key, (self.burst, now))
        left = min(self.burst, left + (now - since) * self.per_second)
        allowed = left >= 1.0
        self._buckets[key] = (left - 1.0 if allowed else left, now)
        if len(self._buckets) > self._max_users:
            self._buckets.popitem(last=False)
        if not allowed:
            raise Overloaded(
                f"this user_id may ask {self.per_second:g} times a second; try again later",
                param="user_id",
                retry_after_s=(1.0 - left) / self.per_second,
            )
