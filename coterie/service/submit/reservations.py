"""Places that refused requests were told to come back for.

A `Retry-After` is a reservation at one engine: from shortly before its time until a little after
it, a place is kept for a request of the same tenant with the same prompt. If it was refused for its
deadline, the reservation says how long it may take then, so that others are not admitted who would
still run and make it too slow.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# a reserved place is kept this long after its time; and before it for this share of the wait, if
# another request would take it
KEPT_S = 3.0
AHEAD, AHEAD_S = 0.25, 0.5
# how much too early a reservation may be used: clocks and timers differ
EARLY_S = 0.05
# most reservations of one tenant: a tenant that does not wait must not delay others
MAX_RESERVATIONS = 64
# most reservations at one engine
MAX_AT_ENGINE = 64
# share of requests that come as told, before anything is known; and weight of the newest one
FIRST_SHOWN, NEWEST = 0.8, 0.05


@dataclass(frozen=True, slots=True)
class RetryReservation:
    """A reserved place. `key` identifies the request when it comes again."""

    key: int
    engine: str
    tenant: str
    priority: int
    # times of the clock
    kept_from: float
    due_at: float
    # tokens of its answer, and the seconds that it may take; inf = it has no deadline
    num_tokens: float = 1.0
    whole_s: float = math.inf


class ReservationBook:
    """All reservations at a group of engines; few at each."""

    def __init__(self) -> None:
        self._by_key: dict[int, RetryReservation] = {}
        # by engine, the next one first
        self._by_engine: dict[str, list[RetryReservation]] = {}
        # keys of those for which a request was let in before its prompt was known
        self._let_in: set[int] = set()
        self._tenants: Counter[str] = Counter()
        # share of reservations whose requests came at their time, the latest weighted most
        self._shown = FIRST_SHOWN

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, item: RetryReservation, now: float) -> bool:
        """False if the tenant or the engine has too many already."""
        earlier = self._by_key.get(item.key)
        if earlier is not None:
            self._close(earlier)
        self._expire(item.engine, now)
        here = self._by_engine.setdefault(item.engine, [])
        if self._tenants[item.tenant] >= MAX_RESERVATIONS or len(here) >= MAX_AT_ENGINE:
            return False
        self._by_key[item.key] = item
        self._tenants[item.tenant] += 1
        insort(here, item, key=_due_at)
        return True

    def use(self, key: int, now: float) -> RetryReservation | None:
        """The reservation of a request that comes at its time; it is used up. One that comes too
        early keeps it."""
        item = self._by_key.get(key)
        if item is None or item.due_at > now + EARLY_S:
            return None
        self._close(item)
        is_in_time = item.due_at + KEPT_S > now
        self._learn(is_in_time)
        return item if is_in_time else None

    def let_in(self, tenant: str, priority: int, now: float) -> bool:
        """Whether a place of this tenant and priority is due: asked before the prompt is known.
        Each place lets one request in, and stays reserved until `use`."""
        if not self._tenants[tenant]:
            return False
        for here in self._by_engine.values():
            for item in here:
                if item.due_at > now + EARLY_S:
                    break
                is_theirs = item.tenant == tenant and item.priority == priority
                if is_theirs and item.due_at + KEPT_S > now and item.key not in self._let_in:
                    self._let_in.add(item.key)
                    return True
        return False

    def num_at(self, engine: str) -> int:
        return len(self._by_engine.get(engine, ()))

    def at(self, engine: str, priority: int, now: float) -> Iterator[RetryReservation]:
        """Open reservations of this priority or higher, the next one first."""
        if engine in self._by_engine:
            self._expire(engine, now)
            yield from (i for i in self._by_engine.get(engine, ()) if i.priority >= priority)

    def expected_at(self, engine: str, priority: int, now: float) -> list[RetryReservation]:
        """The next ones, as many as will probably come: callers that do not return must not keep
        places empty."""
        items = list(self.at(engine, priority, now))
        return items[: round(self._shown * len(items))]

    def _expire(self, engine: str, now: float) -> None:
        here = self._by_engine.get(engine, [])
        while here and here[0].due_at + KEPT_S <= now:
            self._close(here[0])
            self._learn(False)

    def _learn(self, has_come: bool) -> None:
        self._shown += NEWEST * (has_come - self._shown)

    def _close(self, item: RetryReservation) -> None:
        del self._by_key[item.key]
        self._let_in.discard(item.key)
        here = self._by_engine[item.engine]
        here.remove(item)
        if not here:
            del self._by_engine[item.engine]
        self._tenants[item.tenant] -= 1
        if not self._tenants[item.tenant]:
            del self._tenants[item.tenant]


def _due_at(item: RetryReservation) -> float:
    return item.due_at


class RetryCalibration:
    """How much longer than estimated a refused request is told to wait, so that nine of ten that
    wait as told are admitted."""

    def __init__(self, factor: float = 1.25) -> None:
        self.factor = factor

    def learn(self, *, is_admitted: bool) -> None:
        self.factor *= 0.985 if is_admitted else 1.15
        self.factor = min(max(self.factor, 1.0), 3.0)
