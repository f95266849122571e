"""What the registry is about to take in: a checked package, as the card it would get.

Made from a package, whose files may still lie in an archive or a directory. Knows no table and no
trust.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from coterie.core.adapters import AdapterCard
from coterie.core.errors import InvalidRequest
from coterie.packages.archive import Package
from coterie.packages.digest import WEIGHTS
from coterie.packages.names import check_name, check_version


def card_of(package: Package, signer: str = "") -> AdapterCard:
    manifest = package.manifest
    return AdapterCard(
        name=manifest.name,
        version=manifest.version,
        digest=package.digest,
        kind=package.config.kind,
        bases=manifest.fingerprints,
        num_virtual_tokens=package.config.num_virtual_tokens,
        nbytes=package.files[WEIGHTS].size,
        installed_at=time.time(),
        signer=signer,
        description=manifest.description,
    )


def named(card: AdapterCard, name: str | None, version: str | None) -> AdapterCard:
    """Under other words, where they were given."""
    if name is not None:
        card = replace(card, name=check_name(name))
    if version is not None:
        card = replace(card, version=check_version(version))
    return card


def fitted(card: AdapterCard, bases: Sequence[str], names: Sequence[str]) -> AdapterCard:
    """For one of these base models (fingerprints), or a refusal that says which it is for (names).

    An adapter that names no fingerprint is taken to be for all of them.
    """
    if not bases:
        return card
    if not card.bases:
        return replace(card, bases=tuple(sorted(set(bases))))
    if not set(bases) & set(card.bases):
        made_for = ", ".join(base[:12] for base in card.bases)
        called = f"{', '.join(dict.fromkeys(names))} " if names else ""
        raise InvalidRequest(
            f"{card.name}@{card.version} was made for another base model: for {called}"
            f"(fingerprint {made_for}), not for the one with {bases[0][:12]}. Use that model, or "
            "pack the adapter again with --base for this one.",
            param="base",
        )
    return card
