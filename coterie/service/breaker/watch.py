"""What is known about one specialist, and the changes that the audit log keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.core.ensemble import EnsembleSettings, SloSettings
from coterie.service.breaker.correctness import (
    CLOSED,
    SHADOW_ONLY,
    BreakerSettings,
    CorrectnessBreaker,
)
from coterie.service.breaker.replica import ReplicaBreaker
from coterie.service.breaker.spike import SpikeController
from coterie.service.slo.board import EPOCH

EJECTED = "ejected"
# an operator lets what runs end, and nothing new begins
DRAINING = "draining"
NO_PROMISE = SloSettings()
# who changed something: the control itself
AUTOMATIC = "control"
# changes that may wait for the audit log
MAX_CHANGES = 10_000


def judging(checks: Sequence[str]) -> bool:
    """Whether any of these checks judges answers: `generic` finds only empty ones, which counts
    for nobody."""
    return any(name != "generic" for name in checks)


@dataclass(frozen=True, slots=True)
class WatchedSpecialist:
    """The settings of a specialist that the control reads."""

    name: str
    fallback: str = ""
    slo: SloSettings = NO_PROMISE
    # its answers have checks of their own
    has_checks: bool = False
    # shadows may be sent to it: local, or a remote server that opted in
    may_shadow: bool = True
    replicas: tuple[str, ...] = ()

    @property
    def is_watched(self) -> bool:
        """Whether its answers are judged, so that its window can fill."""
        return self.has_checks or self.slo.correctness > 0


class SpecialistWatch:
    """The state of one specialist."""

    def __init__(self, settings: WatchedSpecialist, ensemble: EnsembleSettings) -> None:
        self.settings = settings
        self.breaker = CorrectnessBreaker(
            BreakerSettings(
                settings.slo.correctness,
                ensemble.window_s,
                ensemble.min_judged,
                ensemble.breach_s,
                ensemble.recovery_s,
            )
        )
        self.spike = SpikeController(ensemble.spike_s)
        self.replicas = ReplicaBreaker(settings.replicas)
        # an operator demoted it
        self.is_held = False
        self.is_draining = False
        self.is_full = False
        # no replica can take a request now
        self.is_down = False

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def is_demoted(self) -> bool:
        return self.is_held or self.breaker.state == SHADOW_ONLY

    def state(self, now: float) -> str:
        return DRAINING if self.is_draining else self.breaker_state(now)

    def breaker_state(self, now: float) -> str:
        """Whether it drains or not."""
        if self.is_held or self.breaker.state == SHADOW_ONLY:
            return SHADOW_ONLY
        return EJECTED if self.is_down or self.replicas.all_ejected(now) else CLOSED

    def is_known(self, now: float) -> bool:
        """Whether enough of its answers were judged."""
        return self.breaker.window.is_known(now)


@dataclass(frozen=True, slots=True)
class ControlChange:
    """One entry of the audit log."""

    # seconds since 1970
    at: float
    # who: `control`, or an operator
    actor: str
    kind: str
    # a specialist, an intent, a replica or a canary
    subject: str
    details: Mapping[str, Any] = field(default_factory=dict)


class ChangeList:
    """Changes that wait for the audit log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changes: list[ControlChange] = []

    def add(self, actor: str, kind: str, subject: str, details: Mapping[str, Any]) -> None:
        if len(self._changes) < MAX_CHANGES:
            self._changes.append(ControlChange(self._clock(), actor, kind, subject, details))

    def take(self) -> list[ControlChange]:
        """Changes since the last call, oldest first."""
        changes, self._changes = self._changes, []
        return changes


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 that never jump."""
    return lambda: EPOCH + time.monotonic()
