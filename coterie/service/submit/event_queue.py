"""The events of one request on their way from a replica to the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coterie.core.events import Delta, Event, Failed, Finished

# events that wait for a slow reader; further deltas are joined
MAX_WAITING = 64


class EventQueue:
    """A replica puts events in, without waiting; the pipeline takes them out."""

    __slots__ = ("_events", "_loop", "_on_end", "_on_start", "_on_tokens", "_waiter")

    def __init__(
        self,
        on_end: Callable[[Finished | None], None] | None = None,
        on_start: Callable[[], None] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        """`on_end` is called once: when the last event comes, even if it is not read, or by
        end(). `on_tokens` is called with the number of tokens of each delta, until then."""
        self._events: list[Event] = []
        self._on_end, self._on_start, self._on_tokens = on_end, on_start, on_tokens
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """The sink a replica calls; never blocks."""
        if not isinstance(event, Delta):
            if isinstance(event, (Finished, Failed)):
                self.end(event if isinstance(event, Finished) else None)
            elif self._on_start is not None:
                self._on_start()
        elif self._on_tokens is not None:
            self._on_tokens(len(event.token_ids))
        if len(self._events) < MAX_WAITING or not self._fold(event):
            self._events.append(event)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def end(self, event: Finished | None = None) -> None:
        """`event` was the last one, or no one waits for events any more."""
        call, self._on_end, self._on_tokens = self._on_end, None, None
        if call is not None:
            call(event)

    def disarm(self) -> bool:
        """Do not call `on_end` any more. Returns whether it had not been called."""
        call, self._on_end, self._on_tokens = self._on_end, None, None
        return call is not None

    async def take(self) -> list[Event]:
        """All events since the last call; waits for at least one."""
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
