"""Catalogs for the routing benchmarks: the shipped experts, and as many made-up ones as wanted."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import islice, product

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.packages.archive import inspect
from coterie.packages.profile import profile_of
from coterie.packages.shipped import files
from coterie.routing.match.matcher import Matcher
from examples.expert_data.base import words

_VERBS = words(
    """
    translate summarise rewrite classify check correct explain sort label grade compare shorten
    expand outline annotate describe anonymise transcribe
    """
)
_THINGS = words(
    """
    contracts recipes poems essays radiology-reports tweets lyrics manuals log-files patents menus
    speeches letters minutes tutorials formulas diagrams headlines receipts itineraries resumes
    abstracts interviews novels scripts
    """
)
_FIELDS = words(
    """
    law medicine chemistry football gardening aviation banking astronomy cooking tourism biology
    insurance shipping fashion music geology theatre farming physics politics railways sailing
    mining chess architecture
    """
)
_FRAMES = (
    "{verb} these {thing} about {field}",
    "Please {verb} the following {thing}, the field is {field}.",
    "I work in {field}. {verb} my {thing} for me",
    "{thing} from {field}: {verb} them",
    "Can you {verb} {field} {thing}?",
    "{verb} one of the {thing} below, written for {field}",
)


def shipped() -> list[AdapterProfile]:
    profiles = []
    for path in files():
        manifest = inspect(path).manifest
        digest = sha256(path.read_bytes()).hexdigest()
        card = AdapterCard(
            manifest.name, manifest.version, digest, "lora", (), 0, path.stat().st_size, 0.0,
            description=manifest.description,
        )  # fmt: skip
        profiles.append(profile_of(card, manifest))
    return profiles


def made_up(count: int, seed: int = 0) -> list[AdapterProfile]:
    """Random profiles, at most 11,250; the same for the same seed."""
    kinds = list(product(_VERBS, _THINGS, _FIELDS))
    random.Random(seed).shuffle(kinds)
    return [_profile(*kind) for kind in islice(kinds, count)]


def _profile(verb: str, thing: str, field: str) -> AdapterProfile:
    name, said = f"{verb}-{thing}-{field}", thing.replace("-", " ")
    examples = tuple(f.format(verb=verb, thing=said, field=field) for f in _FRAMES)
    card = AdapterCard(
        name, "1.0.0", sha256(name.encode()).hexdigest(), "lora", (), 0, 1_000_000, 0.0,
        description=f"{verb} {said} in {field}",
    )  # fmt: skip
    return AdapterProfile(card, keywords=(verb, said, field), examples=examples)


class Fleet:
    """A catalog in memory, as the router sees the installed experts."""

    def __init__(self, profiles: Sequence[AdapterProfile], matcher: Matcher) -> None:
        self._by_name = {profile.card.name: profile for profile in profiles}
        self._matcher = matcher

    def find(self, name: str, version: str) -> AdapterCard | None:
        found = self._by_name.get(name)
        return found.card if found and version in ("", found.card.version) else None

    def names(self) -> Iterable[str]:
        return self._by_name

    def profile(self, card: AdapterCard) -> AdapterProfile:
        return self._by_name[card.name]

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        return self._by_name

    def matcher(self) -> Matcher:
        return self._matcher

    def usual_quality(self) -> float:
        return 0.5
