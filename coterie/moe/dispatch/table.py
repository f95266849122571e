"""The strategies by name, how a user's text becomes two of them, and Krasis's spellings.

`NAME` serves both phases (layer_grouped decodes as active_only), `PREFILL+DECODE` one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from coterie.core.errors import ConfigError
from coterie.moe.dispatch.active_only import ActiveOnly
from coterie.moe.dispatch.adaptive.adaptive import Adaptive
from coterie.moe.dispatch.base import Strategy, StrategyContext
from coterie.moe.dispatch.chunked import Chunked
from coterie.moe.dispatch.cpu_only import CpuOnly
from coterie.moe.dispatch.hot_cached_static import HotCachedStatic
from coterie.moe.dispatch.layer_grouped import LayerGrouped
from coterie.moe.dispatch.lru import Lru
from coterie.moe.dispatch.persistent import Persistent, fallback
from coterie.moe.dispatch.pins import spare_slots
from coterie.moe.dispatch.static_pin import StaticPin
from coterie.moe.dispatch.weighted_pin import WeightedPin
from coterie.moe.store.base import ExpertGeometry

STRATEGIES: dict[str, type[Strategy]] = {
    "cpu_only": CpuOnly,
    "chunked": Chunked,
    "active_only": ActiveOnly,
    "static_pin": StaticPin,
    "weighted_pin": WeightedPin,
    "lru": Lru,
    "persistent": Persistent,
    "layer_grouped": LayerGrouped,
    "hot_cached_static": HotCachedStatic,
    "adaptive": Adaptive,
}

# one phase only: what serves the other when the name stands alone
_DECODE = {"layer_grouped": "active_only"}

_KRASIS = {
    "no-gpu-decode": "cpu_only",
    "expert-divisor 0": "chunked",
    "expert-divisor 1": "persistent",
    "cache-strategy lru": "lru+active_only",
}


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy by name, and its number where it takes one (`layer_grouped:4`)."""

    name: str
    number: int | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}:{self.number}"


def parse_strategy(text: str) -> tuple[StrategyChoice, StrategyChoice]:
    """What serves prefill, and what serves decode."""
    parts = _from_krasis(text).split("+")
    if len(parts) > 2:
        raise ConfigError(f"{text!r}: at most PREFILL+DECODE", param="strategy")
    prefill = _choice(parts[0])
    if len(parts) == 2:
        return prefill, _choice(parts[1])
    alone = _DECODE.get(prefill.name)
    return prefill, prefill if alone is None else StrategyChoice(alone)


def resolve_strategy(text: str, geometry: ExpertGeometry, num_slots: int) -> str:
    """The same choice, with `persistent` replaced where the slots do not hold all experts."""
    prefill, decode = map(str, parse_strategy(text))
    instead = fallback(geometry, num_slots)
    if instead != "persistent":
        prefill = instead if prefill == "persistent" else prefill
        decode = "active_only" if decode == "persistent" else decode
    return prefill if prefill == decode else f"{prefill}+{decode}"


def build_strategies(text: str, scene: StrategyContext) -> tuple[Strategy, Strategy]:
    """Both strategies over one pool of slots; one object when both phases share one."""
    prefill, decode = parse_strategy(text)
    first = _make(prefill, scene, alone=prefill == decode)
    return first, first if decode == prefill else _make(decode, scene, alone=False)


def _make(choice: StrategyChoice, scene: StrategyContext, alone: bool) -> Strategy:
    if choice.name == "layer_grouped":
        return LayerGrouped(scene, choice.number or 2)
    if choice.name == "hot_cached_static" and not alone:
        return HotCachedStatic(scene, spare_slots(scene.geometry, scene.slots.num_slots))
    return STRATEGIES[choice.name](scene)


def _from_krasis(text: str) -> str:
    words = text.strip().removeprefix("--").replace("=", " ").split()
    spelling = " ".join(words)
    if spelling in _KRASIS:
        return _KRASIS[spelling]
    if len(words) == 2 and words[0] == "expert-divisor":
        return f"layer_grouped:{words[1]}"
    if len(words) == 2 and words[0] == "cache-strategy":
        return words[1]
    return spelling


def _choice(text: str) -> StrategyChoice:
    name, colon, number = text.strip().partition(":")
    if name not in STRATEGIES:
        near = get_close_matches(name, STRATEGIES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(STRATEGIES)}"
        raise ConfigError(f"no strategy {name!r}; {hint}", param="strategy")
    if not colon:
        return StrategyChoice(name, 2 if name == "layer_grouped" else None)
    if name != "layer_grouped" or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{text!r}: only layer_grouped:N takes a number", param="strategy")
    return StrategyChoice(name, int(number))
