"""Attention over a cache of latents (DeepSeek's MLA, absorbed): one plane is keys and values.

A cache is [1, num_blocks, 1, block_size, rank + rope]; every query head reads the same rows, and
the first `rank` values of what comes out are the mixed latents. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels.backend import make_linear
from coterie.kernels.linear import ReferenceLinear
from coterie.kernels.reference import layers as reference
from coterie.weights.quantize import Weight

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch


class HeadLinear:
    """A product of its own for every head: x [T, H, in] -> [T, H, out]."""

    def __init__(self, weights: Sequence[Weight], backend: str, device: torch.device) -> None:
        products = [make_linear([weight], backend, device) for weight in weights]
        self.nbytes = sum(product.nbytes for product in products)
        self._out = products[0].out_features
        self._products = products
        self._stacked: Tensor | None = None
        if all(isinstance(product, ReferenceLinear) for product in products):
            # [H, in, out]: one batched product instead of one per head
            own = [p.weight for p in products if isinstance(p, ReferenceLinear)]
            self._stacked, self._products = torch.stack(own).transpose(1, 2), []

    def __call__(self, x: Tensor) -> Tensor:
        if self._stacked is not None:
            rows = x.transpose(0, 1).to(self._stacked.dtype)
            return torch.bmm(rows, self._stacked).transpose(0, 1).to(x.dtype)
        out = x.new_empty(len(x), len(self._products), self._out)
        for head, product in enumerate(self._products):
            out[:, head] = product(x[:, head])
        return out


def write_latent(rows: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
    """Scatter rows [T, rank + rope] into the cache."""
    block_size = kv_layer.shape[3]
    block = torch.div(slots, block_size, rounding_mode="floor")
    kv_layer[0, block, 0, slots - block * block_size] = rows.to(kv_layer.dtype)


def latent_attention(q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of q [T, heads, rank + rope]; softmax in fp32."""
    return reference.paged_attention(q, kv_layer.expand(2, -1, -1, -1, -1), batch, scale)
