"""DoRA, exactly as in PEFT: g * (f(x) - bias) + bias + g * s B A x, with s = w * scaling and
g = m / |W + s B A|, the norm by rows of the base weight W.

The norm for any s is computed from three vectors: |W|^2, <W, BA> and |BA|^2. Uses lora.py to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coterie.adapters.base import AdapterContent, ModuleSize
from coterie.adapters.kinds.lora import LoraChange, read_factors
from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import FORMATS, LORA_A, LORA_B, MAGNITUDE, PeftConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from coterie.adapters.base import TargetModule
    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder


@dataclass(frozen=True, slots=True)
class DoraChange:
    factors: LoraChange
    magnitude: Tensor  # [out]

    def sizes(self) -> tuple[ModuleSize, ...]:
        magnitude = ModuleSize("lora_magnitude_vector", self.magnitude.shape[0], "out")
        return (*self.factors.sizes(), magnitude)


def read(config: PeftConfig, tensors: Mapping[str, Tensor]) -> AdapterContent:
    changes = {}
    for path, parts, scaling in read_factors(config, tensors, FORMATS["dora"]):
        a, b, magnitude = parts[LORA_A], parts[LORA_B], parts[MAGNITUDE]
        if magnitude.shape != (b.shape[0],):
            raise WeightsError(f"{path}: lora_magnitude_vector is not as long as lora_B has rows")
        changes[path] = DoraChange(LoraChange(a, b, scaling), magnitude)
    return AdapterContent(changes)


def apply(builder: ModulePatchBuilder, change: DoraChange, weight: float) -> None:
    # imported here: the gateway has no torch, but also reads adapters to check them
    import torch

    from coterie.adapters.kinds.patch_builder import transposed

    factors = change.factors
    strength = weight * factors.scaling
    b = transposed(factors.b.float())
    squared = _norms_squared(builder.target, factors.a.float(), b, strength)
    if not squared.min() > 0:
        raise WeightsError(
            f"layer {builder.target.site[0]}, {builder.target.site[1]}: a row of the adapted "
            "weight is zero, and DoRA divides by its norm"
        )
    scale = change.magnitude.float().numpy() / np.sqrt(squared)
    # the low-rank term is inside the brackets that g multiplies
    if strength:
        builder.join(factors.a, b.mul_(strength))
    builder.scale_product(torch.from_numpy(scale.astype(np.float32)))


def _norms_squared(
    target: TargetModule, a: Tensor, b: Tensor, strength: float
) -> NDArray[np.float64]:
    """|W + strength B A|^2 by rows, [out]; a [r, in], b [r, out]."""
    # numpy: on some machines torch takes a millisecond for the product of a few narrow rows
    rows, columns = a.numpy(), b.numpy()
    terms = (rows @ rows.T) @ columns
    terms *= strength
    terms += 2 * target.project(a).numpy()
    # s <2 W + s B A, B A>
    added = np.einsum("ro,ro->o", terms, columns).astype(np.float64)
    squared: NDArray[np.float64] = target.row_norms_squared().numpy() + strength * added
    return squared
