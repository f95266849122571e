"""Triton kernels for what is between a layer's matrix products.

They compute the same as `reference.decoder`, with the same roundings. Each fused kernel reads its
input once: while decoding, the number of launches decides the speed. Import it only where triton is
installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.batch import AttentionBatch, PatchRows
from coterie.kernels.decoder import DecoderLayer, DecoderShape
from coterie.kernels.triton.patches import RANKS, SITE, fetch_site, patch_head, site_of


class HeadPatches(NamedTuple):
    """The patches of q, k and v that rows read."""

    rows: PatchRows
    layer: int
    # [T, 3, room]
    terms: Tensor
    # sites behind these that are fetched for later kernels
    fetched: int = 0


@triton.jit
def _add_norm(
    hidden,
    delta,
    weight,
    normed,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program per row: hidden += delta in place, normed = rms_norm(hidden) * weight."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    x = tl.load(hidden + row + column, mask=inside, other=0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta + row + column, mask=inside, other=0)).to(x.dtype)
        tl.store(hidden + row + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = (wide * scale).to(x.dtype).to(tl.float32)
    result = scaled * tl.load(weight + column, mask=inside, other=0)
    tl.store(normed + row + column, result.to(x.dtype), mask=inside)


@triton.jit
def _norm_halves(first, second, weight, half, inside, eps, HEAD_DIM: tl.constexpr):
    """RMS norm of one head in two halves, rounded to the weight's type before the weight."""
    dtype = weight.dtype.element_ty
    squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)
    low = tl.load(weight + half, mask=inside, other=0)
    high = tl.load(weight + HEAD_DIM // 2 + half, mask=inside, other=0)
    first = ((first * scale).to(dtype).to(tl.float32) * low).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * high).to(dtype).to(tl.float32)
    return first, second


# the site's number changes from layer to layer: one compilation is enough for all
@triton.jit(do_not_specialize=["q_site"])
def _place_heads(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, q, kv, table, terms,
    eps, half_stride, block_stride, head_stride, sites, room, q_site,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, PATCH: tl.constexpr,
    RANKS: tl.constexpr, KIND: tl.constexpr, FETCHED: tl.constexpr,
):  # fmt: skip
    """One program per (row, head of q, k or v): patch, bias, norm and rope; q is written to `q`, k
    and v to their slot. A negative slot is a padded row, for which nothing is stored. Additional
    programs before those of the heads prefetch the patches that the row's next kernels read."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) - FETCHED
    if FETCHED > 0 and head < 0:
        site = q_site + 2 - head
        if site < sites:
            fetch_site(table, row, site, sites)
        return
    half = tl.arange(0, HALF)
    inside = half < HEAD_DIM // 2
    source = row * (HEADS + 2 * KV_HEADS) * HEAD_DIM + head * HEAD_DIM + half
    dtype = qkv.dtype.element_ty
    first = tl.load(qkv + source, mask=inside, other=0).to(tl.float32)
    second = tl.load(qkv + source + HEAD_DIM // 2, mask=inside, other=0).to(tl.float32)
    if PATCH:
        # fmt: off
        first, second = patch_head(first, second, table + (row * sites + q_site) * SITE,
                                   terms + row * 3 * room, room, head, half, inside,
                                   HEADS, KV_HEADS, HEAD_DIM, RANKS, KIND)
        # fmt: on
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if BIAS:
        first += tl.load(bias + head * HEAD_DIM + half, mask=inside, other=0)
        second += tl.load(bias + head * HEAD_DIM + HEAD_DIM // 2 + half, mask=inside, other=0)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            weight = q_norm if head < HEADS else k_norm
            first, second = _norm_halves(first, second, weight, half, inside, eps, HEAD_DIM)
        turn = tl.load(positions + row) * (HEAD_DIM // 2) + half
        c = tl.load(cos + turn, mask=inside, other=0)
        s = tl.load(sin + turn, mask=inside, other=0)
        first, second = first * c - second * s, second * c + first * s
    if head < HEADS:
        target = q + (row * HEADS + head) * HEAD_DIM + half
        tl.store(target, first.to(dtype), mask=inside)
        tl.store(target + HEAD_DIM // 2, second.to(dtype), mask=inside)
    else:
        slot = tl.load(slots + row)
        keep = inside & (slot >= 0)
        kv_head = (head - HEADS) % KV_HEADS
        part = (head - HEADS) // KV_HEADS
        target = kv + part * half_stride + (slot // BLOCK_SIZE) * block_stride
        target += kv_head * head_stride + (slot % BLOCK_SIZE) * HEAD_DIM + half
        kept = kv.dtype.element_ty
        tl.store(target, first.to(dtype).to(kept), mask=keep)
        tl.store(target + HEAD_DIM // 2, second.to(dtype).to(kept), mask=keep)


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """hidden += delta (in place), then rms_norm(hidden) * weight; weight in hidden's dtype."""
    rows, width = hidden.shape
    normed = torch.empty_like(hidden) if out is None else out
    _add_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        eps,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADD=delta is not None,
        num_warps=8 if width > 2048 else 4,
    )
    return normed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_norm(x, None, weight, eps)


def place_heads(
    shape: DecoderShape,
    layer: DecoderLayer,
    qkv: Tensor,
    turn: tuple[Tensor, Tensor],
    kv_layer: Tensor,
    batch: AttentionBatch,
    patches: HeadPatches | None = None,
) -> Tensor:
    """Queries [T, heads, head_dim] with bias, norm and rotation; writes keys and values to the
    cache."""
    rows, heads = len(qkv), shape.num_heads + 2 * shape.num_kv_heads
    q = torch.empty((rows, shape.num_heads, shape.head_dim), dtype=qkv.dtype, device=qkv.device)
    unused: Any = qkv
    read, index, terms, fetched = patches or (None, 0, unused, 0)
    _place_heads[(rows, heads + fetched)](
        qkv,
        unused if layer.qkv_bias is None else layer.qkv_bias,
        unused if layer.q_norm is None else layer.q_norm,
        unused if layer.k_norm is None else layer.k_norm,
        *turn,
        batch.positions,
        batch.slots,
        q,
        kv_layer,
        read.table if read else unused,
        terms,
        shape.eps,
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        read.table.shape[1] if read else 0,
        terms.shape[2] if read else 0,
        site_of(index, "q"),
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        HALF=triton.next_power_of_2(shape.head_dim // 2),
        BLOCK_SIZE=batch.block_size,
        BIAS=layer.qkv_bias is not None,
        NORM=layer.q_norm is not None,
        PATCH=read is not None,
        RANKS=RANKS,
        KIND=read.kind if read else 0,
        FETCHED=fetched,
        num_warps=1,
    )
    return q


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    chunk = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, chunk))](gate_up, out, WIDTH=width, CHUNK=chunk)
    return out
