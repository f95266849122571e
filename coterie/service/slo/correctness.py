"""The share of valid answers in a rolling window, with its interval; unknown with too few."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from coterie.core.quick_init import quick_init

# parts of the window; one more is kept, so that the window is always covered
SLICES = 96
# of a normal distribution: 95% lie within this many standard deviations
Z95 = 1.959964


@quick_init
@dataclass(frozen=True, slots=True)
class CorrectnessRate:
    """`rate`, `low` and `high` (the 95% Wilson interval) are None while too few were judged."""

    valid: int
    judged: int
    rate: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_known(self) -> bool:
        return self.rate is not None


def wilson(valid: int, judged: int, z: float = Z95) -> tuple[float, float]:
    """The interval that holds the true share with 95% probability."""
    if judged <= 0:
        return 0.0, 1.0
    share, square = valid / judged, z * z / judged
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / judged + square / (4 * judged)) / (1 + square)
    # rounding must not exclude the share itself
    return max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0)


# a decision asks for the same figures several times
@lru_cache(maxsize=1024)
def rate_of(valid: int, judged: int, min_judged: int) -> CorrectnessRate:
    if judged < max(min_judged, 1):
        return CorrectnessRate(valid, judged)
    low, high = wilson(valid, judged)
    return CorrectnessRate(valid, judged, valid / judged, low, high)


class CorrectnessWindow:
    """Counts of judged answers in the last `window_s` seconds. Times must not decrease by more
    than one part of the window."""

    __slots__ = ("_judged", "_slice_s", "_slices", "_valid", "min_judged")

    def __init__(self, window_s: float, min_judged: int) -> None:
        self.min_judged = min_judged
        self._slice_s = window_s / SLICES
        # (index of the part, valid, judged), oldest first
        self._slices: deque[list[int]] = deque()
        self._valid = self._judged = 0

    def add(self, now: float, valid: bool) -> None:
        index = int(now // self._slice_s)
        if not self._slices or self._slices[-1][0] < index:
            self._slices.append([index, 0, 0])
        newest = self._slices[-1]
        newest[1] += valid
        newest[2] += 1
        self._valid += valid
        self._judged += 1
        self._expire(index)

    def rate(self, now: float) -> CorrectnessRate:
        self._expire(int(now // self._slice_s))
        return rate_of(self._valid, self._judged, self.min_judged)

    def is_known(self, now: float) -> bool:
        """Whether enough answers were judged for a rate."""
        self._expire(int(now // self._slice_s))
        return self._judged >= max(self.min_judged, 1)

    def _expire(self, index: int) -> None:
        while self._slices and self._slices[0][0] < index - SLICES:
            _, valid, judged = self._slices.popleft()
            self._valid -= valid
            self._judged -= judged

    def state(self) -> list[list[float]]:
        """(time, valid, judged) of each part: the window may have another length next time."""
        return [
            [(index + 0.5) * self._slice_s, valid, judged] for index, valid, judged in self._slices
        ]

    def restore(self, state: list[list[float]]) -> None:
        self._slices.clear()
        self._valid = self._judged = 0
        for at, valid, judged in sorted(state):
            index = int(at // self._slice_s)
            if not self._slices or self._slices[-1][0] < index:
                self._slices.append([index, 0, 0])
            self._slices[-1][1] += int(valid)
            self._slices[-1][2] += int(judged)
            self._valid += int(valid)
            self._judged += int(judged)


class RecentOutcomes:
    """The newest outcomes, at most `most` of them: shows a change sooner than a long window."""

    __slots__ = ("_outcomes", "_valid", "min_judged")

    def __init__(self, most: int, min_judged: int) -> None:
        self.min_judged = min_judged
        self._outcomes: deque[bool] = deque(maxlen=max(most, min_judged))
        self._valid = 0

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, valid: bool) -> None:
        if len(self._outcomes) == self._outcomes.maxlen:
            self._valid -= self._outcomes[0]
        self._outcomes.append(valid)
        self._valid += valid

    def clear(self) -> None:
        self._outcomes.clear()
        self._valid = 0

    def rate(self) -> CorrectnessRate:
        return rate_of(self._valid, len(self._outcomes), self.min_judged)

    def newest(self, most: int) -> CorrectnessRate:
        some = list(islice(reversed(self._outcomes), most))
        return rate_of(sum(some), len(some), self.min_judged)

    def state(self) -> str:
        return "".join("1" if valid else "0" for valid in self._outcomes)

    def restore(self, state: str) -> None:
        self.clear()
        for mark in state:
            self.add(mark == "1")
