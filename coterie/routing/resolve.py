"""Resolves the names that a caller sent to specialists and adapters, adds required adapters, and
refuses adapters that cannot run together. The prompt's content is not used here.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.core.adapters import DEFAULTS, MAX_STACK, MAX_WEIGHT, AdapterCard, AdapterProfile
from coterie.core.aliases import NO_ALIASES, AliasSettings, ModelAliases
from coterie.core.errors import ConfigError, Forbidden, InvalidRequest, NotFound
from coterie.core.plan import AdapterChoice
from coterie.core.quick_init import quick_init
from coterie.core.request import AUTO, AdapterHint, RouteHints
from coterie.core.sampling import NO_RECOMMENDATION, ModelRecommendation
from coterie.routing.protocols import AdapterCatalog

# most names that an error message lists
MAX_LISTED = 12
# most names that an unknown one is compared with, because this blocks the event loop
MAX_COMPARED = 32
# shortest name that is searched for within other names
MIN_CONTAINED = 3


@dataclass(frozen=True, slots=True)
class Specialist:
    """The router's view of a specialist: its name, its model's generation_config and fingerprint,
    its engine's memory for adapters, the adapters that it always runs with, and what the authors of
    its model recommend."""

    name: str
    generation: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    adapter_bytes: int = DEFAULTS.device_bytes
    fixed: tuple[FixedAdapter, ...] = ()
    # what it serves, beside its own name
    intents: tuple[str, ...] = ()
    recommended: ModelRecommendation = NO_RECOMMENDATION


@dataclass(frozen=True, slots=True)
class FixedAdapter:
    """An adapter that a specialist always runs with. It keeps its digest, also if its name comes to
    mean another."""

    choice: AdapterChoice
    profile: AdapterProfile


@dataclass(frozen=True, slots=True)
class ResolvedRoute:
    """The resolved names of a request: who answers, and with which adapters besides those that the
    specialist always runs with."""

    specialist: str
    adapters: tuple[AdapterChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class FixedStack:
    """The adapters of a plan, those of the specialist first; `left_out` says why some are not in
    it."""

    adapters: tuple[AdapterChoice, ...]
    left_out: tuple[str, ...] = ()


class NameResolver:
    """The first specialist answers requests that name none."""

    def __init__(
        self,
        specialists: Sequence[Specialist],
        catalog: AdapterCatalog,
        aliases: ModelAliases = NO_ALIASES,
    ) -> None:
        self.aliases = aliases
        self.specialists = {item.name: item for item in specialists}
        self.default = specialists[0].name
        self._catalog = catalog
        self._all_names = tuple(self.specialists)
        by_fingerprint: dict[str, list[str]] = {}
        for item in specialists:
            by_fingerprint.setdefault(item.fingerprint, []).append(item.name)
        self._by_fingerprint = {base: tuple(names) for base, names in by_fingerprint.items()}
        # name or digest of an adapter -> the specialists that always run with it
        self._owners: dict[str, set[str]] = {}
        for item in specialists:
            for fixed in item.fixed:
                card = fixed.profile.card
                self._owners.setdefault(card.name, set()).add(item.name)
                self._owners.setdefault(card.digest, set()).add(item.name)

    def read(self, hints: RouteHints) -> RequestedNames:
        return read(self.named(hints), self.specialists)

    def named(self, hints: RouteHints) -> RouteHints:
        """The same hints, with the name that an alias means in place of the alias. A name that a
        model has means that model."""
        if not self.aliases or hints.model is None or self._is_known(hints.model):
            return hints
        target = self.aliases.target(hints.model)
        return hints if target is None else replace(hints, model=target)

    def _is_known(self, model: str) -> bool:
        """Whether all its parts are names of specialists and installed adapters."""
        if len(model) > MAX_CHARACTERS:
            return False
        return not unknown_parts(model, self.specialists, self._catalog)

    def resolve(self, hints: RouteHints) -> ResolvedRoute:
        """Refuses names that do not exist, and adapters that do not fit or cannot run together."""
        requested, excluded_names = self.read(hints), self.excluded(hints)
        self._check_allowed(requested.base, hints.allowed)
        if not requested.adapters:
            return ResolvedRoute(requested.base or self.default_of(hints.allowed))
        num_in_model = len(requested.adapters) - len(hints.adapters)
        cards = [
            self._card(hint, "model" if index < num_in_model else "experts", hints)
            for index, hint in enumerate(requested.adapters)
        ]
        if len({card.digest for card in cards}) < len(cards):
            raise InvalidRequest(
                "an expert is named twice in one request; give it once, with its weight",
                param="experts",
            )
        stack = self._completed([self._catalog.profile(card) for card in cards], excluded_names)
        for index, profile in enumerate(stack):
            self._check_expert(profile.card, hints, "model" if index < num_in_model else "experts")
        weights = [hint.weight for hint in requested.adapters] + [1.0] * (len(stack) - len(cards))
        chosen = tuple(
            AdapterChoice(full_name(profile), profile.card.digest, weight)
            for profile, weight in zip(stack, weights, strict=True)
        )
        base = self._base_for([profile.card for profile in stack], requested, hints.allowed)
        return ResolvedRoute(base, chosen)

    def default_of(self, allowed: Sequence[str]) -> str:
        """Who answers if nobody is named: the first specialist that the caller may use."""
        if not allowed or self.default in allowed:
            return self.default
        for name in self.specialists:
            if name in allowed:
                return name
        raise Forbidden("this key may use no model that writes text", param="model")

    def _check_allowed(self, base: str | None, allowed: Sequence[str]) -> None:
        if base is not None and allowed and base not in allowed:
            raise Forbidden(
                f"this key may not use the specialist `{base}`; it may use {_listed(allowed)}",
                param="model",
            )

    def may_use(self, card: AdapterCard, hints: RouteHints) -> bool:
        """Whether the tenant may use an adapter, on a specialist that it may use. One that
        specialists always run with belongs to them: the right to one of them is needed, and is
        enough."""
        return self.usable(hints)(card)

    def usable(self, hints: RouteHints) -> Callable[[AdapterCard], bool]:
        """`may_use` for many adapters."""
        if not hints.allowed and not hints.allowed_experts:
            return lambda card: True
        allowed, experts = frozenset(hints.allowed), frozenset(hints.allowed_experts)

        def may_use(card: AdapterCard) -> bool:
            owners = self._owners.get(card.name, set()) | self._owners.get(card.digest, set())
            if owners:
                return not allowed or not owners.isdisjoint(allowed)
            return not experts or card.name in experts

        return may_use

    def _check_expert(self, card: AdapterCard, hints: RouteHints, param: str) -> None:
        if not self.may_use(card, hints):
            raise Forbidden(f"this key may not use the expert `{card.name}`", param=param)

    def _names_for(self, hints: RouteHints) -> list[str]:
        """The names and aliases of the adapters that the tenant may use, for messages."""
        found = ((name, self._catalog.find(name, "")) for name in self._catalog.names())
        may_use = self.usable(hints)
        return [name for name, card in found if card is not None and may_use(card)]

    def with_fixed(self, specialist: str, chosen: tuple[AdapterChoice, ...]) -> FixedStack:
        """The adapters that the specialist always runs with, then `chosen`. Those of `chosen` that
        cannot run beside them are left out."""
        fixed = self.specialists[specialist].fixed
        if not fixed:
            return FixedStack(chosen)
        stack, left_out = [item.choice for item in fixed], list[str]()
        profiles = [item.profile for item in fixed]
        for item in chosen:
            profile = self.find(item.name)
            if profile is None or any(item.digest == other.digest for other in stack):
                continue
            why = _why_not(profile, profiles, len(stack))
            if why:
                left_out.append(f"{item.name}: {why}")
                continue
            stack.append(item)
            profiles.append(profile)
        return FixedStack(tuple(stack), tuple(left_out))

    def fits(self, card: AdapterCard) -> tuple[str, ...]:
        """The specialists that an adapter was made for; an adapter without a base fits all."""
        if not card.bases:
            return self._all_names
        if len(card.bases) == 1:
            return self._by_fingerprint.get(card.bases[0], ())
        return tuple(
            name for name, item in self.specialists.items() if item.fingerprint in card.bases
        )

    def find(self, text: str) -> AdapterProfile | None:
        """By `name` or `name@version`."""
        name, _, version = text.partition("@")
        card = self._catalog.find(name, version)
        return None if card is None else self._catalog.profile(card)

    def excluded(self, hints: RouteHints) -> tuple[str, ...]:
        """The names of the packages that the router must not choose: aliases are resolved, and
        unknown names are refused. Those that the tenant may not use are unknown to it."""
        resolved = []
        for text in hints.exclude:
            name, at, version = text.partition("@")
            card = self._catalog.find(name, version)
            if card is None or not self.may_use(card, hints):
                near = _did_you_mean(_near(name, self._names_for(hints)))
                raise NotFound(
                    f"The expert `{text[:80]}` in exclude_experts does not exist{near}",
                    param="exclude_experts",
                )
            resolved.append(f"{card.name}@{card.version}" if at else card.name)
        return tuple(resolved)

    def _completed(
        self, named: list[AdapterProfile], excluded_names: Sequence[str]
    ) -> list[AdapterProfile]:
        """`named`, then the adapters they require, by load_order. Refuses impossible stacks."""
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
            if any(means(name, profile) for name in excluded_names):
                raise InvalidRequest(
                    f"the expert `{full_name(profile)}` is both needed and excluded",
                    param="exclude_experts",
                )
        needed = sorted(stack[len(named) :], key=lambda p: (p.load_order, p.card.name))
        return [*named, *needed]

    def _card(self, hint: AdapterHint, param: str, hints: RouteHints) -> AdapterCard:
        """`param` is the request field that named it: a model's name may also be a specialist."""
        name, _, version = hint.name.partition("@")
        card = self._catalog.find(name, version)
        if card is not None:
            return card
        current = self._catalog.find(name, "")
        if current is not None:
            self._check_expert(current, hints, param)
        names = self._names_for(hints)
        near = _near(name, names)
        if param == "model":
            usable = [
                base for base in self.specialists if not hints.allowed or base in hints.allowed
            ]
            available = _listed(["auto", *usable, *near, *names])
            message = f"The model `{hint.name}` does not exist; there is: {available}"
        else:
            hint_text = _did_you_mean(near) or f"; there is: {_listed(names)}"
            message = f"The expert `{hint.name}` does not exist{hint_text}"
        if current is not None:
            message = (
                f"The expert `{name}` has no version `{version}` here; the current one is "
                f"`{current.version}`"
            )
        raise NotFound(message, param=param)

    def _base_for(
        self, cards: Sequence[AdapterCard], requested: RequestedNames, allowed: Sequence[str]
    ) -> str:
        usable = [name for name in self.specialists if not allowed or name in allowed]
        able = set(usable).intersection(*(self.fits(card) for card in cards))
        if requested.base is None:
            for name in usable:
                if name in able:
                    return name
        elif requested.base in able:
            return requested.base
        candidates = [requested.base] if requested.base else usable
        for card in cards:
            if not set(candidates).intersection(self.fits(card)):
                raise InvalidRequest(self._unfit(card, candidates, usable), param="model")
        raise InvalidRequest("these experts were made for different base models", param="experts")

    def _unfit(self, card: AdapterCard, candidates: Sequence[str], usable: Sequence[str]) -> str:
        served = ", ".join(
            f"`{name}` ({self.specialists[name].fingerprint[:12]})" for name in candidates
        )
        bases = ", ".join(base[:12] for base in card.bases)
        others = [name for name in self.fits(card) if name in usable and name not in candidates]
        hint = f"; ask for `{others[0]}:{card.name}`" if others else ""
        return (
            f"the expert `{card.name}@{card.version}` was made for another base model ({bases}), "
            f"not for {served}{hint}"
        )


