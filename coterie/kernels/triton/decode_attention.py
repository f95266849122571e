"""One Triton kernel for the attention of decoding rows: norm and rotation of the heads, the new
token's keys and values into the cache, attention split over the context, and the splits combined.

Computes the same as `place_heads` and `paged_attention`. A program has one split of one KV head of
one sequence; the last of a KV head to end combines them. The first tile of the cache holds only
earlier tokens: it is requested before the wait (PDL: see `gemv`). Of many rows each program has a
whole context: `whole_attention`.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.triton.patches import RANKS, SITE, request_columns, site_of
from coterie.kernels.triton.whole_attention import LOG2_E, whole_attention

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch, PatchRows
    from coterie.kernels.decoder import DecoderLayer, DecoderShape


@triton.jit
def _heads(
    source, head, weight, cos, sin, half, inside, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr
):
    """Rows of heads in two halves [rows, HALF], normed and rotated, in fp32."""
    place = source + head[:, None] * HEAD_DIM + half[None, :]
    first = tl.load(place, mask=inside[None, :], other=0).to(tl.float32)
    second = tl.load(place + HEAD_DIM // 2, mask=inside[None, :], other=0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = tl.load(weight + half, mask=inside, other=0).to(tl.float32)
        high = tl.load(weight + HEAD_DIM // 2 + half, mask=inside, other=0).to(tl.float32)
        first, second = first * scale * low[None, :], second * scale * high[None, :]
    turned = first * cos[None, :] - second * sin[None, :]
    return turned, second * cos[None, :] + first * sin[None, :]


@triton.jit
def _request_tile(
    kv, half_stride, table, kv_head, start, end, half, dim, in_half, in_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys in two halves and values of positions start .. end - 1, at most TILE of them."""
    position = start + tl.arange(0, TILE)
    live = position < end
    block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    token = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    place = kv + token[:, None] + half[None, :]
    mask = live[:, None] & in_half[None, :]
    first = tl.load(place, mask=mask, other=0)
    second = tl.load(place + HEAD_DIM // 2, mask=mask, other=0)
    place = kv + half_stride + token[:, None] + dim[None, :]
    return first, second, tl.load(place, mask=live[:, None] & in_head[None, :], other=0), live


@triton.jit
def _softmax_tile(q_first, q_second, first, second, values, live, top, total, mixed):
    """One more tile in an online softmax with base 2."""
    # exact products where the model is fp32; has no effect on 16-bit types
    PRECISION: tl.constexpr = "ieee" if q_first.dtype == tl.float32 else "tf32"
    scores = tl.dot(q_first, tl.trans(first), input_precision=PRECISION)
    scores += tl.dot(q_second, tl.trans(second), input_precision=PRECISION)
    scores = tl.where(live[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return new_top, total, mixed


@triton.jit(do_not_specialize=["site"])
def _decode_attention(
    qkv, q_norm, k_norm, cos, sin, kv, positions, slots, block_tables, partial, stats, counts, out,
    patches, pieces, eps, scale, half_stride, table_stride, sites, site,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, RANKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    PER_HEAD: tl.constexpr = HEADS // KV_HEADS
    split, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    position = tl.load(positions + sequence).to(tl.int32)
    share = tl.cdiv(tl.cdiv(position, SPLITS), TILE) * TILE
    low = split * share
    high = tl.minimum(low + share, position)
    half, dim, row = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, ROWS)
    in_half, in_head = half < HEAD_DIM // 2, dim < HEAD_DIM
    table = block_tables + sequence.to(tl.int64) * table_stride
    # fmt: off
    first, second, values, live = _request_tile(
        kv, half_stride, table, kv_head, low, high, half, dim, in_half, in_head,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE)
    turn = position * (HEAD_DIM // 2) + half
    own_cos = tl.load(cos + turn, mask=in_half, other=0)
    own_sin = tl.load(sin + turn, mask=in_half, other=0)
    if RANKS > 0:
        # o's patch: its columns of a that belong to these heads
        at = tl.arange(0, GROUP)
        own_site = patches + (sequence.to(tl.int64) * sites + site) * SITE
        inside = (at < PER_HEAD)[:, None] & in_head[None, :]
        column = (kv_head * PER_HEAD + at)[:, None] * HEAD_DIM + dim[None, :]
        down = request_columns(own_site, column, inside, HEADS * HEAD_DIM, RANKS)
    if PDL:
        gdc_wait()
    source = qkv + sequence.to(tl.int64) * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    # rows beyond the group repeat a head: a product needs 16 of them
    head = kv_head * PER_HEAD + row % PER_HEAD
    q_first, q_second = _heads(
        source, head, q_norm, own_cos, own_sin, half, in_half, eps, HEAD_DIM, NORM)
    dtype = kv.dtype.element_ty
    # the scale and the logarithm's base, before the products
    q_first = (q_first.to(qkv.dtype.element_ty).to(tl.float32) * scale).to(dtype)
    q_second = (q_second.to(qkv.dtype.element_ty).to(tl.float32) * scale).to(dtype)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    if low < high:
        top, total, mixed = _softmax_tile(
            q_first, q_second, first, second, values, live, top, total, mixed)
    for start in range(low + TILE, high, TILE):
        first, second, values, live = _request_tile(
            kv, half_stride, table, kv_head, start, high, half, dim, in_half, in_head,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE)
        top, total, mixed = _softmax_tile(
            q_first, q_second, first, second, values, live, top, total, mixed)
    # fmt: on
    if split == SPLITS - 1:
        # the new token: into the cache, and into the sum
        one = tl.arange(0, 1)
        # fmt: off
        k_first, k_second = _heads(source, HEADS + kv_head + one, k_norm, own_cos, own_sin, half,
                                   in_half, eps, HEAD_DIM, NORM)
        # fmt: on
        k_first, k_second = k_first.to(dtype), k_second.to(dtype)
        value = tl.load(source + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + dim, mask=in_head)
        # a padded row has slot -1, and nothing is stored for it
        slot = tl.load(slots + sequence)
        token = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        token = token * HEAD_DIM
        target = kv + token + half[None, :] + one[:, None]
        tl.store(target, k_first, mask=in_half[None, :] & (slot >= 0))
        tl.store(target + HEAD_DIM // 2, k_second, mask=in_half[None, :] & (slot >= 0))
        tl.store(kv + half_stride + token + dim, value.to(dtype), mask=in_head & (slot >= 0))
        score = tl.sum(q_first.to(tl.float32) * k_first.to(tl.float32), 1)
        score += tl.sum(q_second.to(tl.float32) * k_second.to(tl.float32), 1)
        new_top = tl.maximum(top, score)
        weight, shrink = tl.exp2(score - new_top), tl.exp2(top - new_top)
        total = total * shrink + weight
        added = tl.where(in_head, value, 0).to(dtype).to(tl.float32)
        mixed = mixed * shrink[:, None] + weight[:, None] * added[None, :]
        top = new_top
    place = (sequence * HEADS + head) * SPLITS + split
    own = row < PER_HEAD
    tl.store(stats + place * 2, top, mask=own)
    tl.store(stats + place * 2 + 1, total, mask=own)
    cell = own[:, None] & in_head[None, :]
    tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], mixed, mask=cell)
    tl.debug_barrier()
    before = tl.atomic_add(counts + sequence * KV_HEADS + kv_head, 1, sem="acq_rel")
    if before == SPLITS - 1:
        tl.store(counts + sequence * KV_HEADS + kv_head, 0)
        each, member = tl.arange(0, SPLITS), tl.arange(0, GROUP)
        used = member < PER_HEAD
        cells = (sequence * HEADS + kv_head * PER_HEAD + member)[:, None] * SPLITS + each[None, :]
        tops = tl.load(stats + cells * 2, mask=used[:, None], other=0, cache_modifier=".cg")
        totals = tl.load(stats + cells * 2 + 1, mask=used[:, None], other=1, cache_modifier=".cg")
        parts = tl.load(
            partial + cells[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=used[:, None, None] & in_head[None, None, :],
            other=0,
            cache_modifier=".cg",
        )
        shares = tl.exp2(tops - tl.max(tops, 1)[:, None])
        shares = shares / tl.sum(totals * shares, 1)[:, None]
        result = tl.sum(parts * shares[:, :, None], 1)
        if RANKS > 0:
            made = down.to(tl.float32) * result.to(out.dtype.element_ty).to(tl.float32)[:, None, :]
            made_at = pieces + (sequence * KV_HEADS + kv_head) * RANKS + tl.arange(0, RANKS)
            tl.store(made_at, tl.sum(tl.sum(made, 2), 0))
        row_of = (sequence * HEADS + kv_head * PER_HEAD + member)[:, None] * HEAD_DIM
        tl.store(
            out + row_of + dim[None, :],
            result.to(out.dtype.element_ty),
            mask=used[:, None] & in_head[None, :],
        )


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """What splits write for the last program."""

    partial: Tensor
    stats: Tensor
    # zeros before and after a call
    counts: Tensor

    @classmethod
    def empty(
        cls,
        rows: int,
        shape: DecoderShape,
        splits: int,
        device: torch.device,
        counts: Tensor | None = None,
    ) -> AttentionScratch:
        """`counts`: zeros, at least one for each KV head of each row."""
        cells = rows * shape.num_heads * splits
        if counts is None:
            counts = torch.zeros(rows * shape.num_kv_heads, dtype=torch.int32, device=device)
        return cls(
            torch.empty(cells * shape.head_dim, dtype=torch.float32, device=device),
            torch.empty(cells * 2, dtype=torch.float32, device=device),
            counts,
        )


class AttentionPatch(NamedTuple):
    """What o's patches need of attention: with few ranks each, in bf16."""

    rows: PatchRows
    layer: int
    # fp32 [T * kv_heads, 1, RANKS], written: the pieces of x a^T
    pieces: Tensor


def decode_attention(
    shape: DecoderShape, layer: DecoderLayer, qkv: Tensor, turn: tuple[Tensor, Tensor],
    kv_layer: Tensor, batch: AttentionBatch, scratch: AttentionScratch, splits: int, out: Tensor,
    dependent: bool = False, patch: AttentionPatch | None = None,
) -> None:  # fmt: skip
    """out [T, heads * head_dim] for T sequences with one row each; qkv has its bias already. Norms
    over all heads at once are not supported. The results of padded rows mean nothing."""
    per_head = shape.num_heads // shape.num_kv_heads
    if splits == 1 and patch is None:
        whole_attention(shape, layer, qkv, turn, kv_layer, batch, out, dependent)
        return
    unused: Any = qkv
    _decode_attention[(splits, shape.num_kv_heads, len(qkv))](
        qkv, unused if layer.q_norm is None else layer.q_norm,
        unused if layer.k_norm is None else layer.k_norm, *turn, kv_layer, batch.positions,
        batch.slots, batch.block_tables, scratch.partial, scratch.stats, scratch.counts, out,
        unused if patch is None else patch.rows.table, unused if patch is None else patch.pieces,
        shape.eps, shape.attention_scale * LOG2_E, kv_layer.stride(0), batch.block_tables.stride(0),
        0 if patch is None else patch.rows.table.shape[1],
        0 if patch is None else site_of(patch.layer, "o"),
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim,
        HALF=max(16, triton.next_power_of_2(shape.head_dim // 2)),
        DIM=max(16, triton.next_power_of_2(shape.head_dim)),
        ROWS=max(16, triton.next_power_of_2(per_head)), GROUP=triton.next_power_of_2(per_head),
        BLOCK_SIZE=batch.block_size, SPLITS=splits, TILE=64,
        NORM=layer.q_norm is not None,
        RANKS=0 if patch is None else RANKS, PDL=dependent,
        **({"launch_pdl": True} if dependent else {}),
        num_warps=4 if shape.head_dim <= 64 else 8, num_stages=2,
    )  # fmt: skip
