"""A weighted stack of adapters, folded into one patch per matrix and one table of soft tokens.

On the host, once per stack. Owns the order of wrapping and the checks against the model; the kinds'
files own what wrapping means. Knows no pool and no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from coterie.adapters.kinds.folding import ModulePatchBuilder
from coterie.adapters.kinds.table import ADAPTERS
from coterie.core.errors import InvalidRequest, WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.base import Adapter, ModuleChange, Target, Targets
    from coterie.kernels.patch import Patch, Site


# relative; 4-bit weights keep row norms far better than this
_BASE_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class ComposedStack:
    patches: Mapping[Site, Patch]
    soft: Tensor | None  # [tokens, hidden] fp32
    nbytes: int


def compose(parts: Sequence[tuple[Adapter, float]], targets: Targets) -> ComposedStack:
    """The adapters in their order, each at its weight."""
    foldings: dict[str, ModulePatchBuilder] = {}
    tables: list[Tensor] = []
    for adapter, weight in parts:
        if not math.isfinite(weight):
            raise InvalidRequest(
                f"an adapter's weight must be finite, not {weight}", param="weight"
            )
        if adapter.soft is not None:
            tables.append(_soft(adapter.soft, weight, targets.hidden))
        wrap = ADAPTERS[adapter.kind].apply
        for path, change in adapter.changes.items():
            if path not in foldings:
                foldings[path] = ModulePatchBuilder(targets.find(path))
            _check(path, change, foldings[path].target)
            assert wrap is not None
            wrap(foldings[path], change, weight)
    made = ((folding.target.site, folding.patch()) for folding in foldings.values())
    patches = {site: patch for site, patch in made if patch is not None}
    soft = torch.cat(tables) if tables else None
    nbytes = sum(patch.nbytes for patch in patches.values()) + (0 if soft is None else soft.nbytes)
    return ComposedStack(patches, soft, nbytes)


def _soft(table: Tensor, weight: float, hidden: int) -> Tensor:
    if table.shape[1] != hidden:
        raise WeightsError(
            f"the soft prompt is {table.shape[1]} wide, the model {hidden}: it is for another model"
        )
    return table.float() * weight


def _check(path: str, change: ModuleChange, target: Target) -> None:
    """Shapes against the model's own."""
    wide, tall = target.in_features, target.out_features
    vector = wide if change.feedforward else tall
    for name, tensor, axis, wanted in (
        ("lora_A", change.a, 1, wide),
        ("lora_B", change.b, 0, tall),
        ("lora_magnitude_vector", change.magnitude, 0, tall),
        ("ia3_l", change.vector, 0, vector),
    ):
        if tensor is not None and tensor.shape[axis] != wanted:
            raise WeightsError(
                f"{path}: {name} is for {tensor.shape[axis]} features, the model has {wanted}: the "
                "adapter is for another model"
            )
    if change.base_norms is not None:
        _check_base(path, change.base_norms, target)


def _check_base(path: str, norms: Tensor, target: Target) -> None:
    """A file that carries a base weight must carry the served one's, up to quantisation."""
    if len(norms) == target.out_features:
        own = target.row_norms_squared().sqrt().float()
        if float((norms - own).norm()) <= _BASE_TOLERANCE * float(own.norm()):
            return
    raise WeightsError(
        f"{path}: the adapter's file carries another base weight (a resized vocabulary, or another "
        "model). Remove its base_layer tensors if you know better."
    )
