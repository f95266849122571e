"""What the router asks of others: a catalog of adapters, a matcher of texts, outcomes so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from coterie.core.adapters import AdapterCard, AdapterProfile

if TYPE_CHECKING:
    from coterie.routing.features.features import PromptFeatures


class AdapterMatch(Protocol):
    """One adapter that a text may be for."""

    @property
    def profile(self) -> AdapterProfile: ...

    @property
    def similarity(self) -> float:
        """0 to 1."""

    @property
    def probability(self) -> float:
        """That it is the right one, calibrated."""


class Matcher(Protocol):
    """Immutable: one catalog's adapters, found by content."""

    @property
    def threshold(self) -> float:
        """The least probability at which an adapter should be chosen."""

    def match(
        self, text: str, features: PromptFeatures | None = None, k: int = 16
    ) -> Sequence[AdapterMatch]:
        """At most `k`, the likeliest first."""


class OutcomeRates(Protocol):
    def rate(self, digest: str) -> tuple[int, int]:
        """Of an adapter's answers: (valid, judged)."""


class AdapterCatalog(Protocol):
    """Installed adapters, in memory."""

    def find(self, name: str, version: str) -> AdapterCard | None:
        """The card of `name`'s version, its current one when `version` is empty."""

    def names(self) -> Iterable[str]:
        """Every name that can be asked for."""

    def profile(self, card: AdapterCard) -> AdapterProfile:
        """What its package says; of a package that says nothing, the card alone."""

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        """What every name means now, without aliases."""

    def matcher(self) -> Matcher | None:
        """Of what is installed, None while it is being built."""

    def usual_quality(self) -> float:
        """The mean of what the installed packages were judged with."""


class NoAdapters:
    """The catalog of a server that runs none."""

    def find(self, name: str, version: str) -> AdapterCard | None:
        return None

    def names(self) -> Iterable[str]:
        return ()

    def profile(self, card: AdapterCard) -> AdapterProfile:
        return AdapterProfile(card)

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        return {}

    def matcher(self) -> Matcher | None:
        return None

    def usual_quality(self) -> float:
        return 0.5


class NoOutcomes:
    """Nothing was judged yet."""

    def rate(self, digest: str) -> tuple[int, int]:
        return 0, 0
