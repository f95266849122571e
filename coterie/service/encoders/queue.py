"""The room of one encoder: how many requests and tokens may be in it at once, and what part of it
one tenant may hold.

A tenant may hold at most `PART` times what is free besides, by its share: alone it gets three
quarters, of two that want all each gets three sevenths, and there is always room for the next one
who comes. In which order it is computed is the worker's affair, in turns among tenants.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from coterie.core.errors import Overloaded
from coterie.core.request import OPEN_TENANT, own_tenant

PART = 3.0
# weight of the newest request in the measured speed
NEWEST = 0.2
# tokens a second, until one was measured
FIRST_SPEED = 1000.0


class SharedRoom:
    """A number of places, and who holds them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._held: dict[str, int] = {}

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def exceeds_part(self, tenant: str, amount: int, share: float) -> bool:
        """Whether the tenant would hold too much. Who holds nothing may take what there is; without
        keys there is one tenant."""
        held = self.held(tenant)
        if not held or tenant == OPEN_TENANT:
            return False
        return held + amount > PART * share * (self.size - self.used - amount)

    @contextmanager
    def taken(self, tenant: str, amount: int) -> Iterator[None]:
        self.used += amount
        self._held[tenant] = self.held(tenant) + amount
        try:
            yield
        finally:
            self.used -= amount
            self._held[tenant] -= amount
            if not self._held[tenant]:
                del self._held[tenant]


class EncoderQueue:
    """For one event loop."""

    def __init__(self, name: str, max_requests: int, max_tokens: int) -> None:
        self._name = name
        self.requests = SharedRoom(max_requests)
        self.tokens = SharedRoom(max_tokens)
        # tokens a second
        self._speed = 0.0

    @contextmanager
    def enter(self, tenant: str, share: float) -> Iterator[None]:
        """One of the requests that are tokenised, wait and run. Raises Overloaded if there are too
        many."""
        room, tenant = self.requests, own_tenant(tenant)
        if room.used >= room.size:
            raise self._overloaded(f"{room.size} requests wait")
        if room.exceeds_part(tenant, 1, share):
            raise self._overloaded(f"{room.held(tenant)} requests of yours wait")
        with room.taken(tenant, 1):
            yield

    @contextmanager
    def place(self, tenant: str, share: float, tokens: int) -> Iterator[None]:
        """Room for the tokens among those that wait and run. Raises Overloaded if there is none. A
        request that is alone has room."""
        room, tenant, waiting = self.tokens, own_tenant(tenant), self.tokens.used
        if waiting and waiting + tokens > room.size:
            raise self._overloaded(f"{waiting} tokens wait")
        if room.exceeds_part(tenant, tokens, share):
            raise self._overloaded(f"{room.held(tenant)} tokens of yours wait")
        begun = time.monotonic()
        with room.taken(tenant, tokens):
            yield
        # what ran beside it was computed in the same time
        rate = (waiting + tokens) / max(time.monotonic() - begun, 1e-4)
        self._speed += (NEWEST if self._speed else 1.0) * (rate - self._speed)

    def expected_s(self) -> float:
        """Until everything that is in it now is computed."""
        return self.tokens.used / (self._speed or FIRST_SPEED)

    def _overloaded(self, why: str) -> Overloaded:
        wait_s = self.expected_s() / 2
        return Overloaded(
            f"the encoder `{self._name}` is full: {why}; try again later",
            retry_after_s=min(max(wait_s, 0.5), 60.0),
        )
