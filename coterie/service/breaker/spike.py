"""What is done while a specialist has too much to do, step by step, and undone in reverse order.

    0 normal -> 1 fewer shadows -> 2 a share goes to an alternate -> 3 a priority floor

Each step is taken after `spike_s` of high load, and taken back after half of that of low load.
Load between the two limits changes nothing.

The last step refuses what exceeds the capacity. The queue shows how much that is: the share of the
demand that is refused grows with it, so it stays where as much is accepted as ends. Refused are the
lowest priorities; in the one where the capacity ends each tenant may send up to its share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from coterie.core.quick_init import quick_init

NORMAL, FEWER_SHADOWS, SPILL, PRIORITY_FLOOR = range(4)
STEPS = ("normal", "fewer_shadows", "spill", "priority_floor")
# 1 = as much as it can bear
HIGH_LOAD, LOW_LOAD = 1.0, 0.5
# what a step does to the thresholds of an intent
SHADOW_FACTOR = 0.25
SPILL_MORE, MAX_SPILL = 0.5, 0.9
# the least share of requests that step 2 moves
LEAST_SPILL = 0.25
# in step 3: the load at which nothing is refused, and that at which the most is: a full queue
OPEN_LOAD, SHUT_LOAD, MOST_REFUSED = LOW_LOAD, 2.0, 0.9
# demand this many seconds ago counts 1/e; tenants that are counted apart
DEMAND_S, MAX_TENANTS = 10.0, 256


@quick_init
@dataclass(frozen=True, slots=True)
class IntentThresholds:
    """What decides about shadows, alternates and refusals for one request."""

    shadow_below: float
    spill_below: float
    priority_floor: int = 0


class SpikeController:
    """Times given must not decrease."""

    def __init__(self, spike_s: float) -> None:
        self.spike_s = spike_s
        self.level = NORMAL
        self.load = 0.0
        self.demand = DemandShares()
        # since when the load has been high, or low; None = it is between the two
        self._high_since: float | None = None
        self._low_since: float | None = None

    def loaded(self, load: float, now: float) -> int:
        """Note the load. Returns by how much the level changed: 1, 0 or -1."""
        self.load = load
        if load >= HIGH_LOAD:
            self._low_since = None
            if self._high_since is None:
                self._high_since = now
            if self.level < PRIORITY_FLOOR and now - self._high_since >= self.spike_s:
                return self._step(1, now)
        elif load < LOW_LOAD:
            self._high_since = None
            if self._low_since is None:
                self._low_since = now
            if self.level > NORMAL and now - self._low_since >= self.spike_s / 2:
                return self._step(-1, now)
        else:
            self._high_since = self._low_since = None
        return 0

    @property
    def is_high(self) -> bool:
        return self.load >= HIGH_LOAD

    def reset(self) -> None:
        """By an operator."""
        self.level, self._high_since, self._low_since = NORMAL, None, None

    def thresholds(self, usual: IntentThresholds) -> IntentThresholds:
        """`usual` as the level changes it. Without load nothing is spilled."""
        level = self.level
        shadow = usual.shadow_below * (SHADOW_FACTOR if level >= FEWER_SHADOWS else 1.0)
        spill = usual.spill_below if self.is_high or level >= FEWER_SHADOWS else 0.0
        if level >= SPILL:
            spill = max(spill, min(usual.spill_below + SPILL_MORE, MAX_SPILL))
        return IntentThresholds(shadow, spill, usual.priority_floor)

    @property
    def spill_share(self) -> float:
        """The share of requests that go to a viable alternate however sure the router was: what
        exceeds the capacity, as far as the load shows it."""
        if self.level < SPILL:
            return 0.0
        return max(LEAST_SPILL, 1.0 - 1.0 / max(self.load, 1.0))

    def accepted(self, priority: int, tenant: str) -> float:
        """The share of such requests that is accepted now."""
        if self.level < PRIORITY_FLOOR:
            return 1.0
        surplus = MOST_REFUSED * (self.load - OPEN_LOAD) / (SHUT_LOAD - OPEN_LOAD)
        return self.demand.accepted(priority, tenant, min(max(surplus, 0.0), MOST_REFUSED))

    def _step(self, change: int, now: float) -> int:
        self.level += change
        # the next step needs the same time again
        self._high_since = now if change > 0 else None
        self._low_since = now if change < 0 else None
        return change


class DemandShares:
    """How much was asked for lately, by priority and tenant. Times must not decrease."""

    def __init__(self) -> None:
        # priority -> tenant -> requests, newer ones counted as more; and the shares of tenants
        self._asked: dict[int, dict[str, float]] = {}
        self._shares: dict[str, float] = {}
        self._began_at = 0.0

    def add(self, priority: int, tenant: str, share: float, now: float) -> None:
        # after so long nothing from before counts
        age = min((now - self._began_at) / DEMAND_S, 100.0)
        weight = math.exp(age)
        if age > 10.0:
            self._fade(weight)
            self._began_at, weight = now, 1.0
        if tenant not in self._shares and len(self._shares) >= MAX_TENANTS:
            tenant, share = "", 1.0
        # a reload may have changed it
        self._shares[tenant] = share
        asked = self._asked.setdefault(priority, {})
        asked[tenant] = asked.get(tenant, 0.0) + weight

    def accepted(self, priority: int, tenant: str, surplus: float) -> float:
        """The share of a tenant's requests of this priority that is accepted, if `surplus` of all
        that is asked for has to be refused."""
        totals = {level: sum(asked.values()) for level, asked in self._asked.items()}
        refused = surplus * sum(totals.values())
        refused -= sum(total for level, total in totals.items() if level < priority)
        here = totals.get(priority, 0.0)
        if refused <= 0:
            return 1.0
        if refused >= here:
            return 0.0
        asked = self._asked[priority]
        tenant = tenant if tenant in asked else ""
        if tenant not in asked:
            return 1.0 - refused / here
        level = _fair_level(asked, self._shares, here - refused)
        return min(level * self._shares[tenant] / asked[tenant], 1.0)

    def _fade(self, weight: float) -> None:
        """Make the counts small again, and forget what does not count any more."""
        for level, asked in list(self._asked.items()):
            kept = {name: n / weight for name, n in asked.items() if n / weight > 1e-3}
            self._asked[level] = kept
            if not kept:
                del self._asked[level]
        here = {name for asked in self._asked.values() for name in asked}
        self._shares = {name: share for name, share in self._shares.items() if name in here}


def _fair_level(asked: Mapping[str, float], shares: Mapping[str, float], room: float) -> float:
    """What each tenant gets for a share of 1, so that together they get `room`: who asks for less
    gets that, and leaves the rest to the others."""
    left = sum(shares[name] for name in asked)
    for name in sorted(asked, key=lambda name: asked[name] / shares[name]):
        if asked[name] * left >= room * shares[name]:
            break
        room -= asked[name]
        left -= shares[name]
    return room / left if left > 0 else math.inf
