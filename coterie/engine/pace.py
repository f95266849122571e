"""How fast a lane has been lately, and what that means for who waits. Seconds, tokens, requests.

Sums decay with time, so that the estimates follow the load of the last half minute.
"""

from __future__ import annotations

import math

HORIZON_S = 30.0
# before anything was measured
FIRST_GUESS_S = 1.0
MAX_RETRY_S = 600.0


class Pace:
    def __init__(self) -> None:
        self._busy_s = 0.0
        self._tokens = 0.0
        self._ended = 0.0
        self._steps = 0.0

    def record(self, step_s: float, num_tokens: int, num_ended: int) -> None:
        """One step of this lane took `step_s` for `num_tokens` and ended `num_ended` requests."""
        keep = math.exp(-step_s / HORIZON_S)
        self._busy_s = self._busy_s * keep + step_s
        self._tokens = self._tokens * keep + num_tokens
        self._ended = self._ended * keep + num_ended
        self._steps = self._steps * keep + 1

    @property
    def step_s(self) -> float:
        return self._busy_s / self._steps if self._steps else 0.0

    def first_token_s(self, pending_tokens: int, num_ahead: int) -> float:
        """`pending_tokens` are computed first; `num_ahead` requests have to end before it runs."""
        if not self._steps:
            return 0.0
        compute_s = pending_tokens * self._busy_s / max(self._tokens, 1.0)
        return self.step_s + compute_s + num_ahead * self._end_interval_s(pending_tokens)

    def retry_after_s(self, queue: int, pending_tokens: int) -> float:
        """When an eighth of a full queue has moved on, at the rate at which requests end."""
        if not self._steps:
            return FIRST_GUESS_S
        moved = max(queue // 8, 1)
        wait_s = moved * self._end_interval_s(pending_tokens)
        return min(max(wait_s, 0.1), MAX_RETRY_S)

    def _end_interval_s(self, pending_tokens: int) -> float:
        if self._ended >= 1e-3:
            return self._busy_s / self._ended
        return pending_tokens * self._busy_s / max(self._tokens, 1.0)
