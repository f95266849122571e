"""Names that a caller sent, as specialists and adapters: found, completed by what they require, and
refused where they cannot run together. Content plays no part here.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.core.adapters import DEFAULTS, MAX_STACK, MAX_WEIGHT, AdapterCard, AdapterProfile
from coterie.core.errors import InvalidRequest, NotFound
from coterie.core.plan import AdapterChoice
from coterie.core.request import AUTO, AdapterHint, RouteHints
from coterie.routing.protocols import AdapterCatalog

# most names that a refusal lists
MAX_LISTED = 12
# most names that an unknown one is compared with: the event loop waits for it
MAX_COMPARED = 32
# letters of a name that say something when they occur within another
MIN_HELD = 3


@dataclass(frozen=True, slots=True)
class Specialist:
    """What the router knows about one: its name, its model's generation_config and identity, and
    the room its engine has for adapters."""

    name: str
    generation: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    adapter_bytes: int = DEFAULTS.device_bytes


@dataclass(frozen=True, slots=True)
class ResolvedRoute:
    """The names of a request, resolved: who answers, and with which adapters."""

    specialist: str
    adapters: tuple[AdapterChoice, ...] = ()


class NameResolver:
    """The first specialist answers requests that name nobody."""

    def __init__(self, specialists: Sequence[Specialist], catalog: AdapterCatalog) -> None:
        self.specialists = {item.name: item for item in specialists}
        self.default = specialists[0].name
        self._catalog = catalog
        self._every = tuple(self.specialists)
        made_for: dict[str, list[str]] = {}
        for item in specialists:
            made_for.setdefault(item.fingerprint, []).append(item.name)
        self._made_for = {base: tuple(names) for base, names in made_for.items()}

    def read(self, hints: RouteHints) -> RequestedNames:
        return read(hints, self.specialists)

    def resolve(self, hints: RouteHints) -> ResolvedRoute:
        """Refuses names that do not exist, and adapters that do not fit or get along."""
        asked, barred = self.read(hints), self.excluded(hints.exclude)
        if not asked.adapters:
            return ResolvedRoute(asked.base or self.default)
        num_in_model = len(asked.adapters) - len(hints.adapters)
        cards = [
            self._card(hint, "model" if index < num_in_model else "experts")
            for index, hint in enumerate(asked.adapters)
        ]
        if len({card.digest for card in cards}) < len(cards):
            raise InvalidRequest(
                "an expert is named twice in one request; give it once, with its weight",
                param="experts",
            )
        stack = self._completed([self._catalog.profile(card) for card in cards], barred)
        weights = [hint.weight for hint in asked.adapters] + [1.0] * (len(stack) - len(cards))
        chosen = tuple(
            AdapterChoice(full_name(profile), profile.card.digest, weight)
            for profile, weight in zip(stack, weights, strict=True)
        )
        return ResolvedRoute(self._base_for([profile.card for profile in stack], asked), chosen)

    def fits(self, card: AdapterCard) -> tuple[str, ...]:
        """The specialists that an adapter was made for; one that names no base fits every one."""
        if not card.bases:
            return self._every
        if len(card.bases) == 1:
            return self._made_for.get(card.bases[0], ())
        return tuple(
            name for name, item in self.specialists.items() if item.fingerprint in card.bases
        )

    def find(self, text: str) -> AdapterProfile | None:
        """By `name` or `name@version`."""
        name, _, version = text.partition("@")
        card = self._catalog.find(name, version)
        return None if card is None else self._catalog.profile(card)

    def excluded(self, names: Sequence[str]) -> tuple[str, ...]:
        """As packages are called: aliases are followed, and unknown names are refused."""
        found = []
        for text in names:
            name, at, version = text.partition("@")
            card = self._catalog.find(name, version)
            if card is None:
                near = _did_you_mean(_near(name, list(self._catalog.names())))
                raise NotFound(
                    f"The expert `{text[:80]}` in exclude_experts does not exist{near}",
                    param="exclude_experts",
                )
            found.append(f"{card.name}@{card.version}" if at else card.name)
        return tuple(found)

    def _completed(
        self, named: list[AdapterProfile], barred: Sequence[str]
    ) -> list[AdapterProfile]:
        """`named`, then what they require by load_order. Refuses stacks that cannot be."""
        stack = with_required(named, self.find)
        if isinstance(stack, str):
            raise InvalidRequest(stack, param="experts")
        pair = first_conflict(stack)
        if pair is not None:
            raise InvalidRequest(
                f"the experts `{full_name(pair[0])}` and `{full_name(pair[1])}` are incompatible; "
                "leave one of them out",
                param="experts",
            )
        short = too_long(stack)
        if short is not None:
            raise InvalidRequest(
                f"the expert `{full_name(short)}` runs with at most {short.max_chain - 1} others, "
                f"and {len(stack) - 1} are asked for",
                param="experts",
            )
        for profile in stack:
            if any(means(name, profile) for name in barred):
                raise InvalidRequest(
                    f"the expert `{full_name(profile)}` is both needed and excluded",
                    param="exclude_experts",
                )
        needed = sorted(stack[len(named) :], key=lambda p: (p.load_order, p.card.name))
        return [*named, *needed]

    def _card(self, hint: AdapterHint, param: str) -> AdapterCard:
        """`param` is the field that named it: a model's name may also mean a specialist."""
        name, _, version = hint.name.partition("@")
        card = self._catalog.find(name, version)
        if card is not None:
            return card
        near = _near(name, list(self._catalog.names()))
        if param == "model":
            known = _listed(["auto", *self.specialists, *near, *self._catalog.names()])
            message = f"The model `{hint.name}` does not exist; there is: {known}"
        else:
            told = _did_you_mean(near) or f"; there is: {_listed(self._catalog.names())}"
            message = f"The expert `{hint.name}` does not exist{told}"
        current = self._catalog.find(name, "")
        if current is not None:
            message = (
                f"The expert `{name}` has no version `{version}` here; the current one is "
                f"`{current.version}`"
            )
        raise NotFound(message, param=param)

    def _base_for(self, cards: Sequence[AdapterCard], asked: RequestedNames) -> str:
        able = set(self.specialists).intersection(*(self.fits(card) for card in cards))
        if asked.base is None:
            for name in (self.default, *self.specialists):
                if name in able:
                    return name
        elif asked.base in able:
            return asked.base
        wanted = [asked.base] if asked.base else list(self.specialists)
        for card in cards:
            if not set(wanted).intersection(self.fits(card)):
                raise InvalidRequest(self._unfit(card, wanted), param="model")
        raise InvalidRequest("these experts were made for different base models", param="experts")

    def _unfit(self, card: AdapterCard, wanted: Sequence[str]) -> str:
        served = ", ".join(
            f"`{name}` ({self.specialists[name].fingerprint[:12]})" for name in wanted
        )
        made = ", ".join(base[:12] for base in card.bases)
        others = [name for name in self.fits(card) if name not in wanted]
        hint = f"; ask for `{others[0]}:{card.name}`" if others else ""
        return (
            f"the expert `{card.name}@{card.version}` was made for another base model ({made}), "
            f"not for {served}{hint}"
        )


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Those that hold `name`, then those spelt like it; of many names only those are compared that
    begin most like it."""

    def in_common(other: str) -> int:
        pairs = zip(name, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(name), len(other)))

    holding = [other for other in names if name in other] if len(name) >= MIN_HELD else []
    alike = heapq.nlargest(MAX_COMPARED, names, key=in_common)
    close = difflib.get_close_matches(name, alike, n=MAX_LISTED, cutoff=0.5)
    return list(dict.fromkeys([*holding[:MAX_LISTED], *close]))[:MAX_LISTED]


def _listed(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    known = list(dict.fromkeys(names))
    more = len(known) - MAX_LISTED
    shown = ", ".join(known[:MAX_LISTED]) or "none"
    return f"{shown} and {more} more" if more > 0 else shown


def _did_you_mean(near: Sequence[str]) -> str:
    return f"; did you mean {', '.join(near[:3])}?" if near else ""


# no name is longer, and reading one takes time that grows with its square
MAX_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class RequestedNames:
    """`base` is None when the caller leaves it open."""

    base: str | None
    adapters: tuple[AdapterHint, ...] = ()


def read(hints: RouteHints, specialists: Container[str]) -> RequestedNames:
    """A specialist's whole name wins over an adapter's; the longest base name wins before a colon.

    Adapters of the model name come first, then those of the hints.
    """
    model = hints.model or AUTO
    if len(model) > MAX_CHARACTERS:
        raise NotFound(f"no model's name has {len(model)} characters", param="model")
    base, rest = _base(model, specialists)
    named = tuple(AdapterHint(part) for part in rest.split("+")) if rest is not None else ()
    if any(not hint.name for hint in named):
        raise InvalidRequest(f"an expert's name is missing in `{model}`", param="model")
    asked = RequestedNames(base, named + hints.adapters)
    if asked.adapters:
        _check(asked.adapters)
    return asked


def _base(model: str, specialists: Container[str]) -> tuple[str | None, str | None]:
    """(base, what is left for adapters); None where there is none."""
    if model in specialists:
        return model, None
    if model == AUTO:
        return None, None
    end = model.rfind(":")
    while end > 0:
        base = model[:end]
        if base in specialists:
            return base, model[end + 1 :]
        if base == AUTO:
            return None, model[end + 1 :]
        end = model.rfind(":", 0, end)
    return None, model


def _check(hints: tuple[AdapterHint, ...]) -> None:
    if len(hints) > MAX_STACK:
        raise InvalidRequest(
            f"{len(hints)} experts in one request; at most {MAX_STACK} are composed",
            param="experts",
        )
    for hint in hints:
        # a nan fails the comparison
        if not (math.isfinite(hint.weight) and abs(hint.weight) <= MAX_WEIGHT):
            raise InvalidRequest(
                f"the weight of expert `{hint.name}` must be from -{MAX_WEIGHT:.0f} to "
                f"{MAX_WEIGHT:.0f}",
                param="experts",
            )


# name or name@version -> its profile, None where it is not installed
Lookup = Callable[[str], AdapterProfile | None]


def full_name(profile: AdapterProfile) -> str:
    return f"{profile.card.name}@{profile.card.version}"


def means(name: str, profile: AdapterProfile) -> bool:
    """Whether `name` or `name@version` stands for this adapter."""
    return name == profile.card.name or name == full_name(profile)


def with_required(wanted: Sequence[AdapterProfile], find: Lookup) -> list[AdapterProfile] | str:
    """`wanted` and behind them all that they require, each once; or why that cannot be."""
    stack = list(wanted)
    known = {profile.card.digest for profile in stack}
    # grows while it is walked
    for profile in stack:
        for name in profile.requires:
            needed = find(name)
            if needed is None:
                return f"{full_name(profile)} requires {name}, which is not installed"
            if needed.card.digest in known:
                continue
            if len(stack) == MAX_STACK:
                return f"with all that is required, more than {MAX_STACK} would run together"
            known.add(needed.card.digest)
            stack.append(needed)
    return stack


def same_purpose(one: Collection[str], other: Collection[str]) -> bool:
    """Whether two adapters' examples say that they are for the same prompts: half of those of the
    one that has fewer are the other's too."""
    return 2 * len(set(one) & set(other)) >= max(1, min(len(one), len(other)))


def conflict(one: AdapterProfile, others: Sequence[AdapterProfile]) -> AdapterProfile | None:
    """The first of `others` that cannot run beside `one`, whichever of them says so."""
    for other in others:
        if other.card.digest == one.card.digest:
            continue
        if any(means(name, other) for name in one.incompatible_with):
            return other
        if any(means(name, one) for name in other.incompatible_with):
            return other
    return None


def first_conflict(
    stack: Sequence[AdapterProfile],
) -> tuple[AdapterProfile, AdapterProfile] | None:
    for index, profile in enumerate(stack):
        other = conflict(profile, stack[index + 1 :])
        if other is not None:
            return profile, other
    return None


def too_long(stack: Sequence[AdapterProfile]) -> AdapterProfile | None:
    """One that takes fewer beside it than there are."""
    for profile in stack:
        if 0 < profile.max_chain < len(stack):
            return profile
    return None
