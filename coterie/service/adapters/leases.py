"""Which adapters the requests in flight run on: counted by digest, from plan to end.

Knows neither files nor names' meanings; says when the last user of a digest has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from coterie.core.plan import AdapterChoice


class AdapterLease:
    """One request's hold on its adapters.

    A stream that is never read is dropped together with its lease, which then ends by itself.
    """

    __slots__ = ("_adapters", "_counts", "_leases", "virtual_tokens")

    def __init__(
        self, leases: AdapterLeases, adapters: Sequence[AdapterChoice], virtual_tokens: int
    ) -> None:
        self._leases = leases
        self._adapters = adapters
        self._counts: Counter[str] | None = None
        self.virtual_tokens = virtual_tokens
        self._move(leases.waiting)

    def start(self) -> None:
        """The request runs now; it waited until here."""
        if self._counts is self._leases.waiting:
            self._move(self._leases.running)

    def end(self) -> None:
        adapters, self._adapters = self._adapters, ()
        if adapters and self._counts is not None:
            _count(self._counts, adapters, -1)
            self._leases.ended(adapters)

    __del__ = end

    def __enter__(self) -> AdapterLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _move(self, counts: Counter[str]) -> None:
        if self._counts is not None:
            _count(self._counts, self._adapters, -1)
        _count(counts, self._adapters, 1)
        self._counts = counts


class AdapterLeases:
    """Every lease that has not ended. `on_idle` is told of digests that lost their last user."""

    def __init__(self, on_idle: Callable[[Collection[str]], None]) -> None:
        self.waiting: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._users: Counter[str] = Counter()
        self._on_idle = on_idle

    def take(self, adapters: Sequence[AdapterChoice], virtual_tokens: int) -> AdapterLease:
        for item in adapters:
            self._users[item.digest] += 1
        return AdapterLease(self, adapters, virtual_tokens)

    def held(self) -> frozenset[str]:
        return frozenset(self._users)

    def ended(self, adapters: Sequence[AdapterChoice]) -> None:
        idle = []
        for item in adapters:
            self._users[item.digest] -= 1
            if not self._users[item.digest]:
                del self._users[item.digest]
                idle.append(item.digest)
        if idle:
            self._on_idle(idle)


def _count(counts: Counter[str], adapters: Sequence[AdapterChoice], step: int) -> None:
    """By name without version, as requests ask for them. Names that nobody asks for are dropped."""
    for item in adapters:
        name = item.name.partition("@")[0]
        counts[name] += step
        if not counts[name]:
            del counts[name]
