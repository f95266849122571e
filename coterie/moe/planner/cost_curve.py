"""Seconds by rows, or by another number, from a few measured points."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by number of rows: linear between the points; beyond them the last slope, or flat
    where a busy machine measured a negative one."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def scaled(self, factor: float) -> CostCurve:
        """So many times the seconds."""
        return CostCurve(self.rows, tuple(seconds * factor for seconds in self.seconds))

    def at(self, rows: float) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.seconds[0]
        right = min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        slope = (y1 - y0) / (x1 - x0)
        return y1 + max(slope, 0.0) * (rows - x1) if rows > x1 else y0 + slope * (rows - x0)
