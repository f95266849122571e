"""How fast this core is now: limits of CPU time are written for a usual one."""

from __future__ import annotations

import time

# CPU seconds of the loop below on a core of the usual speed
_USUAL_S = 0.05


def slowness() -> float:
    """How many times longer than usual this core takes now; at least 1."""
    begun = time.process_time()
    for _ in range(2_000_000):
        pass
    return max(1.0, (time.process_time() - begun) / _USUAL_S)
