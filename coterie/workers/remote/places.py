"""Places for requests at a remote server: so many at once, the others wait by priority."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class PlaceQueue:
    """Used from one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        # of the waiting ones, those that still wait
        self.num_waiting = 0

    async def take(self, priority: int) -> None:
        """Returns when the caller has a place; higher priorities first, then in order."""
        if self._free and not self.num_waiting:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._order), place))
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
        while self._waiting:
            place = heapq.heappop(self._waiting)[2]
            if not place.done():
                self.num_waiting -= 1
                place.set_result(None)
                return
        self._free += 1
