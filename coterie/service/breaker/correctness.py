"""The breaker of a specialist: trips when its answers stay below what it promises.

    closed --(breach for breach_s)--> shadow_only --(recovery for recovery_s)--> closed

Breach: the newest judged answers are certainly below the floor (their whole interval is), or the
interval of the long window is and the rate of the newest too. A runaway is a breach of its own: far
more of the newest answers than before did not end by themselves. Recovery: enough answers were
judged since the trip, their rate is at the floor or above, and they end. Evidence from before a
change does not count after it, and each trip within the window makes the next recovery take longer:
no flapping.
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
from coterie.service.slo.evidence import (
    BROKEN,
    CUT_KINDS,
    CUT_QUANTILE,
    INVALID,
    UNFORMED,
    VALID,
    EndedAnswers,
    JudgedAnswer,
    JudgedShare,
    WholeLengths,
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
    # of a trip: correctness or runaway
    why: str = ""


class CorrectnessBreaker:
    """Times given must not decrease. `state` changes only inside `look` and `force`."""

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = CLOSED
        self.changed_at = 0.0
        self.window = CorrectnessWindow(settings.window_s, settings.min_judged)
        most = max(RECENT_FACTOR * settings.min_judged, MIN_RECENT)
        self._recent = RecentOutcomes(most, settings.min_judged)
        # the same with cut answers; one that may still become valid is valid here
        self._best = RecentOutcomes(most, settings.min_judged)
        self.lengths, self.ended = WholeLengths(), EndedAnswers()
        self._share = JudgedShare()
        # since when the condition for the next change has held
        self._since: float | None = None
        # times of the trips within the window
        self._trips: list[float] = []

    def judge(self, now: float, answer: JudgedAnswer) -> None:
        """Note an answer, if its limit and the share of its tenant let it count."""
        self.lengths.add(answer)
        may_run_away = self.lengths.shows_runaway(answer)
        if not self.lengths.counts(answer) or not (answer.kind or may_run_away):
            return
        if not self._share.admits(answer.tenant):
            return
        if may_run_away:
            is_sound = self.state == CLOSED and self._since is None
            self.ended.add(not answer.is_cut, is_usual=is_sound)
        if answer.kind in (VALID, INVALID):
            self.add(now, answer.kind == VALID)
        elif answer.kind in CUT_KINDS:
            # text before a form begins is usual, unless whole answers have ended by then
            is_late = self.lengths.quantile(CUT_QUANTILE) is not None
            is_bad = answer.kind == BROKEN or (answer.kind == UNFORMED and is_late)
            self._best.add(not is_bad)

    def add(self, now: float, valid: bool) -> None:
        """Note a whole answer; `look` then says whether that changes anything."""
        self.window.add(now, valid)
        self._recent.add(valid)
        self._best.add(valid)

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
        rate, why = self._best.rate(), ""
        if self.state == CLOSED:
            why = "correctness" if self._is_below_floor(now) else "runaway"
        self._change(SHADOW_ONLY if self.state == CLOSED else CLOSED, now)
        return BreakerChange(self.state, rate, self.settings.floor, why)

    def recovery_s(self, now: float) -> float:
        """How long the rate must be good until the breaker is reset: once per recent trip."""
        self._forget_trips(now)
        return self.settings.recovery_s * min(max(len(self._trips), 1), MAX_TRIP_FACTOR)

    def recent(self) -> CorrectnessRate:
        """The newest outcomes since the last change."""
        return self._recent.rate()

    def force(self, state: str, now: float) -> None:
        """Set by an operator; evidence starts anew."""
        self.ended = EndedAnswers()
        if state != self.state:
            self._change(state, now)

    def _change(self, state: str, now: float) -> None:
        if state == SHADOW_ONLY:
            self._forget_trips(now)
            self._trips = [*self._trips[1 - MAX_TRIP_FACTOR :], now]
        self.state, self.changed_at, self._since = state, now, None
        self._recent.clear()
        self._best.clear()
        self.ended.clear_newest()

    def _breached(self, now: float) -> bool:
        if not self.settings.floor:
            return False
        return self._is_below_floor(now) or self.ended.runs_away(CERTAIN_Z)

    def _is_below_floor(self, now: float) -> bool:
        floor, recent = self.settings.floor, self._best.rate()
        if recent.rate is None or recent.rate >= floor:
            return False
        whole = self.window.rate(now)
        _, highest = wilson(recent.valid, recent.judged, CERTAIN_Z)
        return highest < floor or (whole.high is not None and whole.high < floor)

    def _recovered(self) -> bool:
        most, floor = RECOVERY_FACTOR * self.settings.min_judged, self.settings.floor
        whole, best = self._recent.newest(most), self._best.newest(most)
        is_good = whole.rate is not None and whole.rate >= floor
        is_good = is_good and best.rate is not None and best.rate >= floor
        return is_good and not self.ended.runs_away(CERTAIN_Z)

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
            "best": self._best.state(),
            "lengths": self.lengths.state(),
            "ended": self.ended.state(),
            "share": self._share.state(),
        }

    def restore(self, saved: dict[str, Any], now: float) -> None:
        """Times after `now` are of a clock that was set back since: they become `now`."""
        self.state = SHADOW_ONLY if saved["state"] == SHADOW_ONLY else CLOSED
        self.changed_at = min(float(saved["changed_at"]), now)
        since = saved["since"]
        self._since = None if since is None else min(since, now)
        self._trips = [min(float(at), now) for at in saved["trips"]][-MAX_TRIP_FACTOR:]
        self.window.restore([[min(row[0], now), *row[1:]] for row in saved["window"]])
        self._recent.restore(saved["recent"])
        self._best.restore(saved.get("best", saved["recent"]))
        if "ended" in saved:
            self.lengths.restore(saved["lengths"])
            self.ended.restore(saved["ended"])
            self._share.restore(saved["share"])
