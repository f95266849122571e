"""Finds adapters by what users write: an installed name, a package, a directory.

The form is `NAME[@VERSION]` or a path, optionally followed by `=WEIGHT`. Uses the registry, so its
checks (signature, content, base model) apply here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.core.adapters import MAX_WEIGHT, AdapterCard
from coterie.core.errors import InvalidRequest, NotFound
from coterie.core.plan import AdapterChoice
from coterie.weights.home import state_dir

if TYPE_CHECKING:
    from coterie.packages.registry import AdapterRegistry

PACKAGE = ".expert"

# "name", "name=0.5", "./folder", ("name", 0.5)
Named = str | tuple[str, float]


class AdapterNames:
    """`root`: the registry's folder; None = the folder of this user."""

    def __init__(self, root: Path | None = None, *, allow_unsigned: bool = False) -> None:
        self._root = root or state_dir() / "experts"
        self._allow_unsigned = allow_unsigned
        self._registry: AdapterRegistry | None = None
        # adapters that this process imported from paths: they are not installed
        self.imported: dict[str, AdapterCard] = {}

    @property
    def library(self) -> Path:
        return self._root / "library"

    def choose(
        self, named: Sequence[Named] | str, fingerprint: str
    ) -> tuple[tuple[AdapterChoice, ...], int]:
        """The stack in the given order, and the number of virtual tokens that it puts before a
        prompt. `fingerprint` is the model's; adapters for other models are refused."""
        stack, tokens = [], 0
        for item in [named] if isinstance(named, str) else named:
            name, weight = parse(item)
            card = self.find(name)
            check_base(card, fingerprint)
            stack.append(AdapterChoice(card.name, card.digest, weight))
            tokens += card.num_virtual_tokens
        return tuple(stack), tokens

    def find(self, name: str) -> AdapterCard:
        path = Path(name).expanduser()
        if not _is_path(name):
            try:
                return self._open().find(*_versioned(name))
            except NotFound:
                # it may still be the path of a folder in the working directory
                if not path.exists():
                    raise
        if not path.exists():
            raise NotFound(f"{name}: there is no such file or directory", param="experts")
        return self._import(path)

    def close(self) -> None:
        if self._registry is not None:
            self._registry.close()
            self._registry = None

    def _import(self, path: Path) -> AdapterCard:
        registry = self._open()
        if path.is_dir():
            card = registry.import_directory(path)
        else:
            from coterie.packages.trust import TrustStore

            # `coterie keys` stores the trusted keys beside the registry's folder
            trust = TrustStore(self._root.parent / "trust.json")
            card = registry.import_package(path, trust=trust, allow_unsigned=self._allow_unsigned)
        self.imported[str(path)] = card
        return card

    def _open(self) -> AdapterRegistry:
        if self._registry is None:
            from coterie.packages.registry import AdapterRegistry

            self._registry = AdapterRegistry(self._root)
        return self._registry


def parse(item: Named) -> tuple[str, float]:
    """Name and weight, from `NAME_OR_PATH[=WEIGHT]` or from a pair."""
    if not isinstance(item, str):
        name, weight = item
        return _weighted(name, float(weight))
    name, sign, text = item.rpartition("=")
    if not sign or Path(item).exists():
        return _weighted(item, 1.0)
    try:
        return _weighted(name, float(text))
    except ValueError:
        raise InvalidRequest(
            f"{item!r}: write NAME or NAME=WEIGHT; {text!r} is no number", param="experts"
        ) from None


def _weighted(name: str, weight: float) -> tuple[str, float]:
    if not name or not (math.isfinite(weight) and abs(weight) <= MAX_WEIGHT):
        raise InvalidRequest(
            f"{name!r} with the weight {weight}: name an expert, and a weight from "
            f"-{MAX_WEIGHT:.0f} to {MAX_WEIGHT:.0f}",
            param="experts",
        )
    return name, weight


def check_base(card: AdapterCard, fingerprint: str) -> None:
    if card.bases and fingerprint not in card.bases:
        raise InvalidRequest(
            f"{card.name}@{card.version} was made for another base model (fingerprint "
            f"{', '.join(base[:12] for base in card.bases)}; this one is {fingerprint[:12]}). "
            "Use the model it was trained on.",
            param="experts",
        )


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith(PACKAGE) or name.startswith((".", "~"))


def _versioned(name: str) -> tuple[str, str | None]:
    name, _, version = name.partition("@")
    return name, version or None
