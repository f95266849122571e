"""Measures how good predictions of the next layer's experts are, and switches them off and on.

Slot overlap (the share of the demanded experts that were predicted) and exact match are counted
separately. This module makes no prediction and moves nothing: the caller reports what it predicted,
needed and loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from coterie.core.errors import ConfigError
from coterie.core.moe import PREDICTIONS

# shares: below the first a use of predictions is switched off, from the second on it works well
_PROTECT_OFF, _PROTECT_ON = 0.30, 0.40
_PREFETCH_OFF, _PREFETCH_ON = 0.50, 0.60
_LINK_OFF, _LINK_ON = 0.05, 0.10
# outcomes in one measurement, and demands to wait before another attempt
_WINDOW = 256
_FIRST_PAUSE, _LONGEST_PAUSE = 2048, 65536


@dataclass(slots=True)
class PredictionSwitch:
    """Active until its measured share falls below `off`. After a pause it is tried again; each
    further pause is twice as long."""

    off: float
    on: float
    active: bool = True
    reason: str = ""
    _good: float = 0.0
    _total: int = 0
    _pause: int = 0
    _next_pause: int = _FIRST_PAUSE

    def count(self, good: float, total: int, what: str) -> None:
        if not self.active or not total:
            return
        self._good += good
        self._total += total
        if self._total < _WINDOW:
            return
        share = self._good / self._total
        if share < self.off:
            self.active = False
            self.reason = f"{what} {share:.0%}, below {self.off:.0%}"
            self._pause, self._next_pause = (
                self._next_pause,
                min(2 * self._next_pause, _LONGEST_PAUSE),
            )
        elif share >= self.on:
            self._next_pause = _FIRST_PAUSE
        self._good, self._total = self._good / 2, self._total // 2

    def credit(self, good: float) -> None:
        """Outcomes that were counted as bad before are good after all."""
        if self.active:
            self._good += good

    def tick(self, demands: int) -> None:
        """Time passes, counted in demands; a pause may end."""
        if self.active:
            return
        self._pause -= demands
        if self._pause <= 0:
            self.active, self.reason = True, ""
            self._good, self._total = 0.0, 0


@dataclass(slots=True)
class PredictionTracker:
    """Counts outcomes and switches. Modes: off, protect, prefetch, or auto (both, while useful)."""

    mode: str = "auto"
    predictions: int = 0
    asked: int = 0
    overlap: int = 0
    exact: int = 0
    prefetched: int = 0
    useful: int = 0
    prefetched_bytes: int = 0
    # why predictions have no effect in any mode; empty when they have
    unused: str = ""
    _pending: dict[int, frozenset[int]] = field(default_factory=dict)
    _protect: PredictionSwitch = field(
        default_factory=lambda: PredictionSwitch(_PROTECT_OFF, _PROTECT_ON)
    )
    _prefetch: PredictionSwitch = field(
        default_factory=lambda: PredictionSwitch(_PREFETCH_OFF, _PREFETCH_ON)
    )
    _link: PredictionSwitch = field(default_factory=lambda: PredictionSwitch(_LINK_OFF, _LINK_ON))

    def __post_init__(self) -> None:
        if self.mode not in PREDICTIONS:
            raise ConfigError(f"{self.mode!r}: one of {', '.join(PREDICTIONS)}", param="predict")

    @property
    def protects(self) -> bool:
        """Whether predicted experts are protected from eviction."""
        if self.unused or self.mode == "off":
            return False
        return self._protect.active or self.mode != "auto"

    @property
    def prefetches(self) -> bool:
        """Whether predicted experts are also loaded, while the link is idle."""
        if self.unused:
            return False
        if self.mode == "auto":
            return self._protect.active and self._prefetch.active and self._link.active
        return self.mode == "prefetch"

    def predict(self, layer: int, experts: Collection[int]) -> None:
        self._pending[layer] = frozenset(experts)

    def ask(self, layer: int, experts: Collection[int]) -> None:
        """The experts that the layer really needs."""
        self._protect.tick(len(experts))
        self._prefetch.tick(len(experts))
        self._link.tick(len(experts))
        predicted = self._pending.pop(layer, None)
        if predicted is None or not experts:
            return
        found = len(predicted.intersection(experts))
        self.predictions += 1
        self.asked += len(experts)
        self.overlap += found
        self.exact += predicted == frozenset(experts)
        self._protect.count(found, len(experts), "slot overlap")

    def link(self, idle: bool) -> None:
        """Whether the link was idle, so that a prefetch could have started."""
        self._link.count(float(idle), 1, "idle link")

    def fetch(self, loads: int, nbytes: int) -> None:
        """This many experts were loaded because they were predicted."""
        self.prefetched += loads
        self.prefetched_bytes += nbytes
        self._prefetch.count(0.0, loads, "useful prefetches")

    def used(self, prefetch_hits: int) -> None:
        """This many prefetched experts were used."""
        self.useful += prefetch_hits
        self._prefetch.credit(prefetch_hits)

    def report(self) -> dict[str, float | int | str | bool]:
        wasted = max(0, self.prefetched - self.useful)
        each = self.prefetched_bytes / self.prefetched if self.prefetched else 0.0
        return {
            "mode": self.mode,
            "predictions": self.predictions,
            "slot_overlap": self.overlap / self.asked if self.asked else 0.0,
            "exact_match": self.exact / self.predictions if self.predictions else 0.0,
            "prefetched": self.prefetched,
            "useful_prefetches": self.useful,
            "wasted_bytes": round(wasted * each),
            "protecting": self.protects,
            "prefetching": self.prefetches,
            "why_off": self._why_off(),
        }

    def _why_off(self) -> str:
        if self.mode == "off":
            return "asked for"
        if self.unused:
            return self.unused
        if self.mode != "auto":
            return ""
        return self._protect.reason or self._prefetch.reason or self._link.reason
