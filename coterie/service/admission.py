"""Whether a request may queue, and when a refused one should come back.

Judges from what workers last reported; the worker has the last word. A `Retry-After` is a place in
line: refused callers are told times one completion apart, so that they do not all return at once.
Knows no replicas' insides and no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from coterie.core.errors import Overloaded
from coterie.core.plan import LaneState

# official clients give up beyond this
MAX_RETRY_AFTER_S = 120.0
MIN_RETRY_AFTER_S = 1.0
# weight of the newest interval between two completions
NEWEST = 0.1
# some of the places that become free go to callers who were never refused
SPACING = 2.0


@dataclass(slots=True)
class Pace:
    """How fast a specialist gets rid of requests while it is busy."""

    interval_s: float = 0.0
    ended_at: float = 0.0
    promised_at: float = 0.0


class Admission:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paces: dict[str, Pace] = {}

    def check(self, specialist: str, state: LaneState | None, unreported: int) -> None:
        """Refuse when the queue is full. `unreported` were sent since the worker last spoke."""
        if state is not None and state.queued + unreported >= state.max_queue:
            raise self.overloaded(specialist, state)

    def overloaded(
        self, specialist: str, state: LaneState | None, hint_s: float | None = None
    ) -> Overloaded:
        """The refusal, with the next free place in line."""
        now, pace = self._clock(), self._pace(specialist)
        interval_s = pace.interval_s or _guess(state)
        pace.promised_at = max(now, pace.promised_at) + SPACING * interval_s
        wait_s = max(pace.promised_at - now, hint_s or 0.0, MIN_RETRY_AFTER_S)
        # a promise beyond the cap is not kept by anybody
        pace.promised_at = min(pace.promised_at, now + MAX_RETRY_AFTER_S)
        queue = f" of {state.max_queue}" if state is not None else ""
        return Overloaded(
            f"the queue{queue} for {specialist} is full",
            retry_after_s=min(wait_s, MAX_RETRY_AFTER_S),
        )

    def ended(self, specialist: str, queued: int) -> None:
        """A request ended. Only intervals with a queue behind them tell the pace."""
        now, pace = self._clock(), self._pace(specialist)
        if queued and pace.ended_at:
            interval_s = now - pace.ended_at
            known = pace.interval_s or interval_s
            pace.interval_s = known + NEWEST * (interval_s - known)
        pace.ended_at = now if queued else 0.0

    def _pace(self, specialist: str) -> Pace:
        return self._paces.setdefault(specialist, Pace())


def _guess(state: LaneState | None) -> float:
    """Before anything has ended: the predicted wait spread over those in line."""
    if state is None:
        return MIN_RETRY_AFTER_S
    return max(state.predicted_first_token_s / (state.queued + 1), 0.01)
