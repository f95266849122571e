"""Quotas of tenants: requests a minute and tokens a minute.

A bucket holds what a tenant may use at once, at most the quota of one minute, and fills at the
quota's rate. A request takes one request at its start. When its prompt is known it takes the tokens
of the prompt and of the longest answer; at its end it gives back what it did not use. A request
that is refused gives back everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coterie.core.ensemble import TenantSettings
from coterie.core.errors import InvalidRequest, Overloaded
from coterie.core.lru import LruCache

MINUTE_S = 60.0
# tenants with a bucket; those that were idle longest are forgotten, with full buckets
MAX_TENANTS = 100_000
REQUESTS, TOKENS = "requests", "tokens"


class QuotaExceeded(Overloaded):
    """The tenant's own quota is used up: no other specialist or replica can help."""


@dataclass(frozen=True, slots=True)
class QuotaState:
    """One quota of a tenant as the response headers show it."""

    # REQUESTS or TOKENS
    kind: str
    limit: int
    remaining: int
    # seconds until the quota is whole again
    reset_s: float


class _Bucket:
    """May be overdrawn: what a job or a long answer takes is waited for by later requests."""

    __slots__ = ("at", "left", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self.left, self.at = limit, float(limit), now

    def fill(self, limit: int, now: float) -> None:
        """Bring it up to date. A changed limit changes what is left by as much."""
        if limit != self.limit:
            self.left += limit - self.limit
            self.limit = limit
        self.left = min(float(limit), self.left + max(now - self.at, 0.0) * limit / MINUTE_S)
        self.at = now

    def wait_s(self, amount: float) -> float:
        return max((amount - self.left) * MINUTE_S / self.limit, 0.0)


class TenantQuotas:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, max_tenants: int = MAX_TENANTS
    ) -> None:
        self._clock = clock
        self._buckets: LruCache[tuple[str, str], _Bucket] = LruCache(max_tenants)

    def enter(self, settings: TenantSettings | None, *, is_accepted: bool = False) -> QuotaUse:
        """Take one request. Raises QuotaExceeded if the quota is used up, with the time to wait. A
        request that `is_accepted` already, as a job is, was counted then, and is not refused."""
        use = QuotaUse(self, settings, is_accepted)
        if settings is not None and settings.requests_per_minute and not is_accepted:
            self._take(settings, REQUESTS, 1)
            use.requests = 1
        return use

    def state(self, settings: TenantSettings) -> Sequence[QuotaState]:
        """What is left of each quota that the tenant has."""
        return [
            QuotaState(
                kind,
                limit,
                max(int(bucket.left), 0),
                bucket.wait_s(limit),
            )
            for kind, limit in _limits(settings)
            for bucket in (self._bucket(settings.name, kind, limit),)
        ]

    def take_tokens(self, settings: TenantSettings, amount: int) -> None:
        self._take(settings, TOKENS, amount)

    def give_back(self, settings: TenantSettings, kind: str, amount: int) -> None:
        """`amount` below 0 takes more, which may overdraw the bucket."""
        limit = dict(_limits(settings)).get(kind)
        if limit is not None and amount:
            bucket = self._bucket(settings.name, kind, limit)
            bucket.left = min(float(limit), bucket.left + amount)

    def _take(self, settings: TenantSettings, kind: str, amount: int) -> None:
        limit = dict(_limits(settings))[kind]
        bucket = self._bucket(settings.name, kind, limit)
        if bucket.left < amount:
            raise QuotaExceeded(
                f"the quota of {limit} {kind} a minute of {settings.name!r} is used up",
                param=f"{kind}_per_minute",
                retry_after_s=bucket.wait_s(amount),
            )
        bucket.left -= amount

    def _bucket(self, tenant: str, kind: str, limit: int) -> _Bucket:
        now, key = self._clock(), (tenant, kind)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = _Bucket(limit, now)
            self._buckets.put(key, bucket)
        bucket.fill(limit, now)
        return bucket


class QuotaUse:
    """What one request has taken. `cancel` or `settle` ends it; a second call changes nothing. An
    error that leaves its `with` block cancels it."""

    __slots__ = ("_is_accepted", "_quotas", "_settings", "requests", "tokens")

    def __init__(
        self, quotas: TenantQuotas, settings: TenantSettings | None, is_accepted: bool
    ) -> None:
        self._quotas, self._settings, self._is_accepted = quotas, settings, is_accepted
        self.requests = 0
        self.tokens = 0

    def __enter__(self) -> QuotaUse:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.cancel()

    def reserve(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Take the tokens of the prompt and of the longest answer. A request that is larger than
        the quota takes all of it."""
        settings = self._settings
        if settings is None or not settings.tokens_per_minute:
            return
        limit = settings.tokens_per_minute
        if prompt_tokens > limit and not self._is_accepted:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens; the quota of {settings.name!r} is {limit} "
                "tokens a minute",
                param="tokens_per_minute",
            )
        amount = min(prompt_tokens + answer_tokens, limit)
        if self._is_accepted:
            self._quotas.give_back(settings, TOKENS, -amount)
        else:
            self._quotas.take_tokens(settings, amount)
        self.tokens = amount

    def settle(self, used_tokens: int) -> None:
        """The request has ended and has used this many tokens."""
        settings, self._settings = self._settings, None
        if settings is not None and settings.tokens_per_minute:
            self._quotas.give_back(settings, TOKENS, self.tokens - used_tokens)

    def cancel(self) -> None:
        """The request was refused: give back everything."""
        settings, self._settings = self._settings, None
        if settings is not None:
            self._quotas.give_back(settings, REQUESTS, self.requests)
            self._quotas.give_back(settings, TOKENS, self.tokens)


def _limits(settings: TenantSettings) -> list[tuple[str, int]]:
    quotas = ((REQUESTS, settings.requests_per_minute), (TOKENS, settings.tokens_per_minute))
    return [(kind, limit) for kind, limit in quotas if limit]
