"""Matrix products with stored weights: the `Linear` interface and its plain torch form.

`backend.make_linear` makes products from `Weight` values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from coterie.weights.quantize import DenseWeight, Weight, dense


class Linear(Protocol):
    """y = x @ W.T for x [T, in_features]; y has x's dtype."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class ReferenceLinear:
    """One dense matrix through torch. Quantised weights are widened once, when loaded.

    On the CPU the matrix is always fp32 (exact, and the only type that every CPU multiplies fast);
    on other devices fp32 stays fp32 and all other types become bf16.
    """

    def __init__(self, weights: Sequence[Weight], device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        dtype = torch.float32 if device.type == "cpu" else _accelerator_dtype(weights)
        self.weight = torch.cat([dense(weight, dtype).to(device) for weight in weights])
        self.out_features, self.in_features = self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


def joined(products: Sequence[ReferenceLinear]) -> ReferenceLinear:
    """One product over the rows of several, whose matrices become parts of its own."""
    weights = [DenseWeight(product.weight) for product in products]
    whole, first = ReferenceLinear(weights, weights[0].tensor.device), 0
    for product in products:
        product.weight = whole.weight[first : first + product.out_features]
        first += product.out_features
    return whole


def _accelerator_dtype(weights: Sequence[Weight]) -> torch.dtype:
    full = all(isinstance(w, DenseWeight) and w.tensor.dtype == torch.float32 for w in weights)
    return torch.float32 if full else torch.bfloat16
