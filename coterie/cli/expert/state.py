"""Where the command line stores experts and trusted keys: in Coterie's state folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.options import fetch

if TYPE_CHECKING:
    from coterie.core.adapters import AdaptableModules
    from coterie.packages.manifest import BaseModelRef
    from coterie.packages.registry import AdapterRegistry
    from coterie.packages.trust import TrustStore


def experts_dir() -> Path:
    from coterie.weights.home import state_dir

    return state_dir() / "experts"


def open_registry() -> AdapterRegistry:
    from coterie.core.private_files import private_folder
    from coterie.packages.registry import AdapterRegistry

    private_folder(experts_dir().parent)
    return AdapterRegistry(experts_dir())


def open_trust() -> TrustStore:
    from coterie.packages.trust import TrustStore
    from coterie.weights.home import state_dir

    return TrustStore(state_dir() / "trust.json")


def keys_dir() -> Path:
    from coterie.weights.home import state_dir

    return state_dir() / "keys"


def bases(models: Sequence[str] | None) -> list[BaseModelRef]:
    """Each model with its fingerprint; fetched if it is not on this machine."""
    from coterie.packages.manifest import BaseModelRef
    from coterie.weights.checkpoint import open_checkpoint

    return [BaseModelRef(_called(m), open_checkpoint(fetch(m)).fingerprint()) for m in models or ()]


def modules(models: Sequence[str] | None) -> dict[str, AdaptableModules]:
    """The modules of each model that adapters may change, read from its file only."""
    from coterie.core.adapters import AdaptableModules
    from coterie.models.build.targets import site_of
    from coterie.weights.checkpoint import open_checkpoint

    by_model: dict[str, AdaptableModules] = {}
    for model in models or ():
        checkpoint = open_checkpoint(fetch(model))
        shapes = {
            path: checkpoint.shape(name)
            for name in checkpoint.names()
            if site_of(path := name.removesuffix(".weight")) is not None
        }
        tied = "model.embed_tokens.weight"
        if tied in checkpoint.names():
            shapes.setdefault("lm_head", checkpoint.shape(tied))
            hidden = checkpoint.shape(tied)[1]
            pairs = {path: (shape[1], shape[0]) for path, shape in shapes.items()}
            by_model[_called(model)] = AdaptableModules(hidden, pairs)
    return by_model


def _called(model: str) -> str:
    """A model's name without parts that are only valid on this machine."""
    for scheme in ("hf:", "pypi:"):
        if model.startswith(scheme):
            return model.removeprefix(scheme)
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.resolve().name
