"""What the packages of installed adapters say, each read once, on the registry's thread.

A package that cannot be read says nothing; its adapter runs all the same when it is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.errors import CoterieError
from coterie.obs.trace import log
from coterie.packages.device_size import device_size
from coterie.packages.profile import read_profile

if TYPE_CHECKING:
    from coterie.packages.registry import Registry

# of a fleet in which nobody was judged
UNJUDGED = 0.5


class Profiles:
    """Keeps what it read while it is installed: a package's files never change."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, Path], AdapterProfile] = {}

    def read(
        self, registry: Registry, cards: Sequence[AdapterCard]
    ) -> dict[tuple[str, str], AdapterProfile]:
        """By name and version. The same object as before where nothing changed."""
        known: dict[tuple[str, str, Path], AdapterProfile] = {}
        found: dict[tuple[str, str], AdapterProfile] = {}
        for card in cards:
            folder = registry.files(card)
            key = (card.name, card.version, folder)
            profile = self._known.get(key) or _read(registry, card, folder)
            if profile.card != card:
                profile = replace(profile, card=card)
            known[key] = found[card.name, card.version] = profile
        self._known = known
        return found


def current_profiles(
    meanings: Mapping[str, AdapterCard],
    profiles: Mapping[tuple[str, str], AdapterProfile],
    damaged: Collection[str] = (),
) -> dict[str, AdapterProfile]:
    """Those that can be chosen by content, by what they are called, in the names' order."""
    return {
        name: profiles[name, card.version]
        for name, card in sorted(meanings.items())
        if (name, card.version) in profiles and card.digest not in damaged
    }


def usual_quality(profiles: Iterable[AdapterProfile]) -> float:
    """What a package without figures is taken to reach: the mean of those with some."""
    judged = [profile.quality for profile in profiles if profile.quality is not None]
    return fmean(judged) if judged else UNJUDGED


def _read(registry: Registry, card: AdapterCard, folder: Path) -> AdapterProfile:
    try:
        size = device_size(registry.library / card.digest)
        return replace(
            read_profile(card, registry.manifest(card), folder),
            device_bytes=size.wide,
            narrow_bytes=size.narrow,
            shift_bytes=size.shifts,
        )
    except (CoterieError, OSError, ValueError) as error:
        log("manifest_unreadable", level="warning", model=f"{card.name}@{card.version}",
            error=error)  # fmt: skip
        return AdapterProfile(card)
