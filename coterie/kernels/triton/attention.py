"""Triton paged attention: decode with the context split over programs, and prefill with a prefix.

Computes the same as `reference.paged_attention`. One program has all query heads that share a KV
head, so K and V are read once per group. The number of splits depends on the number of sequences:
results are the same from run to run, but not bitwise equal for different batch sizes. Import this
module only where triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.batch import AttentionBatch

# The number of programs for a decode step: two for each multiprocessor of a large device.
_PROGRAMS, _MAX_SPLITS = 264, 64


@triton.jit
def sequence_of(query_starts, tile, num_sequences, QUERIES: tl.constexpr):
    """Sequence s owns the tiles from query_starts[s] // QUERIES + s on; find tile's owner."""
    left = 0
    right = num_sequences
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _mix(
    queries,
    kv,
    half_stride,
    table,
    kv_head,
    last_seen,
    low,
    high,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Positions low .. high-1 through an online softmax: per row its maximum, sum and mix."""
    ROWS: tl.constexpr = queries.shape[0]
    DIM: tl.constexpr = queries.shape[1]
    # exact products where the model is fp32; has no effect on 16-bit types
    PRECISION: tl.constexpr = "ieee" if queries.dtype == tl.float32 else "tf32"
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD_DIM
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < high
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        token = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        live = inside[:, None] & in_head[None, :]
        place = kv + token[:, None] + dim[None, :]
        keys = tl.load(place, mask=live, other=0).to(queries.dtype)
        values = tl.load(place + half_stride, mask=live, other=0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = inside[None, :] & (position[None, :] <= last_seen[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # a row without any position yet has -inf; using 0 instead avoids inf - inf
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(top - anchor)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(queries.dtype), values, input_precision=PRECISION)
        top = new_top
    return top, total, mixed


# counts change from step to step: specialising on them would compile while serving
@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _attend(
    out,
    partial,
    stats,
    q,
    kv,
    query_starts,
    context_lens,
    block_tables,
    scale,
    num_sequences,
    table_stride,
    half_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DECODE: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tile if DECODE else sequence_of(query_starts, tile, num_sequences, QUERIES)
    begin = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - begin
    first = 0 if DECODE else (tile - begin // QUERIES - sequence) * QUERIES
    if first >= count:
        return
    # position of this tile's first query, and past its last one
    before = tl.load(context_lens + sequence) - count + first
    visible = before + tl.minimum(QUERIES, count - first)

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    query = row // GROUP
    live = (row < QUERIES * GROUP) & (first + query < count)
    place = (begin + first + query).to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
    cell, inside = place[:, None] * HEAD_DIM + dim[None, :], live[:, None] & (dim < HEAD_DIM)
    queries = tl.load(q + cell, mask=inside, other=0)
    share = tl.cdiv(tl.cdiv(visible, TILE), SPLITS) * TILE
    low, high = split * share, tl.minimum(visible, (split + 1) * share)
    table, KV_HEADS = block_tables + sequence * table_stride, HEADS // GROUP
    # fmt: off
    top, total, mixed = _mix(queries, kv, half_stride, table, kv_head, before + query, low, high,
                             scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE)
    # fmt: on
    if SPLITS == 1:
        # padded rows of a captured step have no context: their result is zeros, not 0 / 0
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + cell, mixed.to(out.dtype.element_ty), mask=inside)
    else:
        part = place * SPLITS + split
        tl.store(partial + part[:, None] * HEAD_DIM + dim[None, :], mixed, mask=inside)
        tl.store(stats + part * 2, top, mask=live)
        tl.store(stats + part * 2 + 1, total, mask=live)


@triton.jit
def _combine(
    out,
    partial,
    stats,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per (row, head): joins the splits by their maxima and sums."""
    place = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    part = place * SPLITS + split
    top = tl.load(stats + part * 2)
    best = tl.max(top, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp(top - best)
    total = tl.sum(weight * tl.load(stats + part * 2 + 1), 0)
    mixed = tl.load(
        partial + part[:, None] * HEAD_DIM + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0
    )
    mixed = tl.sum(mixed * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def paged_attention(q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over paged K and V (contiguous); sums in fp32."""
    rows, heads, head_dim = q.shape
    sequences, kv_heads = len(batch.context_lens), kv_layer.shape[2]
    group = heads // kv_heads
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    decode = rows == sequences
    # exact fp32 products are unrolled into single multiply-adds: large tiles would not compile
    full = q.dtype == torch.float32
    tile = 64 if head_dim <= 128 and not full else 32
    queries = 1 if decode else max(1, (16 if full else 64) // triton.next_power_of_2(group))
    positions = batch.block_tables.shape[1] * batch.block_size
    splits = _splits(sequences * kv_heads, positions, tile) if decode else 1
    shape: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "SPLITS": splits,
    }
    partial, stats = out, out
    if splits > 1:
        partial = torch.empty((rows, heads, splits, head_dim), device=q.device)
        stats = torch.empty((rows, heads, splits, 2), device=q.device)
    grid = (rows if decode else rows // queries + sequences, kv_heads, splits)
    _attend[grid](
        out,
        partial,
        stats,
        q,
        kv_layer,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        scale,
        sequences,
        batch.block_tables.stride(0),
        kv_layer.stride(0),
        HEADS=heads,
        GROUP=group,
        BLOCK_SIZE=batch.block_size,
        QUERIES=queries,
        ROWS=max(16, triton.next_power_of_2(queries * group)),
        TILE=tile,
        DECODE=decode,
        num_warps=4,
        num_stages=2,
        **shape,
    )
    if splits > 1:
        _combine[(rows * heads,)](out, partial, stats, num_warps=1, **shape)
    return out


def _splits(programs: int, positions: int, tile: int) -> int:
    """A power of four (each needs a compilation) that fills the device, if there are tiles."""
    wanted = min(_PROGRAMS // programs, -(-positions // tile), _MAX_SPLITS)
    splits = 1
    while splits < wanted:
        splits *= 4
    return splits
