"""Which replicas of a specialist are left out after crashes and timeouts: Envoy's outlier rules.

A replica is ejected after `failures` failures in a row, for `base_s` times the number of its
ejections, and then gets requests again. Each `base_s` without a failure takes one off that number.
Never more than a share of the replicas is out at once, but always one may be.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EjectionRules:
    failures: int = 5
    base_s: float = 30.0
    longest_s: float = 300.0
    share: float = 0.5


@dataclass(slots=True)
class _ReplicaHealth:
    failures: int = 0
    ejections: int = 0
    # None = it is not ejected
    back_at: float | None = None
    # since when there was neither failure nor ejection; moves on when an ejection is forgiven
    calm_since: float = 0.0


class ReplicaBreaker:
    def __init__(self, replicas: Sequence[str], rules: EjectionRules | None = None) -> None:
        self.rules = rules or EjectionRules()
        self._health = {name: _ReplicaHealth() for name in replicas}
        # those that are ejected: every decision asks for them
        self._out: set[str] = set()

    def names(self) -> Collection[str]:
        return self._health.keys()

    def succeeded(self, replica: str, now: float) -> None:
        health = self._health.get(replica)
        if health is None:
            return
        health.failures = 0
        self._forgive(replica, health, now)

    def failed(self, replica: str, now: float) -> bool:
        """Note a crash or a timeout. Returns whether the replica is ejected now."""
        health = self._health.get(replica)
        if health is None:
            return False
        self._forgive(replica, health, now)
        health.failures += 1
        health.calm_since = now
        if health.failures < self.rules.failures or health.back_at is not None:
            return False
        out = len(self.ejected(now))
        if out >= max(int(self.rules.share * len(self._health)), 1):
            return False
        health.ejections += 1
        health.failures = 0
        longest = self.rules.longest_s
        health.back_at = now + min(self.rules.base_s * health.ejections, longest)
        self._out.add(replica)
        return True

    def ejected(self, now: float) -> frozenset[str]:
        if not self._out:
            return frozenset()
        for name in list(self._out):
            self._readmit(name, self._health[name], now)
        return frozenset(self._out)

    def all_ejected(self, now: float) -> bool:
        return bool(self._out) and len(self.ejected(now)) == len(self._health)

    def back_in_s(self, now: float) -> float:
        """Seconds until the first ejected replica gets requests again."""
        times = [item.back_at for item in self._health.values() if item.back_at is not None]
        return max(min(times, default=now) - now, 0.0)

    def restore_all(self) -> None:
        """By an operator: every replica gets requests at once."""
        for health in self._health.values():
            health.back_at, health.failures = None, 0
        self._out.clear()

    def _readmit(self, name: str, health: _ReplicaHealth, now: float) -> None:
        if health.back_at is not None and now >= health.back_at:
            health.calm_since, health.back_at, health.failures = health.back_at, None, 0
            self._out.discard(name)

    def _forgive(self, name: str, health: _ReplicaHealth, now: float) -> None:
        self._readmit(name, health, now)
        if health.back_at is not None or not health.ejections:
            return
        calm = int((now - health.calm_since) // self.rules.base_s)
        if calm > 0:
            health.ejections = max(health.ejections - calm, 0)
            health.calm_since += calm * self.rules.base_s
