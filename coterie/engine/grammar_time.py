"""How much processor time the grammars of a request and of a tenant may take.

What a step of an ordinary grammar takes is free, and so is each state that the search for an ending
visits: a count bounds the search. Only what is beyond it counts: against the request, and against
its tenant, whose account empties slowly. A request that has used up its time fails with a typed
error. While a tenant's account is full, its requests get less, so that grammars which cost no more
than others still run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.core.errors import CoterieError, InvalidRequest, Overloaded
from coterie.core.lru import LruCache

if TYPE_CHECKING:
    from llguidance import LLMatcher

# processor time of one token that is free
FREE_S = 0.05
# of the start, which compiles the grammar
FREE_START_S = 0.5
# of one state that a search visits; it takes about 0.2 ms, in a slow process three times that
FREE_STATE_S = 0.0006
# beyond that: of one request, and of one whose tenant has spent `TENANT_S`
REQUEST_S, LEAST_S = 0.5, 0.1
# of one tenant, and how much of it comes back in a second
TENANT_S, TENANT_RETURN_S = 6.0, 0.1
MAX_TENANTS = 1024
# tokens that a matcher consumes in one call, and the longest that a call may take, because it holds
# the interpreter meanwhile; ordinary ones take microseconds, seldom 80 ms
MAX_CONSUMED, MAX_CALL_S = 4, 0.1
# in this time the memory of what a tenant took falls to the half
HALF_S = 1.0


@dataclass(slots=True)
class RequestTime:
    """The account of one request."""

    tenant: str
    over_s: float = 0.0


@dataclass(slots=True)
class _TenantTime:
    at: float
    over_s: float = 0.0
    # decides whose turn it is
    lately_s: float = 0.0


class TenantTimes:
    """The accounts of the tenants. Used under a lock."""

    def __init__(self) -> None:
        self._known: LruCache[str, _TenantTime] = LruCache(MAX_TENANTS)

    def lately_s(self, tenant: str) -> float:
        return self._now(tenant).lately_s

    def left_s(self, request: RequestTime) -> float:
        """How much more than what is free the request may take."""
        has_spent = self._now(request.tenant).over_s >= TENANT_S
        return (LEAST_S if has_spent else REQUEST_S) - request.over_s

    def charge(self, request: RequestTime, spent_s: float, free_s: float) -> None:
        account, over_s = self._now(request.tenant), max(spent_s - free_s, 0.0)
        account.lately_s += spent_s
        account.over_s += over_s
        request.over_s += over_s

    def refusal(self, request: RequestTime) -> CoterieError:
        over_s = self._now(request.tenant).over_s
        if request.over_s < REQUEST_S and over_s >= TENANT_S:
            wait_s = max((over_s - TENANT_S) / TENANT_RETURN_S, 1.0)
            return Overloaded(
                "the grammars of this tenant took too much time lately, and this one is slow too",
                retry_after_s=wait_s,
            )
        return InvalidRequest(
            "the grammar takes too much time to follow; simplify it", param="response_format"
        )

    def _now(self, tenant: str) -> _TenantTime:
        now = time.monotonic()
        account = self._known.get(tenant)
        if account is None:
            account = _TenantTime(now)
            self._known.put(tenant, account)
        passed_s, account.at = now - account.at, now
        account.over_s = max(account.over_s - passed_s * TENANT_RETURN_S, 0.0)
        account.lately_s *= 0.5 ** (passed_s / HALF_S)
        return account


class TimeIsUp(Exception):
    """The task took as long as it may."""


class TaskClock(threading.local):
    """The time limit of the task that this thread runs; long loops look at it."""

    _until = float("inf")
    _looked_at = 0.0
    # how much of the time of the task is free
    free_s = 0.0

    def begin(self, left_s: float, free_s: float) -> float:
        began = time.thread_time()
        self._until, self.free_s = began + left_s + free_s, free_s
        return began

    def visit(self) -> None:
        """Before a search visits a state."""
        self._until += FREE_STATE_S
        self.free_s += FREE_STATE_S

    def check(self) -> None:
        """Before a call of the matcher."""
        self._looked_at = time.thread_time()
        if self._looked_at > self._until:
            raise TimeIsUp

    def check_call(self) -> None:
        """Behind a call: the next one would take longer still."""
        if time.thread_time() - self._looked_at > MAX_CALL_S:
            raise TimeIsUp


CLOCK = TaskClock()


def consumed(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Let the matcher consume the tokens, while the clock is looked at."""
    for start in range(0, len(tokens), MAX_CONSUMED):
        CLOCK.check()
        if not matcher.consume_tokens(list(tokens[start : start + MAX_CONSUMED])):
            return False
        CLOCK.check_call()
    return True


def follows(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Whether the matcher would consume all of the tokens. Longer and longer beginnings are tried,
    so that the clock is looked at before a call takes long."""
    size = min(MAX_CONSUMED, len(tokens))
    while True:
        CLOCK.check()
        if matcher.validate_tokens(list(tokens[:size])) != size:
            return False
        if size == len(tokens):
            return True
        CLOCK.check_call()
        size = min(size + size // 2, len(tokens))
