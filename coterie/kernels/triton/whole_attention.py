"""Attention of many decoding rows: one program for a KV head of a sequence and all of its context.

Computes the same as `decode_attention` with splits, which is for few rows. The device is busy with
many programs here: the fewer instructions beside its loads a program has, the faster they are read.
So a program has few warps, its tiles are whole heads, and what is known before the loop is not in
it; heads that share a KV head are computed once, and then repeated for the product's 16 rows.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.decoder import DecoderLayer, DecoderShape

LOG2_E = 1.4426950408889634


class ContextTile(NamedTuple):
    """Positions of a tile, and warps and stages of a program: stages - 1 tiles are requested at
    once."""

    positions: int
    warps: int
    stages: int


# 16-bit types, by the padded size of a head. Measured on an H200, us of 256 rows with 192 tokens:
# 8 KV heads of 128 52.4 (32/1/2 52.7, 32/4/3 56.1; 4 TB/s would be 50), 3 of 64 13.2
_TILES = {64: ContextTile(32, 1, 3), 128: ContextTile(16, 1, 3)}
# other heads, and fp32, whose products are unrolled
_OTHER = ContextTile(32, 4, 2)


def _tile(head_dim: int, dtype: torch.dtype) -> ContextTile:
    padded = max(64, triton.next_power_of_2(head_dim))
    return _OTHER if dtype.itemsize > 2 else _TILES.get(padded, _OTHER)


@triton.jit
def _request_heads(source, head, dim, across, in_head, HEAD_DIM: tl.constexpr):
    """Rows of heads [rows, DIM], and for each element the one half a head away."""
    row, mask = source + head[:, None] * HEAD_DIM, in_head[None, :]
    own = tl.load(row + dim[None, :], mask=mask, other=0)
    return own, tl.load(row + across[None, :], mask=mask, other=0)


@triton.jit
def _turn_heads(
    own, other, weight, other_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr
):
    """Normed and rotated, in fp32. `sin` is negative in the first half of a head."""
    own, other = own.to(tl.float32), other.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + eps)[:, None]
        own = own * scale * weight.to(tl.float32)[None, :]
        other = other * scale * other_weight.to(tl.float32)[None, :]
    return own * cos[None, :] + other * sin[None, :]


@triton.jit
def _repeat(values, ROWS: tl.constexpr):
    """The rows of `values`, again and again."""
    COUNT: tl.constexpr = values.shape[0]
    DIM: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[None, :, :], [ROWS // COUNT, COUNT, DIM])
    return tl.reshape(wide, [ROWS, DIM])


# widths change from step to step: specialising on them would compile while serving
@triton.jit(do_not_specialize=["width"])
def _attend_whole(
    qkv, q_norm, k_norm, cos, sin, kv, positions, slots, block_tables, out,
    eps, scale, half_stride, table_stride, width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    LARGE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Places in the cache have 32 bits, unless it is LARGE. All that waits for no other load is
    requested first."""
    PER_HEAD: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    # exact products where the model is fp32; has no effect on 16-bit types
    PRECISION: tl.constexpr = "ieee" if kv.dtype.element_ty == tl.float32 else "tf32"
    kv_head, sequence = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    dim, row, each = tl.arange(0, DIM), tl.arange(0, ROWS), tl.arange(0, TILE)
    in_head = dim < HEAD_DIM
    across = tl.where(dim < HALF, dim + HALF, dim - HALF)
    context = tl.load(positions + sequence).to(tl.int32)
    slot = tl.load(slots + sequence)
    table = block_tables + sequence.to(tl.int64) * table_stride
    # of positions behind the context too, whose blocks mean nothing
    column = each // BLOCK_SIZE
    block = tl.load(table + column, mask=column < width, other=0)
    q_weight, q_across, k_weight, k_across = dim, dim, dim, dim
    if NORM:
        q_weight = tl.load(q_norm + dim, mask=in_head, other=0)
        q_across = tl.load(q_norm + across, mask=in_head, other=0)
        k_weight = tl.load(k_norm + dim, mask=in_head, other=0)
        k_across = tl.load(k_norm + across, mask=in_head, other=0)
    if PDL:
        gdc_wait()
    source = qkv + sequence.to(tl.int64) * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    dtype = kv.dtype.element_ty
    one, member = tl.arange(0, 1), tl.arange(0, GROUP)
    head = kv_head * PER_HEAD + member % PER_HEAD
    q, q_other = _request_heads(source, head, dim, across, in_head, HEAD_DIM)
    k, k_other = _request_heads(source, HEADS + kv_head + one, dim, across, in_head, HEAD_DIM)
    value = tl.load(source + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + dim, mask=in_head, other=0)
    value = value.to(dtype)
    turn = context * HALF + dim % HALF
    own_cos = tl.load(cos + turn, mask=in_head, other=0)
    own_sin = tl.load(sin + turn, mask=in_head, other=0)
    own_sin = tl.where(dim < HALF, -own_sin, own_sin)
    q = _turn_heads(q, q_other, q_weight, q_across, own_cos, own_sin, eps, HEAD_DIM, NORM)
    k = _turn_heads(k, k_other, k_weight, k_across, own_cos, own_sin, eps, HEAD_DIM, NORM).to(dtype)
    # the scale and the logarithm's base, before the products
    q = (q.to(qkv.dtype.element_ty).to(tl.float32) * scale).to(dtype)
    # the new token: into the cache, unless the row is a padded one, which has slot -1; and the
    # first of the sum
    place = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = kv + place * HEAD_DIM + dim
    tl.store(target[None, :] + one[:, None], k, mask=in_head[None, :] & (slot >= 0))
    tl.store(target + half_stride, value, mask=in_head & (slot >= 0))
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    # a product needs 16 rows: they repeat the heads
    queries = _repeat(q, ROWS)
    top = tl.reshape(tl.broadcast_to(score[None, :], [ROWS // GROUP, GROUP]), [ROWS])
    total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.broadcast_to(value.to(tl.float32)[None, :], [ROWS, DIM])
    BLOCK: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    own = (kv_head * BLOCK_SIZE + each % BLOCK_SIZE) * HEAD_DIM
    for start in range(0, context, TILE):
        live = each < context - start
        # blocks come one tile ahead: else the compiler would not request several tiles at once
        column = (start + TILE + each) // BLOCK_SIZE
        if TILE % BLOCK_SIZE == 0:
            column = (start + TILE) // BLOCK_SIZE + each // BLOCK_SIZE
        behind = tl.load(table + column, mask=column < width, other=0)
        if TILE % BLOCK_SIZE != 0:
            own = (kv_head * BLOCK_SIZE + (start + each) % BLOCK_SIZE) * HEAD_DIM
        token = (block.to(tl.int64) if LARGE else block) * BLOCK + own
        cell = token[:, None] + dim[None, :]
        mask = live[:, None]
        if DIM != HEAD_DIM:
            mask = mask & in_head[None, :]
        keys = tl.load(kv + cell, mask=mask, other=0)
        values = tl.load(kv + half_stride + cell, mask=mask, other=0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tl.where(live[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(dtype), values, input_precision=PRECISION)
        top, block = new_top, behind
    target = out + (sequence * HEADS + kv_head * PER_HEAD + row)[:, None] * HEAD_DIM + dim[None, :]
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(target, result, mask=(row < PER_HEAD)[:, None] & in_head[None, :])


def whole_attention(
    shape: DecoderShape, layer: DecoderLayer, qkv: Tensor, turn: tuple[Tensor, Tensor],
    kv_layer: Tensor, batch: AttentionBatch, out: Tensor, dependent: bool = False,
) -> None:  # fmt: skip
    """out [T, heads * head_dim] for T sequences with one row each, as in `decode_attention`."""
    per_head = shape.num_heads // shape.num_kv_heads
    unused: Any = qkv
    tile = _tile(shape.head_dim, kv_layer.dtype)
    _attend_whole[(shape.num_kv_heads, len(qkv))](
        qkv, unused if layer.q_norm is None else layer.q_norm,
        unused if layer.k_norm is None else layer.k_norm, *turn, kv_layer, batch.positions,
        batch.slots, batch.block_tables, out,
        shape.eps, shape.attention_scale * LOG2_E, kv_layer.stride(0), batch.block_tables.stride(0),
        batch.block_tables.shape[1],
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim,
        DIM=max(16, triton.next_power_of_2(shape.head_dim)),
        ROWS=max(16, triton.next_power_of_2(per_head)), GROUP=triton.next_power_of_2(per_head),
        BLOCK_SIZE=batch.block_size, TILE=tile.positions,
        LARGE=kv_layer.shape[1] * kv_layer.stride(1) >= 1 << 31,
        NORM=layer.q_norm is not None, PDL=dependent,
        **({"launch_pdl": True} if dependent else {}),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
