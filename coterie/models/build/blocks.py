"""A decoder stack block by block in Python, for attention that the fused decoders do not know.

Products, norms and paged attention still come from the backend (native, Triton or torch). Owns the
order of a block and attention over whole heads. Knows no checkpoint and no experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels import patched
from coterie.kernels.reference import layers as reference
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.reference.latent import latent_attention

if TYPE_CHECKING:
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.patch import Segment

# (input of the block [T, D], the layer's cache, batch) -> what is added to the residual
Attend = Callable[[Tensor, Tensor, AttentionBatch], Tensor]


@dataclass(frozen=True, slots=True)
class BackendOps:
    """The backend's kernels, by the signatures of `kernels.reference`."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    attention: Callable[[Tensor, Tensor, AttentionBatch, float], Tensor]
    # over a cache whose one plane is keys and values
    latent: Callable[[Tensor, Tensor, AttentionBatch, float], Tensor] = latent_attention


def ops_for(backend: str) -> BackendOps:
    if backend == "triton":
        from coterie.kernels.triton import attention as triton_attention, layers as triton_layers

        return BackendOps(triton_layers.rms_norm, triton_attention.paged_attention)
    if backend == "cpu":
        from coterie.kernels.cpu import layers as cpu

        return BackendOps(cpu.rms_norm, cpu.paged_attention, cpu.paged_attention)
    return BackendOps(reference.rms_norm, reference.paged_attention)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    input_norm: Tensor
    attend: Attend
    # None where experts follow
    post_norm: Tensor | None = None
    mlp: Callable[[Tensor, tuple[Segment, ...]], Tensor] | None = None


class BlockDecoder:
    """Pre-norm blocks one after another."""

    def __init__(self, blocks: Sequence[DecoderBlock], ops: BackendOps, eps: float) -> None:
        self._blocks, self._norm, self._eps = blocks, ops.norm, eps

    def forward(
        self, hidden: Tensor, kv: Sequence[Tensor], batch: AttentionBatch, first: int, last: int
    ) -> Tensor:
        for index in range(first, last):
            block = self._blocks[index]
            normed = self._norm(hidden, block.input_norm, self._eps)
            hidden = hidden + block.attend(normed, kv[index], batch)
            if block.mlp is not None and block.post_norm is not None:
                normed = self._norm(hidden, block.post_norm, self._eps)
                hidden = hidden + block.mlp(normed, batch.patches)
        return hidden


class RotaryCache:
    """The rows of the rotary tables for a batch, gathered once for all its layers."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._tables = cos, sin
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def __call__(self, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        if self._last is None or self._last[0] is not batch.positions:
            cos, sin = self._tables
            self._last = batch.positions, (cos[batch.positions], sin[batch.positions])
        return self._last[1]


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Queries and keys are normed (per head, or across all of them as OLMoE does: as wide as the
    norm's weight is), then clipped, then turned."""

    shape: DecoderShape
    layer: DecoderLayer
    ops: BackendOps
    turns: RotaryCache
    clip: float | None
    # the layer's number: adapters are told apart by it
    index: int

    def __call__(self, x: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> Tensor:
        shape, layer = self.shape, self.layer
        parts = (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size))
        qkv = patched.linear(layer.qkv, x, self.index, parts, batch.patches)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        sizes = [shape.q_size, shape.kv_size, shape.kv_size]
        q, k, v = torch.split(qkv, sizes, dim=-1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        q, k, v = (part.reshape(len(x), -1, shape.head_dim) for part in (q, k, v))
        turn = self.turns(batch)
        reference.write_kv(reference.rotary(k, *turn), v, kv_layer, batch.slots)
        q = reference.rotary(q, *turn)
        mixed = self.ops.attention(q, kv_layer, batch, shape.attention_scale)
        mixed, outer = mixed.reshape(len(x), shape.q_size), (("o", shape.hidden),)
        return patched.linear(layer.o, mixed, self.index, outer, batch.patches)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.ops.norm(rows.reshape(len(rows), -1, len(weight)), weight, self.shape.eps)
