"""Whether a remote server is there, from probes and from what requests met. Pure: no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable

# between two probes of a server that is up and gets no requests
IDLE_PROBE_S = 15.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0


class RemoteHealth:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # None = not known yet
        self.is_up: bool | None = None
        self.reason = ""
        self.num_returns = 0
        self.num_deaths = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._probe_at = clock()

    def succeeded(self) -> bool:
        """A probe or an answer came. Returns whether the server is back."""
        is_back = self.is_up is False
        self.num_returns += is_back
        self.is_up, self.reason = True, ""
        self._backoff_s = FIRST_BACKOFF_S
        self._probe_at = self._clock() + IDLE_PROBE_S
        return is_back

    def failed(self, reason: str) -> bool:
        """A probe failed, or nobody listens. Returns whether the server was up until now."""
        was_up = self.is_up is not False
        if was_up:
            self.num_deaths += 1
            self._backoff_s = FIRST_BACKOFF_S
        else:
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self.is_up, self.reason = False, reason
        self._probe_at = self._clock() + self._backoff_s
        return was_up

    def suspect(self) -> None:
        """A request met a fault that may be its own: the next probe is due now."""
        if self.is_up is not False:
            self._probe_at = self._clock()

    @property
    def probe_in_s(self) -> float:
        return max(self._probe_at - self._clock(), 0.0)