def _why_not(profile: AdapterProfile, stack: Sequence[AdapterProfile], count: int) -> str:
    """Why an adapter cannot be added to a stack of `count`; empty if it can."""
    other = conflict(profile, stack)
    if other is not None:
        return f"incompatible with {full_name(other)}, which this specialist always runs with"
    if count >= MAX_STACK:
        return f"at most {MAX_STACK} experts run together"
    short = too_long([*stack, profile])
    return (
        ""
        if short is None
        else f"{full_name(short)} runs with at most {short.max_chain - 1} others"
    )


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Names that contain `name`, then names with a similar spelling. If there are many, only those
    with the longest common beginning are compared."""

    def common_length(other: str) -> int:
        pairs = zip(name, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(name), len(other)))

    containing = [other for other in names if name in other] if len(name) >= MIN_CONTAINED else []
    nearest = heapq.nlargest(MAX_COMPARED, names, key=common_length)
    close = difflib.get_close_matches(name, nearest, n=MAX_LISTED, cutoff=0.5)
    return list(dict.fromkeys([*containing[:MAX_LISTED], *close]))[:MAX_LISTED]


def _listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    unique = list(dict.fromkeys(names))
    more = len(unique) - MAX_LISTED
    shown = ", ".join(unique[:MAX_LISTED]) or "none"
    return f"{shown} and {more} more" if more > 0 else shown


def _did_you_mean(near: Sequence[str]) -> str:
    return f"; did you mean {', '.join(near[:3])}?" if near else ""


# no name is longer, and parsing one takes time that grows with its square
MAX_CHARACTERS = 512


@quick_init
@dataclass(frozen=True, slots=True)
class RequestedNames:
    """`base` is None if the caller does not name it."""

    base: str | None
    adapters: tuple[AdapterHint, ...] = ()


def read(hints: RouteHints, specialists: Container[str]) -> RequestedNames:
    """A specialist's whole name has priority over an adapter's; before a colon, the longest base
    name.

    Adapters of the model name come first, then those of the hints.
    """
    model = hints.model or AUTO
    if len(model) > MAX_CHARACTERS:
        raise NotFound(f"no model's name has {len(model)} characters", param="model")
    base, rest = _base(model, specialists)
    named = tuple(AdapterHint(part) for part in rest.split("+")) if rest is not None else ()
    if any(not hint.name for hint in named):
        raise InvalidRequest(f"an expert's name is missing in `{model}`", param="model")
    requested = RequestedNames(base, named + hints.adapters)
    if requested.adapters:
        _check(requested.adapters)
    return requested


def _base(model: str, specialists: Container[str]) -> tuple[str | None, str | None]:
    """(base, the rest that names adapters); None for what is missing."""
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


def unknown_parts(
    model: str, specialists: Container[str], catalog: AdapterCatalog
) -> tuple[str, ...]:
    """The parts of a model name that name no specialist and no installed adapter."""
    _, rest = _base(model, specialists)
    parts = () if rest is None else rest.split("+")
    halves = [(part, *part.partition("@")) for part in parts]
    return tuple(part for part, name, _, version in halves if not catalog.find(name, version))


def check_targets(
    aliases: Sequence[AliasSettings], specialists: Container[str], catalog: AdapterCatalog
) -> None:
    """Raises ConfigError for the first alias of a model that does not exist."""
    for item in aliases:
        unknown = unknown_parts(item.target, specialists, catalog)
        if unknown:
            param = f"aliases.{item.name}"
            raise ConfigError(f"{param}: there is no model {unknown[0][:80]!r} here", param=param)


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


# name or name@version -> its profile; None if it is not installed
Lookup = Callable[[str], AdapterProfile | None]


def full_name(profile: AdapterProfile) -> str:
    return f"{profile.card.name}@{profile.card.version}"


def means(name: str, profile: AdapterProfile) -> bool:
    """Whether `name` or `name@version` means this adapter."""
    return name == profile.card.name or name == full_name(profile)


def with_required(selected: Sequence[AdapterProfile], find: Lookup) -> list[AdapterProfile] | str:
    """`selected` and after them all adapters that they require, each once; or why this is
    impossible."""
    stack = list(selected)
    digests = {profile.card.digest for profile in stack}
    # the list grows during the loop
    for profile in stack:
        for name in profile.requires:
            needed = find(name)
            if needed is None:
                return f"{full_name(profile)} requires {name}, which is not installed"
            if needed.card.digest in digests:
                continue
            if len(stack) == MAX_STACK:
                return f"with all that is required, more than {MAX_STACK} would run together"
            digests.add(needed.card.digest)
            stack.append(needed)
    return stack


def same_purpose(one: Collection[str], other: Collection[str]) -> bool:
    """Whether two adapters are for the same prompts by their examples: half of the examples of the
    one with fewer are also examples of the other."""
    return 2 * len(set(one) & set(other)) >= max(1, min(len(one), len(other)))


def conflict(one: AdapterProfile, others: Sequence[AdapterProfile]) -> AdapterProfile | None:
    """The first of `others` that cannot run together with `one`, whichever of the two says so."""
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
    """An adapter that allows fewer adapters in its stack than there are."""
    for profile in stack:
        if 0 < profile.max_chain < len(stack):
            return profile
    return None
