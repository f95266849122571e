"""Profiles and catalogs in memory: what a registry would show the router, without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.request import Chat, InferenceRequest, Limits, Message, RouteHints, Sampling
from coterie.routing.features.features import PromptFeatures
from coterie.routing.protocols import Matcher

BASE, OTHER = "ab" * 32, "cd" * 32


def profile(name: str, version: str = "1.0.0", **more: Any) -> AdapterProfile:
    bases = more.pop("bases", (BASE,))
    nbytes = more.pop("nbytes", 1_000_000)
    digest = sha256(f"{name}@{version}".encode()).hexdigest()
    card = AdapterCard(name, version, digest, "lora", tuple(bases), 0, nbytes, 0.0)
    return AdapterProfile(card, **more)


def brief(profile: AdapterProfile, count: int = 40) -> AdapterProfile:
    """With its first hints alone: learnt from in a tenth of the time."""
    return replace(
        profile,
        examples=profile.examples[:count],
        counterexamples=profile.counterexamples[:count],
    )


@dataclass(frozen=True)
class Matched:
    profile: AdapterProfile
    similarity: float
    probability: float
    part: float = 0.0


class Answers:
    """A matcher that finds the same for every text, and remembers what it was asked."""

    def __init__(self, matches: Sequence[Matched], threshold: float = 0.5) -> None:
        self.matches, self.threshold = matches, threshold
        self.asked: list[tuple[str, PromptFeatures | None, int]] = []
        self.profiles = [item.profile for item in self.matches]

    def match(
        self,
        text: str,
        features: PromptFeatures | None = None,
        k: int = 30,
        among: NDArray[np.bool_] | None = None,
    ) -> list[Matched]:
        self.asked.append((text, features, k))
        usable = [True] * len(self.matches) if among is None else among
        return [item for item, may_use in zip(self.matches, usable, strict=True) if may_use][:k]


@dataclass
class Fleet:
    """A catalog of these profiles, the last of a name being its current version."""

    profiles: Sequence[AdapterProfile]
    answers: Matcher | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    quality: float = 0.5

    def find(self, name: str, version: str) -> AdapterCard | None:
        name = self.aliases.get(name, name)
        found = [p.card for p in self.profiles if p.card.name == name]
        if version:
            found = [card for card in found if card.version == version]
        return found[-1] if found else None

    def names(self) -> Iterable[str]:
        return [*dict.fromkeys(p.card.name for p in self.profiles), *self.aliases]

    def profile(self, card: AdapterCard) -> AdapterProfile:
        return next(p for p in self.profiles if p.card == card)

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        return {p.card.name: p for p in self.profiles}

    def matcher(self) -> Matcher | None:
        return self.answers

    def usual_quality(self) -> float:
        return self.quality


def asking(text: str = "hello", **hints: Any) -> InferenceRequest:
    request = InferenceRequest(
        id="r", prompt=Chat((Message("user", text),)), sampling=Sampling(), limits=Limits(),
        hints=RouteHints(), response_format=None, session=None, tenant="t", arrived_at=0.0,
    )  # fmt: skip
    return replace(request, hints=RouteHints(**hints))
