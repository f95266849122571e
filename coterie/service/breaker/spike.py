"""What is done while a specialist has too much to do, step by step, and undone in reverse order.

    0 normal -> 1 fewer shadows -> 2 unsure requests go to an alternate -> 3 a priority floor

Each step is taken after `spike_s` of high load, and taken back after half of that of low load.
Load between the two limits changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.quick_init import quick_init
from coterie.core.request import DEFAULT_PRIORITY

NORMAL, FEWER_SHADOWS, SPILL, PRIORITY_FLOOR = range(4)
STEPS = ("normal", "fewer_shadows", "spill", "priority_floor")
# 1 = as much as it can bear
HIGH_LOAD, LOW_LOAD = 1.0, 0.5
# what a step does to the thresholds of an intent
SHADOW_FACTOR = 0.25
SPILL_MORE, MAX_SPILL = 0.5, 0.9
# priorities below this one are refused in the last step
FLOOR = DEFAULT_PRIORITY


@quick_init
@dataclass(frozen=True, slots=True)
class IntentThresholds:
    """What decides about shadows, alternates and refusals for one request."""

    shadow_below: float
    spill_below: float
    priority_floor: int = 0


class SpikeController:
    """Times given must not decrease."""

    def __init__(self, spike_s: float) -> None:
        self.spike_s = spike_s
        self.level = NORMAL
        self.load = 0.0
        # since when the load has been high, or low; None = it is between the two
        self._high_since: float | None = None
        self._low_since: float | None = None

    def loaded(self, load: float, now: float) -> int:
        """Note the load. Returns by how much the level changed: 1, 0 or -1."""
        self.load = load
        if load >= HIGH_LOAD:
            self._low_since = None
            if self._high_since is None:
                self._high_since = now
            if self.level < PRIORITY_FLOOR and now - self._high_since >= self.spike_s:
                return self._step(1, now)
        elif load < LOW_LOAD:
            self._high_since = None
            if self._low_since is None:
                self._low_since = now
            if self.level > NORMAL and now - self._low_since >= self.spike_s / 2:
                return self._step(-1, now)
        else:
            self._high_since = self._low_since = None
        return 0

    @property
    def is_high(self) -> bool:
        return self.load >= HIGH_LOAD

    def reset(self) -> None:
        """By an operator."""
        self.level, self._high_since, self._low_since = NORMAL, None, None

    def thresholds(self, usual: IntentThresholds) -> IntentThresholds:
        """`usual` as the level changes it. Without load nothing is spilled."""
        level = self.level
        shadow = usual.shadow_below * (SHADOW_FACTOR if level >= FEWER_SHADOWS else 1.0)
        spill = usual.spill_below if self.is_high or level >= FEWER_SHADOWS else 0.0
        if level >= SPILL:
            spill = max(spill, min(usual.spill_below + SPILL_MORE, MAX_SPILL))
        floor = usual.priority_floor
        if level >= PRIORITY_FLOOR:
            floor = max(floor, FLOOR)
        return IntentThresholds(shadow, spill, floor)

    def _step(self, change: int, now: float) -> int:
        self.level += change
        # the next step needs the same time again
        self._high_since = now if change > 0 else None
        self._low_since = now if change < 0 else None
        return change
