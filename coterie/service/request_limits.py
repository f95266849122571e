"""Events of a request that is answered with what there is when its time is over.

`Started` always comes first, and a deadline that passes, even in the queue or while no worker
answers, ends in `Finished` with the reason "timeout".
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
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
from coterie.core.request import InferenceRequest

# the engine keeps deadlines itself, and tells more; past this it is not waited for
GRACE_S = 1.0

Events = AsyncGenerator[Event, None]


async def until_deadline(
    events: Events, request: InferenceRequest, left: Sequence[InferenceMetrics] = ()
) -> Events:
    """`events` with the promises above. Closing it closes them, which aborts the request, and its
    figures are in `left` then."""
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
    for item in progress.cut(left[-1] if left else None):
        yield item


async def _next(events: Events, deadline: float | None) -> Event | None:
    """None when the time is over, whoever noticed."""
    if deadline is None:
        # a timer for each token costs half as much as the token itself
        return await anext(events)
    try:
        # around one event: the next may be awaited by another task
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
    """What is known of a request when nobody else will tell it."""

    def __init__(self, request: InferenceRequest) -> None:
        self.id, self.arrived_at = request.id, request.arrived_at
        timeout_s = request.limits.timeout_s
        # the event loop's clock and time.monotonic() have the same seconds, not the same zero
        behind_s = asyncio.get_running_loop().time() - time.monotonic()
        self.deadline = (
            None if timeout_s is None else request.arrived_at + timeout_s + GRACE_S + behind_s
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
            Timings(total_s=time.monotonic() - self.arrived_at),
            metrics=metrics,
        )


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
