"""How good predictions of the next layer's experts are, and whether to go on using them.

Slot overlap (share of the asked experts that were predicted) and exact match are told apart. Makes
no prediction and moves nothing: the caller reports what it predicted, asked for and loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from coterie.core.errors import ConfigError
from coterie.core.moe import PREDICTIONS

# shares; below the first a use is switched off, at the second it may come back
_PROTECT_OFF, _PROTECT_ON = 0.30, 0.40
_PREFETCH_OFF, _PREFETCH_ON = 0.50, 0.60
_LINK_OFF, _LINK_ON = 0.05, 0.10
# outcomes to see before judging, and to wait before another try
_WINDOW = 256
_FIRST_REST, _LONGEST_REST = 2048, 65536


@dataclass(slots=True)
class PredictionSwitch:
    """On until its measure falls below `off`; after a rest tried again, which doubles the next."""

    off: float
    on: float
    active: bool = True
    reason: str = ""
    _good: float = 0.0
    _seen: int = 0
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def saw(self, good: float, total: int, what: str) -> None:
        if not self.active or not total:
            return
        self._good += good
        self._seen += total
        if self._seen < _WINDOW:
            return
        share = self._good / self._seen
        if share < self.off:
            self.active = False
            self.reason = f"{what} {share:.0%}, below {self.off:.0%}"
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        elif share >= self.on:
            self._next_rest = _FIRST_REST
        self._good, self._seen = self._good / 2, self._seen // 2

    def credit(self, good: float) -> None:
        """What was seen before turned out well after all."""
        if self.active:
            self._good += good

    def passed(self, demands: int) -> None:
        """Time, counted in demands: a rest ends."""
        if self.active:
            return
        self._rest -= demands
        if self._rest <= 0:
            self.active, self.reason = True, ""
            self._good, self._seen = 0.0, 0


@dataclass(slots=True)
class PredictionTracker:
    """Accounts and switches. Modes: off, protect, prefetch, or auto (both, while they win)."""

    mode: str = "auto"
    predictions: int = 0
    asked: int = 0
    overlap: int = 0
    exact: int = 0
    prefetched: int = 0
    useful: int = 0
    prefetched_bytes: int = 0
    # why nobody listens, whatever the mode
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
        """Predictions are wanted at all: what they name is not evicted."""
        if self.unused or self.mode == "off":
            return False
        return self._protect.active or self.mode != "auto"

    @property
    def prefetches(self) -> bool:
        """What they name may also be loaded, in idle link time."""
        if self.unused:
            return False
        if self.mode == "auto":
            return self._protect.active and self._prefetch.active and self._link.active
        return self.mode == "prefetch"

    def predict(self, layer: int, experts: Collection[int]) -> None:
        self._pending[layer] = frozenset(experts)

    def ask(self, layer: int, experts: Collection[int]) -> None:
        """What the layer really asked for."""
        self._protect.passed(len(experts))
        self._prefetch.passed(len(experts))
        self._link.passed(len(experts))
        guess = self._pending.pop(layer, None)
        if guess is None or not experts:
            return
        found = len(guess.intersection(experts))
        self.predictions += 1
        self.asked += len(experts)
        self.overlap += found
        self.exact += guess == frozenset(experts)
        self._protect.saw(found, len(experts), "slot overlap")

    def link(self, idle: bool) -> None:
        """Whether there was time to load what is predicted now."""
        self._link.saw(float(idle), 1, "idle link")

    def fetch(self, loads: int, nbytes: int) -> None:
        """So many experts were loaded because they were predicted."""
        self.prefetched += loads
        self.prefetched_bytes += nbytes
        self._prefetch.saw(0.0, loads, "useful prefetches")

    def used(self, prefetch_hits: int) -> None:
        """So many of them were then asked for."""
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
