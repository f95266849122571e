"""How fast this core is now: limits of CPU time are written for a usual one."""

from __future__ import annotations

import time
from collections.abc import Callable

# CPU seconds of the loop below on a core of the usual speed
_USUAL_S = 0.05


def slowness() -> float:
    """How many times longer than usual this core takes now; at least 1."""
    begun = time.process_time()
    for _ in range(2_000_000):
        pass
    return max(1.0, (time.process_time() - begun) / _USUAL_S)


def lateness() -> float:
    """The same by the clock on the wall: what other programs take counts too."""
    begun = time.perf_counter()
    slowness()
    return max(1.0, (time.perf_counter() - begun) / _USUAL_S)


def usual_cpu_s(call: Callable[[], object], tries: int = 3) -> float:
    """CPU seconds of a call on a core of the usual speed: the least of some tries. A core's speed
    may halve at any moment, so each try is judged by the slower of its two ends."""
    least = float("inf")
    for _ in range(tries):
        before = slowness()
        begun = time.process_time()
        call()
        taken = time.process_time() - begun
        least = min(least, taken / max(before, slowness()))
    return least
