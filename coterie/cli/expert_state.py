"""Where the command line keeps experts and trust: in Coterie's state folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.options import fetch

if TYPE_CHECKING:
    from coterie.packages.manifest import Base
    from coterie.packages.registry import Registry
    from coterie.packages.trust import TrustStore


def experts_dir() -> Path:
    from coterie.weights.home import state_dir

    return state_dir() / "experts"


def open_registry() -> Registry:
    from coterie.packages.registry import Registry

    return Registry(experts_dir())


def open_trust() -> TrustStore:
    from coterie.packages.trust import TrustStore
    from coterie.weights.home import state_dir

    return TrustStore(state_dir() / "trust.json")


def keys_dir() -> Path:
    from coterie.weights.home import state_dir

    return state_dir() / "keys"


def bases(models: Sequence[str] | None) -> list[Base]:
    """Each model with its fingerprint, fetched when it is not here."""
    from coterie.packages.manifest import Base
    from coterie.weights.checkpoint import open_checkpoint

    return [Base(_called(m), open_checkpoint(fetch(m)).fingerprint()) for m in models or ()]


def _called(model: str) -> str:
    """A model's name without what is true on this machine only."""
    for scheme in ("hf:", "pypi:"):
        if model.startswith(scheme):
            return model.removeprefix(scheme)
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.resolve().name
