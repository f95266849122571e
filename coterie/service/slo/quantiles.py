"""Quantiles of durations over a rolling window, in bounded memory.

A sketch counts values in buckets whose bounds grow by a constant factor, so that a quantile is
known to within `ERROR` of its value, and two sketches are merged by adding their counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# largest relative error of a quantile
ERROR = 0.02
_GROWTH = (1 + ERROR) / (1 - ERROR)
_LOG_GROWTH = math.log(_GROWTH)
# values outside of this range are counted at its ends
MIN_S, MAX_S = 1e-5, 86_400.0
_FIRST, _LAST = (math.ceil(math.log(value) / _LOG_GROWTH) for value in (MIN_S, MAX_S))
# the bucket of 0
LOWEST = _FIRST
# parts of a window; one more is kept, so that the window is always covered
SLICES = 24


class LatencySketch:
    """Counts of durations by bucket; at most `_LAST - _FIRST + 1` (about 570) buckets."""

    __slots__ = ("buckets", "count")

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        self.buckets: dict[int, int] = dict(buckets or {})
        self.count = sum(self.buckets.values())

    def add(self, seconds: float, times: int = 1) -> None:
        bucket = _FIRST
        if seconds > MIN_S:
            bucket = min(math.ceil(math.log(seconds) / _LOG_GROWTH), _LAST)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += times

    def merge(self, other: LatencySketch) -> None:
        for bucket, times in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + times
        self.count += other.count

    def remove(self, other: LatencySketch) -> None:
        """Take away what was merged before."""
        for bucket, times in other.buckets.items():
            left = self.buckets[bucket] - times
            if left:
                self.buckets[bucket] = left
            else:
                del self.buckets[bucket]
        self.count -= other.count

    def quantiles(self, *shares: float) -> tuple[float, ...]:
        """Seconds below which these shares of the values are; 0 without values. `shares` rise."""
        if not self.count:
            return (0.0,) * len(shares)
        found: list[float] = []
        below, ordered = 0, iter(sorted(self.buckets.items()))
        bucket = _FIRST
        for share in shares:
            # the value of this rank, counted from 1
            rank = max(math.ceil(share * self.count), 1)
            while below < rank:
                bucket, times = next(ordered)
                below += times
            # the middle of the bucket, where both its ends are equally far in relation
            found.append(2 * _GROWTH**bucket / (_GROWTH + 1))
        return tuple(found)


class RollingSketch:
    """The durations of the last `window_s` seconds: one sketch for each of `SLICES` parts. Adding
    touches the newest part only; the others are kept summed up."""

    __slots__ = ("_before", "_index", "_newest", "_slice_s", "_slices")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        # by number; the newest is one of them
        self._slices: dict[int, LatencySketch] = {}
        self._index = -1
        self._newest = LatencySketch()
        # the sum of all but the newest
        self._before = LatencySketch()

    def add(self, now: float, seconds: float, times: int = 1) -> None:
        index = int(now // self._slice_s)
        if index > self._index or not self._slices:
            self._begin(index)
        self._newest.add(seconds, times)

    def merged(self, now: float) -> LatencySketch:
        """All of the window."""
        self._expire(int(now // self._slice_s))
        whole = LatencySketch(self._before.buckets)
        whole.merge(self._newest)
        return whole

    def number(self, now: float) -> int:
        """The number of the part that this time belongs to."""
        return int(now // self._slice_s)

    def newest(self) -> int:
        """The number of the newest part; -1 if there is none."""
        return self._index

    def part(self, index: int) -> dict[int, int]:
        """The counts of one part, for the store."""
        found = self._slices.get(index)
        return {} if found is None else dict(found.buckets)

    def restore(self, index: int, buckets: Mapping[int, int]) -> None:
        """Add a part that the store held; the parts come in order."""
        if buckets and index > self._index:
            self._begin(index)
            kept = {min(max(bucket, _FIRST), _LAST): times for bucket, times in buckets.items()}
            self._newest.merge(LatencySketch(kept))

    def _begin(self, index: int) -> None:
        self._before.merge(self._newest)
        self._newest = self._slices[index] = LatencySketch()
        self._index = index
        self._expire(index)

    def _expire(self, index: int) -> None:
        if not self._slices or next(iter(self._slices)) >= index - SLICES:
            return
        for old in [key for key in self._slices if key < index - SLICES]:
            part = self._slices.pop(old)
            if part is self._newest:
                self._newest = LatencySketch()
            else:
                self._before.remove(part)
