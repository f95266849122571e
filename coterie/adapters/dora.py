"""DoRA, exactly PEFT's: g * (f(x) - bias) + bias + g * s B A x, with s = w * scaling and
g = m / |W + s B A|, the norm by rows of the base weight W.

The norm for any s comes from three vectors: |W|^2, <W, BA> and |BA|^2. Reads through lora.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.adapters.lora import read
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.base import Change, Target
    from coterie.adapters.folding import Folding

__all__ = ["apply", "read"]


def apply(folding: Folding, change: Change, weight: float) -> None:
    if change.a is None or change.b is None or change.magnitude is None:
        return
    strength = weight * change.scaling
    squared = _norms_squared(folding.target, change, strength)
    if not bool((squared > 0).all()):
        raise WeightsError(
            f"layer {folding.target.site[0]}, {folding.target.site[1]}: a row of the adapted "
            "weight is zero, and DoRA divides by its norm"
        )
    scale = (change.magnitude.double() / squared.sqrt()).float()
    # the low-rank term is inside the brackets that g multiplies
    if strength:
        folding.add(change.a, change.b, strength)
    folding.scale_product(scale)


def _norms_squared(target: Target, change: Change, strength: float) -> Tensor:
    """|W + strength B A|^2 by rows, fp64 [out]."""
    assert change.a is not None and change.b is not None
    a, b = change.a.float(), change.b.float()
    cross = (b * target.project(a).T).sum(1).double()
    own = ((b @ (a @ a.T)) * b).sum(1).double()
    return target.row_norms_squared() + 2 * strength * cross + strength**2 * own
