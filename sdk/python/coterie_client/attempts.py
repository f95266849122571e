"""Whether to retry, and when. Pure: gets what happened, returns a pause or raises.

A request that may have run is sent again only if that is harmless: everything except a GET is
repeated only if no connection was made, or if the server said that it did not accept it.
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
# if a server asks for a longer wait than this, it is not retried
MAX_RETRY_AFTER_S = 120.0
# a server that is restarted answers again within this time
MAX_AWAY_S = 60.0
_REFUSALS = frozenset({429, 503})
_RETRY_STATUSES = frozenset({429, 502, 503, 504})
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException)


class Attempts:
    """All attempts of one call."""

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
        """Seconds to wait after no answer was received."""
        may_retry = isinstance(error, _UNSENT) or (
            self.call.repeatable and isinstance(error, _BROKEN)
        )
        if may_retry and self.retries < self.settings.max_retries:
            return self._pause_s(None)
        raise broken(error, self.settings) from error

    def refused(self, answer: httpx.Response) -> float:
        """Seconds to wait after an error response; its body has been read."""
        error = errors.of_answer(answer.status_code, answer.headers, answer.content)
        wait_s = error.retry_after_s or 0.0
        if (
            self._may_retry(answer.status_code, answer.headers)
            and self.retries < self.settings.max_retries
            and wait_s <= MAX_RETRY_AFTER_S
        ):
            return self._pause_s(error.retry_after_s)
        raise error

    def _may_retry(self, status: int, headers: Mapping[str, str]) -> bool:
        advice = headers.get("x-should-retry")
        if advice == "false":
            return False
        if not self.call.repeatable:
            return status in _REFUSALS
        return status in _RETRY_STATUSES or advice == "true"

    def _pause_s(self, requested_s: float | None) -> float:
        backoff_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**self.retries)
        self.retries += 1
        # random, so that clients that were refused together do not return together
        spread = random.random()
        return (
            backoff_s * (0.5 + spread / 2)
            if requested_s is None
            else requested_s * (1 + spread / 4)
        )


def broken(error: httpx.TransportError, settings: Settings) -> errors.CoterieError:
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return errors.Timeout(f"no answer within {settings.timeout_s} s")
    reason = str(error) or type(error).__name__
    return errors.ConnectionFailed(f"cannot talk to {settings.base_url}: {reason}")


class Polls:
    """When to ask for a job again, until the timeout.

    A job survives a restart of its server, so a server that is away for a while is tolerated.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.deadline = None if timeout_s is None else monotonic() + timeout_s
        self.timeout_s, self.pause_s = timeout_s, 0.05
        self.answered_at = monotonic()

    def answered(self) -> None:
        self.answered_at = monotonic()

    def no_answer(self, error: errors.CoterieError) -> None:
        """Raises `error` if there was no answer for too long."""
        if monotonic() - self.answered_at > MAX_AWAY_S:
            raise error

    def next_pause_s(self) -> float:
        self.pause_s = min(2.0, self.pause_s * 1.5)
        if self.deadline is None:
            return self.pause_s
        remaining_s = self.deadline - monotonic()
        if remaining_s <= 0:
            raise errors.Timeout(f"the job has not ended within {self.timeout_s} s")
        return min(self.pause_s, remaining_s)
