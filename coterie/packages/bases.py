"""Whether an expert is for a base model: fingerprints decide, names only explain."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core.adapters import AdapterCard
from coterie.core.errors import InvalidRequest


def check_base(card: AdapterCard, fingerprint: str, names: Sequence[str] = ()) -> None:
    """Raises InvalidRequest when the card lists base models and this one is not among them."""
    if card.bases and fingerprint not in card.bases:
        raise mismatch(card, fingerprint, names)


def mismatch(card: AdapterCard, fingerprint: str, names: Sequence[str] = ()) -> InvalidRequest:
    made_for = ", ".join(base[:12] for base in card.bases)
    called = f"{', '.join(names)} " if names else ""
    return InvalidRequest(
        f"{card.name}@{card.version} was made for another base model: for {called}(fingerprint "
        f"{made_for}), not for the one with {fingerprint[:12]}. Use that model, or pack the "
        "adapter again with --base for this one.",
        param="model",
    )
