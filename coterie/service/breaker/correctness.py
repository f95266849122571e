"""The breaker of a specialist: trips when its answers stay below what it promises.

    closed --(breach for breach_s)--> shadow_only --(recovery for recovery_s)--> closed

Breach: the newest judged answers are certainly below the floor (their whole interval is), or the
interval of the long window is and the rate of the newest too. Recovery: enough answers were judged
since the trip, and their rate is at the floor or above. Evidence from before a change does not
count after it, and each trip within the window makes the next recovery take longer: no flapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coterie.service.slo.correctness import (
    CorrectnessRate,
    CorrectnessWindow,
    RecentOutcomes,
    wilson,
)

CLOSED, SHADOW_ONLY = "closed", "shadow_only"
# the newest outcomes that are looked at: this many times min_judged, and at least as many as here
RECENT_FACTOR, MIN_RECENT = 5, 100
# a demoted specialist is judged rarely: its recovery is seen in fewer, this many times min_judged
RECOVERY_FACTOR = 2
# width of their interval in standard deviations: they are looked at after every answer, so that
# two would let chance trip the breaker of a healthy specialist
CERTAIN_Z = 3.0
# recovery takes this many times as long at most
MAX_TRIP_FACTOR = 8


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """`floor` 0 = it never trips."""

    floor: float
    window_s: float = 86_400.0
    min_judged: int = 20
    breach_s: float = 60.0
    recovery_s: float = 300.0


@dataclass(frozen=True, slots=True)
class BreakerChange:
    """A change of state, with what was known then."""

    state: str
    rate: CorrectnessRate
    floor: float


class CorrectnessBreaker:
    """Times given must not decrease. `state` changes only inside `look` and `force`."""

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = CLOSED
        self.changed_at = 0.0
        self.window = CorrectnessWindow(settings.window_s, settings.min_judged)
        self._recent = RecentOutcomes(
            max(RECENT_FACTOR * settings.min_judged, MIN_RECENT), settings.min_judged
        )
        # since when the condition for the next change has held
        self._since: float | None = None
        # times of the trips within the window
        self._trips: list[float] = []

    def add(self, now: float, valid: bool) -> None:
        """Note an answer; `look` then says whether that changes anything."""
        self.window.add(now, valid)
        self._recent.add(valid)

    def look(self, now: float) -> BreakerChange | None:
        """Change state if it is time to."""
        holds = self._breached(now) if self.state == CLOSED else self._recovered()
        if not holds:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        needed_s = self.settings.breach_s if self.state == CLOSED else self.recovery_s(now)
        if now - self._since < needed_s:
            return None
        rate = self._recent.rate()
        self._change(SHADOW_ONLY if self.state == CLOSED else CLOSED, now)
        return BreakerChange(self.state, rate, self.settings.floor)

    def recovery_s(self, now: float) -> float:
        """How long the rate must be good until the breaker is reset: once per recent trip."""
        self._forget_trips(now)
        return self.settings.recovery_s * min(max(len(self._trips), 1), MAX_TRIP_FACTOR)

    def recent(self) -> CorrectnessRate:
        """The newest outcomes since the last change."""
        return self._recent.rate()

    def force(self, state: str, now: float) -> None:
        """Set by an operator; evidence starts anew."""
        if state != self.state:
            self._change(state, now)

    def _change(self, state: str, now: float) -> None:
        if state == SHADOW_ONLY:
            self._forget_trips(now)
            self._trips = [*self._trips[1 - MAX_TRIP_FACTOR :], now]
        self.state, self.changed_at, self._since = state, now, None
        self._recent.clear()

    def _breached(self, now: float) -> bool:
        floor, recent = self.settings.floor, self._recent.rate()
        if recent.rate is None or recent.rate >= floor:
            return False
        whole = self.window.rate(now)
        _, highest = wilson(recent.valid, recent.judged, CERTAIN_Z)
        return highest < floor or (whole.high is not None and whole.high < floor)

    def _recovered(self) -> bool:
        recent = self._recent.newest(RECOVERY_FACTOR * self.settings.min_judged)
        return recent.rate is not None and recent.rate >= self.settings.floor

    def _forget_trips(self, now: float) -> None:
        self._trips = [at for at in self._trips if at > now - self.settings.window_s]

    def saved(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "changed_at": self.changed_at,
            "since": self._since,
            "trips": list(self._trips),
            "window": self.window.state(),
            "recent": self._recent.state(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.state = SHADOW_ONLY if saved["state"] == SHADOW_ONLY else CLOSED
        self.changed_at = float(saved["changed_at"])
        self._since = saved["since"]
        self._trips = [float(at) for at in saved["trips"]][-MAX_TRIP_FACTOR:]
        self.window.restore(saved["window"])
        self._recent.restore(saved["recent"])
