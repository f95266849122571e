"""Events of one request between the worker's pace and the client's.

A reader that keeps up gets every event as it came. For one that lags, new tokens are folded into
deltas that still wait, so that the number of waiting events stays bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coterie.core.events import Delta, Event, Failed, Finished

MAX_WAITING = 64


class EventQueue:
    __slots__ = ("_events", "_loop", "_on_end", "_on_start", "_waiter")

    def __init__(
        self,
        on_end: Callable[[Finished | None], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        """`on_end` is called once: when the last event comes, read or not, or by end()."""
        self._events: list[Event] = []
        self._on_end, self._on_start = on_end, on_start
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """The sink a replica calls; never blocks."""
        if not isinstance(event, Delta):
            if isinstance(event, (Finished, Failed)):
                self.end(event if isinstance(event, Finished) else None)
            elif self._on_start is not None:
                self._on_start()
        if len(self._events) < MAX_WAITING or not self._fold(event):
            self._events.append(event)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def end(self, event: Finished | None = None) -> None:
        """`event` was the last, or nobody waits for one any more."""
        call, self._on_end = self._on_end, None
        if call is not None:
            call(event)

    def disarm(self) -> bool:
        """There will be no end; says whether there was none yet."""
        call, self._on_end = self._on_end, None
        return call is not None

    async def take(self) -> list[Event]:
        """Everything that came since the last call; waits for at least one event."""
        if not self._events:
            self._waiter = self._loop.create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def _fold(self, event: Event) -> bool:
        if not isinstance(event, Delta):
            return False
        for index in range(len(self._events) - 1, -1, -1):
            earlier = self._events[index]
            if isinstance(earlier, Delta) and earlier.choice == event.choice:
                self._events[index] = merge(earlier, event)
                return True
        return False


def merge(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one choice as one."""
    logprobs = None
    if earlier.logprobs is not None or later.logprobs is not None:
        logprobs = (earlier.logprobs or ()) + (later.logprobs or ())
    return Delta(
        request_id=later.request_id,
        choice=later.choice,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=logprobs,
        finish_reason=later.finish_reason,
        stop_match=later.stop_match,
    )
