"""Triton paged attention: decode with the context split over programs, and prefill with a prefix.

Computes the same as `reference.paged_attention`. One program has all query heads that share a KV
head, so K and V are read once per group. The number of splits depends on the number of sequences:
results are the same from run to run, but not bitwise equal for different batch sizes. Import this
module only where triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.batch import AttentionBatch

# The number of programs for a decode step: two for each multiprocessor of a large device.
_PROGRAMS, _MAX_SPLITS = 264, 64
# sequences that a program of `prompt_tiles` looks at together
_SEARCHED = 512


class PromptSize(NamedTuple):
    """Rows of a program (queries times the heads that share a KV head), positions of a tile, warps
    and stages."""

    rows: int
    tile: int
    warps: int
    stages: int


# 16-bit types; heads of up to 128 elements, and wider ones. Measured on an H200 with 64 prompts of
# 128 tokens, 16 heads of 128, us: rows / tile / warps / stages 64/32/4/3 48, 64/64/4/2 60,
# 128/64/8/3 67
_PROMPTS, _WIDE_PROMPTS = PromptSize(64, 32, 4, 3), PromptSize(64, 32, 4, 2)
# exact fp32 products are unrolled into single multiply-adds: large tiles would not compile
_FULL_PROMPTS = PromptSize(16, 32, 4, 2)


@triton.jit
def sequence_of(query_starts, tile, num_sequences, QUERIES: tl.constexpr):
    """Sequence s owns the tiles from query_starts[s] // QUERIES + s on; find tile's owner: many
    sequences with one load, as each load that waits for another one takes longer than all this."""
    EACH: tl.constexpr = 256
    found = 0
    for first in range(0, num_sequences, EACH):
        index = first + tl.arange(0, EACH)
        starts = tl.load(query_starts + index, mask=index < num_sequences, other=2147483647)
        begun = (starts // QUERIES <= tile - index) & (index < num_sequences)
        found += tl.sum(begun.to(tl.int32), 0)
    return found - 1


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
    place = low + tl.arange(0, TILE)
    block = tl.load(table + place // BLOCK_SIZE, mask=place < high, other=0)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < high
        # blocks come one tile ahead: else the compiler would not request several tiles at once
        place = position + TILE
        behind = tl.load(table + place // BLOCK_SIZE, mask=place < high, other=0)
        token = (
            (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        ) * HEAD_DIM
        live = inside[:, None] & in_head[None, :]
        cell = kv + token[:, None] + dim[None, :]
        keys = tl.load(cell, mask=live, other=0).to(queries.dtype)
        values = tl.load(cell + half_stride, mask=live, other=0).to(queries.dtype)
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
        top, block = new_top, behind
    return top, total, mixed


@triton.jit(do_not_specialize=["num_sequences"])
def _prompt_tiles(
    query_starts, context_lens, tiles, num_sequences, QUERIES: tl.constexpr, EACH: tl.constexpr
):
    """One program per tile: its sequence, first row, number of queries, and the position of the
    first; tiles behind the last have no queries."""
    tile = tl.program_id(0)
    sequence, before, tiles_before = 0, 0, 0
    for first in range(0, num_sequences, EACH):
        index = first + tl.arange(0, EACH)
        inside = index < num_sequences
        start = tl.load(query_starts + index, mask=inside, other=0)
        count = tl.load(query_starts + index + 1, mask=inside, other=0) - start
        count = tl.cdiv(count, QUERIES)
        last = tiles_before + tl.cumsum(count, 0)
        passed = inside & (last <= tile)
        sequence += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, last, 0), 0))
        tiles_before += tl.sum(count, 0)
    live = sequence < num_sequences
    begin = tl.load(query_starts + sequence, mask=live, other=0)
    count = tl.load(query_starts + sequence + 1, mask=live, other=0) - begin
    first = (tile - before) * QUERIES
    position = tl.load(context_lens + sequence, mask=live, other=0) - count + first
    target = tiles + tile * 4
    tl.store(target, sequence)
    tl.store(target + 1, begin + first)
    tl.store(target + 2, tl.where(live, tl.minimum(QUERIES, count - first), 0))
    tl.store(target + 3, position)


# counts change from step to step: specialising on them would compile while serving
@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    out,
    partial,
    stats,
    q,
    kv,
    query_starts,
    context_lens,
    block_tables,
    tiles,
    scale,
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
    # the first row, the number of queries, and the position of the first one
    if DECODE:
        sequence = tile
        begin = tl.load(query_starts + sequence)
        count = tl.load(query_starts + sequence + 1) - begin
        before = tl.load(context_lens + sequence) - count
    else:
        sequence = tl.load(tiles + tile * 4)
        begin = tl.load(tiles + tile * 4 + 1)
        count = tl.load(tiles + tile * 4 + 2)
        before = tl.load(tiles + tile * 4 + 3)
    if count <= 0:
        return
    visible = before + count

    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    query = row // GROUP
    live = (row < QUERIES * GROUP) & (query < count)
    place = (begin + query).to(tl.int64) * HEADS + kv_head * GROUP + row % GROUP
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


def _prompt_size(dtype: torch.dtype, head_dim: int) -> PromptSize:
    if dtype == torch.float32:
        return _FULL_PROMPTS
    return _PROMPTS if head_dim <= 128 else _WIDE_PROMPTS


def _queries(size: PromptSize, group: int) -> int:
    return max(1, size.rows // (1 << (group - 1).bit_length()))


def prompt_tiles(
    batch: AttentionBatch, rows: int, group: int, head_dim: int, dtype: torch.dtype
) -> Tensor:
    """What the programs of `paged_attention` do for the batch's first rows, int32 [tiles, 4]: the
    same in all layers of a step. `group`: query heads of a KV head."""
    sequences = len(batch.context_lens)
    queries = _queries(_prompt_size(dtype, head_dim), group)
    count = rows // queries + sequences
    tiles = torch.empty((count, 4), dtype=torch.int32, device=batch.positions.device)
    _prompt_tiles[(count,)](
        batch.query_starts, batch.context_lens, tiles, sequences, QUERIES=queries, EACH=_SEARCHED
    )
    return tiles


def paged_attention(
    q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float, tiles: Tensor | None = None
) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over paged K and V (contiguous); sums in fp32.
    `tiles`: from `prompt_tiles`, which runs here if they are not given."""
    rows, heads, head_dim = q.shape
    sequences, kv_heads = len(batch.context_lens), kv_layer.shape[2]
    group = heads // kv_heads
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    decode = rows == sequences
    size = _prompt_size(q.dtype, head_dim)
    if decode:
        size, tiles = PromptSize(1, min(size.tile, 64), 4, 2), batch.query_starts
    elif tiles is None:
        tiles = prompt_tiles(batch, rows, group, head_dim, q.dtype)
    queries = _queries(size, group)
    positions = batch.block_tables.shape[1] * batch.block_size
    splits = _splits(sequences * kv_heads, positions, size.tile) if decode else 1
    shape: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "SPLITS": splits,
    }
    partial, stats = out, out
    if splits > 1:
        partial = torch.empty((rows, heads, splits, head_dim), device=q.device)
        stats = torch.empty((rows, heads, splits, 2), device=q.device)
    _attend[(rows if decode else len(tiles), kv_heads, splits)](
        out,
        partial,
        stats,
        q,
        kv_layer,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        tiles,
        scale,
        batch.block_tables.stride(0),
        kv_layer.stride(0),
        HEADS=heads,
        GROUP=group,
        BLOCK_SIZE=batch.block_size,
        QUERIES=queries,
        ROWS=max(16, triton.next_power_of_2(queries * group)),
        TILE=size.tile,
        DECODE=decode,
        num_warps=size.warps,
        num_stages=size.stages,
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
