"""A stack of decoder layers on Triton kernels, with and without adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.kernels import patched
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.decoder import DecoderLayer, DecoderShape
from coterie.kernels.reference import layers as reference
from coterie.kernels.triton.attention import paged_attention
from coterie.kernels.triton.layers import add_norm, place_heads, silu_mul


def _normed_whole(
    shape: DecoderShape, layer: DecoderLayer, qkv: Tensor
) -> tuple[DecoderLayer, Tensor]:
    """Bias and norms over all heads by torch; the layer that is left has neither."""
    heads = torch.cat([part.flatten(1) for part in reference.project(shape, layer, qkv)], dim=1)
    return replace(layer, qkv_bias=None, q_norm=None, k_norm=None), heads


def decoder(
    shape: DecoderShape,
    layers: Sequence[DecoderLayer],
    cos: Tensor,
    sin: Tensor,
    hidden: Tensor,
    kv: Sequence[Tensor],
    batch: AttentionBatch,
    first: int = 0,
) -> Tensor:
    """Run `layers` over hidden [T, D], which is overwritten. No final norm.

    The first given layer is number `first` of the model: patches are told apart by it.
    """
    if batch.patches or batch.patch_rows is not None:
        from coterie.kernels.triton import patched as triton_patched

        reads = triton_patched.find_patch_reads(shape, layers, batch, first)
        if reads is not None:
            return triton_patched.patched_decoder(
                shape, layers, (cos, sin), hidden, kv, batch, reads
            )
    patches = batch.patches
    delta: Tensor | None = None
    heads = (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size))
    inner = (("gate", shape.intermediate), ("up", shape.intermediate))
    for index, (layer, kv_layer) in enumerate(zip(layers, kv, strict=True), first):
        normed = add_norm(hidden, delta, layer.input_norm, shape.eps)
        qkv = patched.linear(layer.qkv, normed, index, heads, patches)
        if layer.norms_whole(shape):
            layer, qkv = _normed_whole(shape, layer, qkv)
        q = place_heads(shape, layer, qkv, (cos, sin), kv_layer, batch)
        mixed = paged_attention(q, kv_layer, batch, shape.attention_scale).view(len(hidden), -1)
        delta = patched.linear(layer.o, mixed, index, (("o", shape.hidden),), patches)
        if layer.post_norm is None or layer.gate_up is None or layer.down is None:
            continue
        normed = add_norm(hidden, delta, layer.post_norm, shape.eps)
        acts = silu_mul(patched.linear(layer.gate_up, normed, index, inner, patches))
        delta = patched.linear(layer.down, acts, index, (("down", shape.hidden),), patches)
    return hidden if delta is None else hidden + delta
