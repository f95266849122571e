"""What the router needs from other parts: a catalog of adapters, a matcher, outcomes so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from coterie.core.adapters import AdapterCard, AdapterProfile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
        """The calibrated probability that it is the right one."""

    @property
    def part(self) -> float:
        """The same for a part of the text, if another adapter is for another part of it; 0 = there
        is no such part."""


class Matcher(Protocol):
    """Immutable: finds the adapters of one catalog by content."""

    @property
    def threshold(self) -> float:
        """The lowest probability at which an adapter should be chosen."""

    @property
    def profiles(self) -> Sequence[AdapterProfile]:
        """Those that it can find."""

    def match(
        self,
        text: str,
        features: PromptFeatures | None = None,
        k: int = 30,
        among: NDArray[np.bool_] | None = None,
    ) -> Sequence[AdapterMatch]:
        """The `k` most likely first, and those that the prompt's words name, by probability. Of the
        rest of `profiles`, where `among` is false, nothing is said."""


class OutcomeRates(Protocol):
    def rate(self, digest: str) -> tuple[int, int]:
        """For the answers of an adapter: (valid, judged)."""


class AdapterCatalog(Protocol):
    """Installed adapters, in memory."""

    def find(self, name: str, version: str) -> AdapterCard | None:
        """The card of that version; of the current version if `version` is empty."""

    def names(self) -> Iterable[str]:
        """Every name that a request may use."""

    def profile(self, card: AdapterCard) -> AdapterProfile:
        """What its package says; only the card if the package says nothing."""

    def current_profiles(self) -> Mapping[str, AdapterProfile]:
        """The current version of every name, without aliases."""

    def matcher(self) -> Matcher | None:
        """For the installed adapters; None while it is being built."""

    def usual_quality(self) -> float:
        """The mean quality that the installed packages state."""


class NoAdapters:
    """The catalog of a server without adapters."""

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
    """No answer was judged yet."""

    def rate(self, digest: str) -> tuple[int, int]:
        return 0, 0
