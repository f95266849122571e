"""Whether to ask again, and when. Pure: told what happened, answers with a pause or raises.

A request that may have run is never sent twice unless that is harmless: everything but a GET is
repeated only where no connection came about, or where the server said that it did not take it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from time import monotonic
from typing import Any

import httpx

from coterie_client import errors
from coterie_client.calls import Call
from coterie_client.settings import CONNECT_S, Settings

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 8.0
# a server that asks for more patience than this is not waited for
MAX_RETRY_AFTER_S = 120.0
# a server that starts again is back within this
MAX_AWAY_S = 60.0
_REFUSALS = frozenset({429, 503})
_PASSING = frozenset({429, 502, 503, 504})
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException)


class Attempts:
    """All attempts at one call."""

    def __init__(self, call: Call[Any], settings: Settings) -> None:
        self.call, self.settings = call, settings
        self.retries = 0

    def request(self) -> dict[str, Any]:
        """Arguments of httpx's `build_request`."""
        call, settings = self.call, self.settings
        return {
            "method": call.method,
            "url": settings.base_url + call.path,
            "params": call.params or None,
            "headers": settings.headers(call),
            "json": call.body,
            "content": call.content,
            "timeout": httpx.Timeout(settings.timeout_s, connect=CONNECT_S),
        }

    def failed(self, error: httpx.TransportError) -> float:
        """Seconds to wait after no answer came."""
        passing = isinstance(error, _UNSENT) or (
            self.call.repeatable and isinstance(error, _BROKEN)
        )
        if passing and self.retries < self.settings.max_retries:
            return self._pause_s(None)
        raise broken(error, self.settings) from error

    def refused(self, answer: httpx.Response) -> float:
        """Seconds to wait after an answer that is no success; its body has been read."""
        error = errors.of_answer(answer.status_code, answer.headers, answer.content)
        wait_s = error.retry_after_s or 0.0
        if (
            self._passing(answer.status_code, answer.headers)
            and self.retries < self.settings.max_retries
            and wait_s <= MAX_RETRY_AFTER_S
        ):
            return self._pause_s(error.retry_after_s)
        raise error

    def _passing(self, status: int, headers: Mapping[str, str]) -> bool:
        advice = headers.get("x-should-retry")
        if advice == "false":
            return False
        if not self.call.repeatable:
            return status in _REFUSALS
        return status in _PASSING or advice == "true"

    def _pause_s(self, asked_s: float | None) -> float:
        backoff_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**self.retries)
        self.retries += 1
        # spread, so that those who were refused together do not come back together
        spread = random.random()
        return backoff_s * (0.5 + spread / 2) if asked_s is None else asked_s * (1 + spread / 4)


def broken(error: httpx.TransportError, settings: Settings) -> errors.CoterieError:
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return errors.Timeout(f"no answer within {settings.timeout_s} s")
    told = str(error) or type(error).__name__
    return errors.ConnectionFailed(f"cannot talk to {settings.base_url}: {told}")


class Polls:
    """When to look at a job again, until its time is over.

    A job outlives its server: one that is away for a while is waited for.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.deadline = None if timeout_s is None else monotonic() + timeout_s
        self.timeout_s, self.pause_s = timeout_s, 0.05
        self.heard_at = monotonic()

    def heard(self) -> None:
        self.heard_at = monotonic()

    def lost(self, error: errors.CoterieError) -> None:
        """Raises `error` when nobody has answered for too long."""
        if monotonic() - self.heard_at > MAX_AWAY_S:
            raise error

    def next_pause_s(self) -> float:
        self.pause_s = min(2.0, self.pause_s * 1.5)
        if self.deadline is None:
            return self.pause_s
        left_s = self.deadline - monotonic()
        if left_s <= 0:
            raise errors.Timeout(f"the job has not ended within {self.timeout_s} s")
        return min(self.pause_s, left_s)
