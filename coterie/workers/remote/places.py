"""Places for requests at a remote server: so many at once, the others wait by priority.

A steady flow of urgent requests keeps nobody out: of so many places in a row that went past the
oldest request, the next is its own.
"""

from __future__ import annotations

import asyncio
import itertools

# places that go to more urgent requests before the oldest one gets its own
MAX_PASSED = 4


class PlaceQueue:
    """Used from one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        # of the waiting ones, those that still wait
        self.num_waiting = 0
        # places in a row that did not go to the oldest request
        self._num_passed = 0

    async def take(self, priority: int) -> None:
        """Returns when the caller has a place; higher priorities first, then in order."""
        if self._free and not self.num_waiting:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((-priority, next(self._order), place))
        self.num_waiting += 1
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # it got the place just now
                self.give_back()
            else:
                self.num_waiting -= 1
            raise

    def give_back(self) -> None:
        waiting = self._waiting = [entry for entry in self._waiting if not entry[2].done()]
        if not waiting:
            self._free += 1
            return
        oldest = min(waiting, key=lambda entry: entry[1])
        chosen = oldest if self._num_passed >= MAX_PASSED else min(waiting)
        self._num_passed = 0 if chosen is oldest else self._num_passed + 1
        waiting.remove(chosen)
        self.num_waiting -= 1
        chosen[2].set_result(None)
