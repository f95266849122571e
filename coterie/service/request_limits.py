"""Limits of a request: its deadline, and how often a user may send requests.

With a deadline, `Started` always comes first, and when the deadline passes, even in the queue or
while no worker answers, the events end with `Finished` and the reason "timeout". The answer is the
text so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

from coterie.core.errors import DeadlineExceeded, Overloaded
from coterie.core.events import (
    Delta,
    Event,
    Failed,
    Finished,
    InferenceMetrics,
    Started,
    Timings,
    Usage,
)
from coterie.core.lru import LruCache
from coterie.core.request import InferenceRequest

# the engine also checks deadlines and knows more details, so it gets this much additional time
GRACE_S = 1.0

Events = AsyncGenerator[Event, None]


async def until_deadline(
    events: Events, request: InferenceRequest, aborted: Sequence[InferenceMetrics] = ()
) -> Events:
    """`events` with the guarantees above. Closing it closes `events`, which aborts the request;
    then its metrics are in `aborted`."""
    progress = _Progress(request)
    async with aclosing(events):
        while True:
            event = await _next(events, progress.deadline)
            if event is None:
                break
            for item in progress.take(event):
                yield item
            if isinstance(event, (Finished, Failed)):
                return
    for item in progress.cut(aborted[-1] if aborted else None):
        yield item


async def _next(events: Events, deadline: float | None) -> Event | None:
    """The next event; None if the deadline has passed."""
    if deadline is None:
        # a timer per token would cost half as much as the token itself
        return await anext(events)
    try:
        # one timeout per event, because another task may await the next event
        async with asyncio.timeout_at(deadline) as timer:
            event = await anext(events)
    except DeadlineExceeded:
        return None
    except TimeoutError:
        if not timer.expired():
            raise
        return None
    late = isinstance(event, Failed) and event.code == DeadlineExceeded.code
    return None if late else event


class _Progress:
    """What is known about a request, for the last events if the engine does not send them."""

    def __init__(self, request: InferenceRequest) -> None:
        self.id, self.arrived_at = request.id, request.arrived_at
        timeout_s = request.limits.timeout_s
        # the event loop's clock and time.monotonic() may have different zero points
        offset_s = asyncio.get_running_loop().time() - time.monotonic()
        self.deadline = (
            None if timeout_s is None else request.arrived_at + timeout_s + GRACE_S + offset_s
        )
        self.started: Started | None = None
        self.num_tokens = 0

    def take(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Delta):
            self.num_tokens += len(event.token_ids)
        if not isinstance(event, Failed):
            yield from self._begin()
        yield event

    def _begin(self) -> Iterator[Event]:
        if self.started is None:
            self.started = Started(self.id, replica="", prompt_tokens=0, cached_tokens=0)
            yield self.started

    def cut(self, metrics: InferenceMetrics | None) -> Iterator[Event]:
        yield from self._begin()
        yield Delta(self.id, 0, "", (), finish_reason="timeout")
        assert self.started is not None
        yield Finished(
            self.id,
            ("timeout",),
            Usage(self.started.prompt_tokens, self.num_tokens, self.started.cached_tokens),
            self._timings(metrics),
            metrics=metrics,
        )

    def _timings(self, metrics: InferenceMetrics | None) -> Timings:
        total_s = time.monotonic() - self.arrived_at
        if metrics is None:
            return Timings(queue_s=total_s, total_s=total_s)
        queue_s, first_s = metrics.queue_ms / 1e3, metrics.first_token_ms / 1e3
        return Timings(
            queue_s=queue_s,
            prefill_s=max((first_s or total_s) - queue_s, 0.0),
            first_token_s=first_s,
            decode_s=max(total_s - first_s, 0.0) if first_s else 0.0,
            total_s=total_s,
        )


# a user who was idle may send the requests of this many seconds at once
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
        """`per_second` 0 means no limit."""
        self.per_second = per_second
        self.burst = max(1.0, per_second * BURST_S)
        self._clock = clock
        # user -> (tokens left, time of that count)
        self._buckets: LruCache[User, tuple[float, float]] = LruCache(max_users)

    def take(self, tenant: str, user: str) -> None:
        """Count one request of this user. Raises if the rate is exceeded, with the time to wait."""
        if not self.per_second:
            return
        now, key = self._clock(), (tenant, user)
        left, since = self._buckets.get(key) or (self.burst, now)
        left = min(self.burst, left + (now - since) * self.per_second)
        allowed = left >= 1.0
        self._buckets.put(key, (left - 1.0 if allowed else left, now))
        if not allowed:
            raise Overloaded(
                f"this user_id may ask {self.per_second:g} times a second; try again later",
                param="user_id",
                retry_after_s=(1.0 - left) / self.per_second,
            )
