"""DoRA, exactly PEFT's: g * (f(x) - bias) + bias + g * s B A x, with s = w * scaling and
g = m / |W + s B A|, the norm by rows of the base weight W.

The norm for any s comes from three vectors: |W|^2, <W, BA> and |BA|^2. Reads through lora.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from coterie.adapters.kinds.lora import read
from coterie.adapters.kinds.patch_builder import transposed
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from coterie.adapters.base import ModuleChange, TargetModule
    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder

__all__ = ["apply", "read"]


def apply(folding: ModulePatchBuilder, change: ModuleChange, weight: float) -> None:
    if change.a is None or change.b is None or change.magnitude is None:
        return
    strength = weight * change.scaling
    b = transposed(change.b.float())
    squared = _norms_squared(folding.target, change.a.float(), b, strength)
    if not squared.min() > 0:
        raise WeightsError(
            f"layer {folding.target.site[0]}, {folding.target.site[1]}: a row of the adapted "
            "weight is zero, and DoRA divides by its norm"
        )
    scale = change.magnitude.float().numpy() / np.sqrt(squared)
    # the low-rank term is inside the brackets that g multiplies
    if strength:
        folding.join(change.a, b.mul_(strength))
    folding.scale_product(torch.from_numpy(scale.astype(np.float32)))


def _norms_squared(
    target: TargetModule, a: Tensor, b: Tensor, strength: float
) -> NDArray[np.float64]:
    """|W + strength B A|^2 by rows, [out]; a [r, in], b [r, out]."""
    # numpy: torch takes a millisecond for the product of a few narrow rows on some machines
    rows, columns = a.numpy(), b.numpy()
    terms = (rows @ rows.T) @ columns
    terms *= strength
    terms += 2 * target.project(a).numpy()
    # s <2 W + s B A, B A>
    added = np.einsum("ro,ro->o", terms, columns).astype(np.float64)
    squared: NDArray[np.float64] = target.row_norms_squared().numpy() + strength * added
    return squared
