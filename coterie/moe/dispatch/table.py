"""The strategies by name, and how a user's text becomes two of them; Krasis's spellings also work.

`NAME` serves both phases (except one that `decodes_as` another), `PREFILL+DECODE` one each. What a
strategy needs and how it is written is in its class; this module knows names only as table rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from coterie.moe.dispatch.persistent import Persistent
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

_KRASIS = {
    "no-gpu-decode": "cpu_only",
    "expert-divisor 0": "chunked",
    "expert-divisor 1": "persistent",
    "cache-strategy lru": "lru+active_only",
}

# of a CUDA device's steps: pairs whose experts a kernel places, and slots that it looks through
_MAX_PAIRS, _MAX_SLOTS = 256, 8192


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy by name, and its number where it takes one (`layer_grouped:4`)."""

    name: str
    number: int | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}:{self.number}"


def parse_strategy(text: str) -> tuple[StrategyChoice, StrategyChoice]:
    """The choices for prefill and for decode."""
    parts = _from_krasis(text).split("+")
    if len(parts) > 2:
        raise ConfigError(f"{text!r}: at most PREFILL+DECODE", param="strategy")
    prefill = _choice(parts[0])
    if len(parts) == 2:
        return prefill, _choice(parts[1])
    decodes_as = STRATEGIES[prefill.name].decodes_as
    return prefill, _choice(decodes_as) if decodes_as else prefill


def strategy_classes(text: str) -> tuple[type[Strategy], type[Strategy]]:
    """The classes that serve prefill and decode, to look up what they need."""
    prefill, decode = parse_strategy(text)
    return STRATEGIES[prefill.name], STRATEGIES[decode.name]


def both_phases(text: str) -> str:
    """The same choice, written out: `layer_grouped:2+active_only`."""
    return "+".join(dict.fromkeys(map(str, parse_strategy(text))))


def resolve_strategy(text: str, geometry: ExpertGeometry, num_slots: int) -> str:
    """The same choice, written out, with the fallback where there are too few slots."""
    found = []
    for phase, choice in zip(("prefill", "decode"), parse_strategy(text), strict=True):
        kind = STRATEGIES[choice.name]
        enough = num_slots >= kind.least_slots(geometry)
        found.append(str(choice) if enough else kind.fallback(phase, geometry, num_slots))
    return "+".join(dict.fromkeys(found))


def build_strategies(text: str, context: StrategyContext) -> tuple[Strategy, Strategy]:
    """Both strategies, with the same slots; one object when both phases use the same strategy."""
    choices = parse_strategy(text)
    context = replace(context, paired=choices[0] != choices[1])
    made = {
        each: STRATEGIES[each.name](replace(context, number=each.number or 0))
        for each in dict.fromkeys(choices)
    }
    return made[choices[0]], made[choices[1]]


def has_victim_rule(prefill: Strategy, decode: Strategy, num_slots: int) -> bool:
    """Whether a kernel of a CUDA device places what decode steps miss (`moe.runtime.victims`): it
    knows the rule of `decode`, and prompts have no strategy that pins."""
    known = isinstance(decode, Lru) or type(decode) is ActiveOnly
    return (
        known and type(prefill) in (Lru, ActiveOnly, LayerGrouped) and 0 < num_slots <= _MAX_SLOTS
    )


def placed_rows(top_k: int) -> int:
    """Rows of the largest step whose experts such a kernel places. Captured steps have sizes that
    are powers of two."""
    return 1 << (_MAX_PAIRS // top_k).bit_length() - 1


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
    kind = STRATEGIES[name]
    if not colon:
        return StrategyChoice(name, kind.default_number if kind.takes_number else None)
    if not kind.takes_number:
        takers = ", ".join(f"{each}:N" for each, kind in STRATEGIES.items() if kind.takes_number)
        raise ConfigError(f"{text!r}: only {takers} takes a number", param="strategy")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(
            f"{text!r}: {name}:N takes a whole number; numbers begin at 1", param="strategy"
        )
    return StrategyChoice(name, int(number))
