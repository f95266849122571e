"""How much processor time the grammars of a request and of a tenant may take.

What a step of an ordinary grammar takes is free, and so is each state that the search for an ending
visits: a count bounds the search. Only what is beyond it counts: against the request, and against
its tenant, whose account empties slowly. A request that has used up its time fails with a typed
error. While a tenant's account is full, its requests get less, so that grammars which cost no more
than others still run.

A call of the matcher cannot be interrupted, and holds the interpreter, without which no step of the
engine goes on; only compiling and masks do not hold it. The readings of an ambiguous text multiply,
and the time of a call grows with the cube of its tokens. So a call gets few tokens of a grammar
that may be ambiguous, and slow calls are never free, have a limit of their own, and are followed by
pauses.
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
# a call of the matcher is slow if it takes longer than this; ordinary ones take microseconds
SLOW_CALL_S = 0.01
# processor time of all slow calls of one task
MAX_SLOW_S = 0.1
# length of the pause behind a slow call, as a multiple of the call's time, and at most
PAUSE_FACTOR, MAX_PAUSE_S = 2.0, 0.1
# tokens of one call; only one token if the call before took longer than this
MAX_CALL_TOKENS, QUICK_CALL_S = 4, 0.001
# in this time the memory of what a tenant took falls to the half
HALF_S = 1.0


@dataclass(slots=True)
class RequestTime:
    """The account of one request."""

    tenant: str
    over_s: float = 0.0
    # processor time of its last task
    last_s: float = 0.0


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

    def charge(self, request: RequestTime, spent_s: float, clock: TaskClock) -> None:
        """Slow calls are never free."""
        account = self._now(request.tenant)
        over_s = max(spent_s - clock.free_s, clock.slow_s)
        request.last_s = spent_s
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
    # how many tokens the next call may get
    num_tokens = MAX_CALL_TOKENS
    # how much of the time of the task is free, and what its slow calls took
    free_s = slow_s = 0.0

    def begin(self, left_s: float, free_s: float) -> float:
        began = time.thread_time()
        self._until, self.free_s = began + left_s + free_s, free_s
        self.slow_s, self.num_tokens = 0.0, MAX_CALL_TOKENS
        return began

    def visit(self) -> None:
        """Before a search visits a state."""
        self._until += FREE_STATE_S
        self.free_s += FREE_STATE_S

    def excuse(self, spent_s: float) -> None:
        """What the task did for all requests."""
        self._until += spent_s
        self.free_s += spent_s

    def check(self) -> None:
        """Before a call of the matcher."""
        self._looked_at = time.thread_time()
        if self._looked_at > self._until:
            raise TimeIsUp

    def check_call(self) -> None:
        """After a call of the matcher that held the interpreter."""
        spent_s = time.thread_time() - self._looked_at
        self.num_tokens = MAX_CALL_TOKENS if spent_s < QUICK_CALL_S else 1
        if spent_s > SLOW_CALL_S:
            self.slow_s += spent_s
            if self.slow_s > MAX_SLOW_S:
                raise TimeIsUp
            _PAUSES.take(min(PAUSE_FACTOR * spent_s, MAX_PAUSE_S))


class _Pauses:
    """All threads take their pauses one after the other, so that several threads with slow calls
    hold the interpreter hardly longer than one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0

    def take(self, pause_s: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._until = max(self._until, now) + pause_s
            left_s = self._until - now
        time.sleep(left_s)


_PAUSES = _Pauses()
CLOCK = TaskClock()


def consumed(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Let the matcher consume the tokens, a few in one call."""
    start = 0
    while start < len(tokens):
        part = list(tokens[start : start + CLOCK.num_tokens])
        CLOCK.check()
        if not matcher.consume_tokens(part):
            return False
        CLOCK.check_call()
        start += len(part)
    return True


def follows(matcher: LLMatcher, tokens: Sequence[int], in_steps: bool) -> bool:
    """Whether the matcher would consume all of the tokens.

    `in_steps`, if the grammar may be ambiguous: the matcher consumes a few tokens in each call, and
    is rolled back at the end. For other grammars it is quicker to validate longer and longer
    beginnings, because consuming costs more.
    """
    if in_steps:
        return _follows_in_steps(matcher, tokens)
    size = min(MAX_CALL_TOKENS, len(tokens))
    while True:
        if not _fits(matcher, tokens[:size]):
            return False
        if size == len(tokens):
            return True
        size = min(size + size // 2, len(tokens))


def _follows_in_steps(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    start = 0
    try:
        # The last token, which may be the end, is not alone in its call: a matcher whose text is
        # complete would refuse it
        while len(tokens) - start > CLOCK.num_tokens + 1:
            part = list(tokens[start : start + CLOCK.num_tokens])
            CLOCK.check()
            taken = matcher.try_consume_tokens(part)
            CLOCK.check_call()
            start += taken
            if taken < len(part):
                return False
        return _fits(matcher, tokens[start:])
    finally:
        if start:
            matcher.rollback(start)


def _fits(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    CLOCK.check()
    num_valid: int = matcher.validate_tokens(list(tokens))
    CLOCK.check_call()
    return num_valid == len(tokens)
