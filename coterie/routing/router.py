"""Who answers: by the names a caller sent, with the sampling values that were left open.

Knows specialists by name, fingerprint and generation_config, and adapters by their cards; knows no
replicas, queues, blocks, tokens or files.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coterie.core.adapters import AdapterCard
from coterie.core.errors import InvalidRequest, NotFound
from coterie.core.plan import AdapterChoice, RoutePlan
from coterie.core.request import AUTO, AdapterHint, InferenceRequest, RouteHints, Sampling
from coterie.core.resolve import VENDOR_DEFAULTS, resolve_sampling
from coterie.routing.names import Asked, read

# most names that a refusal lists
MAX_LISTED = 12
# most names that an unknown one is compared with: the event loop waits for it
MAX_COMPARED = 32


class Catalog(Protocol):
    """Installed adapters, in memory."""

    def find(self, name: str, version: str) -> AdapterCard | None:
        """The card of `name`'s version, its current one when `version` is empty."""

    def names(self) -> Iterable[str]:
        """Every name that can be asked for."""


class NoAdapters:
    """The catalog of a server that runs none."""

    def find(self, name: str, version: str) -> AdapterCard | None:
        return None

    def names(self) -> Iterable[str]:
        return ()


@dataclass(frozen=True, slots=True)
class Specialist:
    """What the router knows about one: its name, its model's generation_config and identity."""

    name: str
    generation: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """The names of a request, resolved: who answers, and with which adapters."""

    specialist: str
    adapters: tuple[AdapterChoice, ...] = ()


class Router:
    """Plans by name. The first specialist answers `auto` and requests that name nobody."""

    def __init__(self, specialists: Sequence[Specialist], catalog: Catalog | None = None) -> None:
        self._specialists = {item.name: item for item in specialists}
        self._default = specialists[0].name
        self._catalog = catalog or NoAdapters()

    def resolve(self, hints: RouteHints) -> Route:
        """Refuses names that do not exist and adapters that do not fit."""
        asked = read(hints, self._specialists)
        if not asked.adapters:
            return Route(asked.base or self._default)
        cards = [self._card(hint, hints.model) for hint in asked.adapters]
        chosen = tuple(
            AdapterChoice(f"{card.name}@{card.version}", card.digest, hint.weight)
            for card, hint in zip(cards, asked.adapters, strict=True)
        )
        if len({item.digest for item in chosen}) < len(chosen):
            raise InvalidRequest(
                "an expert is named twice in one request; give it once, with its weight",
                param="experts",
            )
        return Route(self._base_for(cards, asked), chosen)

    def fits(self, card: AdapterCard) -> list[str]:
        """The specialists that an adapter was made for; one that names no base fits every one."""
        return [
            item.name
            for item in self._specialists.values()
            if not card.bases or item.fingerprint in card.bases
        ]

    def plan(self, request: InferenceRequest, vendor: Sampling = VENDOR_DEFAULTS) -> RoutePlan:
        """Decide. `vendor` holds what the caller's dialect documents for values left open."""
        asked = request.hints.model
        route = self.resolve(request.hints)
        default = asked in (None, "", AUTO) and not route.adapters
        generation = self._specialists[route.specialist].generation
        return RoutePlan(
            request_id=request.id,
            specialist=route.specialist,
            alternates=(),
            adapters=route.adapters,
            sampling=resolve_sampling(request.sampling, generation, vendor),
            shadow=None,
            confidence=1.0,
            reasons=("default specialist" if default else "named by the caller",),
        )

    def _card(self, hint: AdapterHint, model: str | None) -> AdapterCard:
        name, _, version = hint.name.partition("@")
        card = self._catalog.find(name, version)
        if card is not None:
            return card
        names = list(self._catalog.names())
        near = _near(name, names)
        known = ", ".join([*self._specialists, *near][:MAX_LISTED])
        message = f"The model `{hint.name}` does not exist; there is: {known}"
        current = self._catalog.find(name, "")
        if current is not None:
            message = (
                f"The expert `{name}` has no version `{version}` here; the current one is "
                f"`{current.version}`"
            )
        raise NotFound(message, param="model" if hint.name in (model or "") else "experts")

    def _base_for(self, cards: Sequence[AdapterCard], asked: Asked) -> str:
        able = set(self._specialists).intersection(*(self.fits(card) for card in cards))
        if asked.base is None:
            for name in (self._default, *self._specialists):
                if name in able:
                    return name
        elif asked.base in able:
            return asked.base
        wanted = [asked.base] if asked.base else list(self._specialists)
        for card in cards:
            if not set(wanted).intersection(self.fits(card)):
                raise InvalidRequest(self._unfit(card, wanted), param="model")
        raise InvalidRequest("these experts were made for different base models", param="experts")

    def _unfit(self, card: AdapterCard, wanted: Sequence[str]) -> str:
        served = ", ".join(
            f"`{name}` ({self._specialists[name].fingerprint[:12]})" for name in wanted
        )
        made = ", ".join(base[:12] for base in card.bases)
        others = [name for name in self.fits(card) if name not in wanted]
        hint = f"; ask for `{others[0]}:{card.name}`" if others else ""
        return (
            f"the expert `{card.name}@{card.version}` was made for another base model ({made}), "
            f"not for {served}{hint}"
        )


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Of many names only those are compared that begin most like `name`."""

    def in_common(other: str) -> int:
        pairs = zip(name, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(name), len(other)))

    alike = heapq.nlargest(MAX_COMPARED, names, key=in_common)
    return difflib.get_close_matches(name, alike, n=MAX_LISTED, cutoff=0.5)
