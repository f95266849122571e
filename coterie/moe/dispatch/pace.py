"""How often and how much to rearrange the slots between tokens. A pure choice, no state.

A high miss rate makes updates more frequent and larger; updates that found nothing to swap make
them rarer and smaller. Both are bounded, so that updates never crowd out the work itself.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_INTERVAL, MAX_INTERVAL = 4, 128
MIN_BUDGET, MAX_BUDGET = 2, 48


@dataclass(frozen=True, slots=True)
class UpdateSchedule:
    # tokens until the next update
    interval: int
    # swaps it may make
    budget: int


def choose_schedule(miss_rate: float, idle_streak: int) -> UpdateSchedule:
    """`miss_rate` since the last update; `idle_streak` updates in a row swapped nothing, or (when
    negative) that many swapped all they were allowed to."""
    heat = min(max(miss_rate, 0.0), 1.0)
    interval = 32.0 * (1.0 - heat) + MIN_INTERVAL
    budget = MAX_BUDGET * heat
    factor = 2.0 ** min(max(idle_streak, -3), 5)
    return UpdateSchedule(
        interval=round(min(max(interval * factor, MIN_INTERVAL), MAX_INTERVAL)),
        budget=round(min(max(budget / factor, MIN_BUDGET), MAX_BUDGET)),
    )


class UpdateTimer:
    """Counts tokens and demands between updates and asks `choose_schedule` for the next pace."""

    def __init__(self) -> None:
        self.pace = choose_schedule(1.0, 0)
        self._tokens = self._demands = self._misses = self._streak = 0
        # updates made
        self.rounds = 0

    def saw(self, demands: int, misses: int) -> None:
        self._demands += demands
        self._misses += misses

    def due(self) -> bool:
        """One token has passed: is it time?"""
        self._tokens += 1
        return self._tokens >= self.pace.interval

    def done(self, swaps: int) -> None:
        """An update was made, with so many swaps."""
        self.rounds += 1
        if swaps == 0:
            self._streak = max(self._streak, 0) + 1
        else:
            self._streak = min(self._streak, 0) - 1 if swaps >= self.pace.budget else 0
        rate = self._misses / self._demands if self._demands else 0.0
        self.pace = choose_schedule(rate, self._streak)
        self._tokens = self._demands = self._misses = 0
