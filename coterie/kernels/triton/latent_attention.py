"""Triton kernels for multi-head latent attention over a paged cache of one vector per token.

A token's cached vector is its latent (`rank` values, normed) and one rotated key that all heads
share. A head's queries are projected into the latent's space, so that a program reads each cached
vector once, for scores and for values. While decoding, the context is split over programs by a rule
that knows nothing of other sequences, and the splits are merged in order: a row's result does not
depend on the batch. Prompts have one program per tile of queries, with any prefix before them.

Twins: `reference.latent_attention`, `reference.write_latent`, `place_latent_torch`,
`decode_latent_torch`. PDL: see `gemv`. Import this module only where triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.reference import layers as reference
from coterie.kernels.triton.attention import sequence_of
from coterie.kernels.triton.whole_attention import LOG2_E

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch

# splits of a context of at most LONG tokens, and of a longer one
FEW, MOST, LONG = 16, 32, 2048
# splits that are merged at once
MERGED = 8
# up to this many rows the products with each head's matrices are part of the kernels
FUSED_ROWS = 8
# rows of a head's matrix in one program
_UP_ROWS = 64
_MERGE_ROWS = 16


@dataclass(frozen=True, slots=True)
class LatentShape:
    """`nope` and `rope`: dimensions of a head without and with rotary positions."""

    heads: int
    nope: int
    rope: int
    rank: int
    value: int
    # of the latent's norm
    eps: float
    attention_scale: float

    @property
    def head(self) -> int:
        """The size of a head's queries before their projection."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Values of a token in the cache."""
        return self.rank + self.rope


@triton.jit
def _place_latent(
    q, low, gain, cos, sin, key_up, positions, slots, kv, kept, wide,
    eps, q_stride, low_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr,
    WIDE_HEADS: tl.constexpr, WIDE_NOPE: tl.constexpr, WIDE_HALF: tl.constexpr,
    WIDE_RANK: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, UPS: tl.constexpr,
    KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (UPS + 1, rows); UPS: heads * TILES, or 0. The last program of a row: norm of the latent
    and rotation of the key, into the cache (and `kept`); rotation of the queries, in place. The
    others: a part of a head's queries in the latent's space, into `wide`."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    queries = q + row * q_stride
    if PDL:
        gdc_launch_dependents()
    if program < UPS:
        own, n = program // TILES, tl.arange(0, WIDE_NOPE)
        part = (program % TILES) * ROWS + tl.arange(0, ROWS)
        in_tile = (part < RANK)[:, None] & (n < NOPE)[None, :]
        at = key_up + (own * RANK + part)[:, None] * NOPE + n[None, :]
        tile = tl.load(at, mask=in_tile, other=0).to(tl.float32)
        if PDL:
            gdc_wait()
        x = tl.load(queries + own * (NOPE + ROPE) + n, mask=n < NOPE, other=0)
        y = tl.sum(tile * x.to(tl.float32)[None, :], 1)
        goal = wide + (row * HEADS + own) * RANK + part
        tl.store(goal, y.to(wide.dtype.element_ty), mask=part < RANK)
    else:
        position = tl.load(positions + row)
        half, column = tl.arange(0, WIDE_HALF), tl.arange(0, WIDE_RANK)
        in_half, inside = half < ROPE // 2, column < RANK
        c = tl.load(cos + position * (ROPE // 2) + half, mask=in_half, other=0)
        s = tl.load(sin + position * (ROPE // 2) + half, mask=in_half, other=0)
        weight = tl.load(gain + column, mask=inside, other=0).to(tl.float32)
        if PDL:
            gdc_wait()
        dtype = low.dtype.element_ty
        source = low + row * low_stride
        latent = tl.load(source + column, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        latent = ((latent * scale).to(dtype).to(tl.float32) * weight).to(dtype)
        first = tl.load(source + RANK + half, mask=in_half, other=0).to(tl.float32)
        second = tl.load(source + RANK + ROPE // 2 + half, mask=in_half, other=0).to(tl.float32)
        low_half, high_half = (first * c - second * s).to(dtype), (second * c + first * s).to(dtype)
        # a padded row has slot -1, and nothing is stored for it
        slot = tl.load(slots + row)
        token = kv + slot * (RANK + ROPE)
        cached = kv.dtype.element_ty
        tl.store(token + column, latent.to(cached), mask=inside & (slot >= 0))
        tl.store(token + RANK + half, low_half.to(cached), mask=in_half & (slot >= 0))
        place = token + RANK + ROPE // 2 + half
        tl.store(place, high_half.to(cached), mask=in_half & (slot >= 0))
        if KEEP:
            again = kept + row * (RANK + ROPE)
            tl.store(again + column, latent, mask=inside)
            tl.store(again + RANK + half, low_half, mask=in_half)
            tl.store(again + RANK + ROPE // 2 + half, high_half, mask=in_half)
        head = tl.arange(0, WIDE_HEADS)
        mask = (head < HEADS)[:, None] & in_half[None, :]
        place = queries + head[:, None] * (NOPE + ROPE) + NOPE + half[None, :]
        first = tl.load(place, mask=mask, other=0).to(tl.float32)
        second = tl.load(place + ROPE // 2, mask=mask, other=0).to(tl.float32)
        kind = q.dtype.element_ty
        tl.store(place, (first * c[None, :] - second * s[None, :]).to(kind), mask=mask)
        place += ROPE // 2
        tl.store(place, (second * c[None, :] + first * s[None, :]).to(kind), mask=mask)


@triton.jit
def _share(context, TILE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, LONG: tl.constexpr):
    """Tokens of a split: whole tiles, by the sequence's own context alone."""
    parts = tl.where(context > LONG, MOST, FEW)
    return tl.maximum(tl.cdiv(tl.cdiv(context, TILE), parts), 1) * TILE


@triton.jit
def _request_latents(
    kv, table, start, high, r, d, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Latents [TILE, rank] and keys [TILE, rope] of the positions start .. high - 1."""
    position = start + tl.arange(0, TILE)
    inside = position < high
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    token = kv + (block * BLOCK_SIZE + position % BLOCK_SIZE) * (RANK + ROPE)
    mask = inside[:, None] & (r < RANK)[None, :]
    cached = tl.load(token[:, None] + r[None, :], mask=mask, other=0)
    mask = inside[:, None] & (d < ROPE)[None, :]
    return cached, tl.load(token[:, None] + RANK + d[None, :], mask=mask, other=0)


@triton.jit
def _mix_latents(latents, keys, cached, key, seen, scale, top, total, mixed):
    """One more tile in an online softmax with base 2."""
    # exact products where the model is fp32; has no effect on 16-bit types
    PRECISION: tl.constexpr = "ieee" if latents.dtype == tl.float32 else "tf32"
    cached, key = cached.to(latents.dtype), key.to(latents.dtype)
    scores = tl.dot(latents, tl.trans(cached), input_precision=PRECISION)
    scores += tl.dot(keys, tl.trans(key), input_precision=PRECISION)
    scores = tl.where(seen, scores * scale, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weights.to(cached.dtype), cached, input_precision=PRECISION)
    return new_top, total, mixed


# counts change from step to step: specialising on them would compile while serving
@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def _attend_latent(
    wide, turned, kv, query_starts, context_lens, block_tables, out, partial, stats,
    scale, num_sequences, table_stride, wide_row, wide_head, turned_row, turned_head,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDE_RANK: tl.constexpr,
    WIDE_ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr,
    LONG: tl.constexpr, DECODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has QUERIES rows of one sequence with GROUP heads each. DECODE: one row, and one of
    the splits of its context; `partial` and `stats` get the sums that `_merge_latent` reads."""
    ROWS: tl.constexpr = QUERIES * GROUP
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    begin, first, count = tile, 0, 1
    sequence = tile
    if not DECODE:
        sequence = sequence_of(query_starts, tile, num_sequences, QUERIES)
        begin = tl.load(query_starts + sequence)
        count = tl.load(query_starts + sequence + 1) - begin
        first = (tile - begin // QUERIES - sequence) * QUERIES
    if first >= count:
        return
    context = tl.load(context_lens + sequence)
    before = context - count + first
    low, high = 0, before + tl.minimum(QUERIES, count - first)
    if DECODE:
        share = _share(context, TILE, FEW, MOST, LONG)
        low = split * share
        high = tl.minimum(low + share, context)
        if low >= high:
            return
    row, r, d = tl.arange(0, ROWS), tl.arange(0, WIDE_RANK), tl.arange(0, WIDE_ROPE)
    table = block_tables + sequence.to(tl.int64) * table_stride
    query, head = row // GROUP, group * GROUP + row % GROUP
    live = (head < HEADS) & (first + query < count)
    place = (begin + first + query).to(tl.int64)
    in_rank = r < RANK
    own = wide + place[:, None] * wide_row + head[:, None] * wide_head + r[None, :]
    latents = tl.load(own, mask=live[:, None] & in_rank[None, :], other=0)
    own = turned + place[:, None] * turned_row + head[:, None] * turned_head + d[None, :]
    keys = tl.load(own, mask=live[:, None] & (d < ROPE)[None, :], other=0)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE_RANK], tl.float32)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        cached, key = _request_latents(kv, table, start, high, r, d, RANK, ROPE, BLOCK_SIZE, TILE)
        seen = (position < high)[None, :] & (position[None, :] <= (before + query)[:, None])
        top, total, mixed = _mix_latents(latents, keys, cached, key, seen, scale, top, total, mixed)
    cell = live[:, None] & in_rank[None, :]
    if DECODE:
        part = (place * HEADS + head) * SPLITS + split
        tl.store(stats + part * 2, top, mask=live)
        tl.store(stats + part * 2 + 1, total, mask=live)
        tl.store(partial + part[:, None] * RANK + r[None, :], mixed, mask=cell)
    else:
        # a sequence that others compute has no context here: zeros, not 0 / 0
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + (place * HEADS + head)[:, None] * RANK + r[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=cell)


@triton.jit
def _merge_latent(
    partial, stats, context_lens, value_up, out,
    HEADS: tl.constexpr, RANK: tl.constexpr, WIDE_RANK: tl.constexpr, VALUE: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    MERGED: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, LONG: tl.constexpr,
    UP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads * TILES, rows). The mixed latent of a head from its splits, in order; with UP its
    product with some rows of the head's value matrix, else the latent itself (TILES 1)."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, r = program // TILES, tl.arange(0, WIDE_RANK)
    in_rank = r < RANK
    part = (program % TILES) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_launch_dependents()
    if UP:
        inside = (part < VALUE)[:, None] & in_rank[None, :]
        place = value_up + (head * VALUE + part)[:, None] * RANK + r[None, :]
        tile = tl.load(place, mask=inside, other=0)
    context = tl.load(context_lens + row)
    live = tl.cdiv(context, _share(context, TILE, FEW, MOST, LONG))
    if PDL:
        gdc_wait()
    first = (row * HEADS + head) * SPLITS
    each = tl.arange(0, MOST)
    tops = tl.load(stats + (first + each) * 2, mask=each < live, other=-1e30)
    top = tl.max(tops, 0)
    total = 0.0
    mixed = tl.zeros([WIDE_RANK], tl.float32)
    for start in range(0, live, MERGED):
        split = start + tl.arange(0, MERGED)
        used = split < live
        cell = first + split
        weight = tl.exp2(tl.load(stats + cell * 2, mask=used, other=-1e30) - top)
        weight = tl.where(used, weight, 0.0)
        total += tl.sum(weight * tl.load(stats + cell * 2 + 1, mask=used, other=0), 0)
        mask = used[:, None] & in_rank[None, :]
        sums = tl.load(partial + cell[:, None] * RANK + r[None, :], mask=mask, other=0)
        mixed += tl.sum(sums * weight[:, None], 0)
    # padded rows of a captured step have no context: their result is zeros, not 0 / 0
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    if UP:
        # as rounded as where torch computes the product
        mixed = mixed.to(out.dtype.element_ty).to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * mixed[None, :], 1)
        target = out + (row * HEADS + head) * VALUE + part
        tl.store(target, y.to(out.dtype.element_ty), mask=part < VALUE)
    else:
        target = out + (row * HEADS + head) * RANK + r
        tl.store(target, mixed.to(out.dtype.element_ty), mask=in_rank)


@triton.jit
def _write_latent(rows, kv, slots, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """A row [WIDTH] into its slot; one with slot -1 nowhere."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot = tl.load(slots + row)
    inside = column < WIDTH
    values = tl.load(rows + row * WIDTH + column, mask=inside, other=0)
    target = kv + slot * WIDTH + column
    tl.store(target, values.to(kv.dtype.element_ty), mask=inside & (slot >= 0))


def _launch(dependent: bool) -> dict[str, Any]:
    # the interpreter knows no launch options
    return {"PDL": dependent, **({"launch_pdl": True} if dependent else {})}


def _padded(size: int) -> int:
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def _group(heads: int, dtype: torch.dtype) -> int:
    """Heads of a program: a product needs 16 rows; exact fp32 products are unrolled into single
    multiply-adds, and larger ones would not compile."""
    padded = _padded(heads)
    return 16 if dtype == torch.float32 else min(64, padded)


def _tile(group: int, dtype: torch.dtype, decode: bool) -> int:
    """Tokens of the cache that a program has at once. Half as many while decoding, to request them
    before the wait, was slower: 17.5 against 14.5 us at 2,000 tokens."""
    if dtype == torch.float32:
        return 16
    return 64 if decode and group == 16 else 32


def write_latent(rows: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
    """Rows [T, rank + rope] into the cache; rows with slot -1 are padding."""
    width = rows.shape[1]
    padded = triton.next_power_of_2(width)
    _write_latent[(len(rows),)](rows.contiguous(), kv_layer, slots, WIDTH=width, PADDED=padded)


def place_latent(
    shape: LatentShape, q: Tensor, low: Tensor, gain: Tensor, turn: tuple[Tensor, Tensor],
    kv_layer: Tensor, batch: AttentionBatch, *, kept: Tensor | None = None,
    up: tuple[Tensor, Tensor] | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """Latents and keys of `low` [T, rank + rope] into the cache (and into `kept`, same shape); the
    rotated part of q [T, heads * (nope + rope)] is rotated in place. With `up`, the heads' matrices
    [heads, rank, nope] and room [T, heads, rank], also the queries in the latent's space."""
    key_up, wide = up or (q, q)
    tiles = triton.cdiv(shape.rank, _UP_ROWS)
    ups = shape.heads * tiles if up else 0
    _place_latent[(ups + 1, len(q))](
        q, low, gain, *turn, key_up, batch.positions, batch.slots, kv_layer,
        low if kept is None else kept, wide, shape.eps, q.stride(0), low.stride(0),
        HEADS=shape.heads, NOPE=shape.nope, ROPE=shape.rope, RANK=shape.rank,
        WIDE_HEADS=triton.next_power_of_2(shape.heads),
        WIDE_NOPE=triton.next_power_of_2(shape.nope),
        WIDE_HALF=triton.next_power_of_2(shape.rope // 2),
        WIDE_RANK=triton.next_power_of_2(shape.rank), ROWS=_UP_ROWS, TILES=tiles,
        UPS=ups, KEEP=kept is not None, **_launch(dependent), num_warps=4,
    )  # fmt: skip


def _attend(
    wide: Tensor, turned: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float,
    out: Tensor, partial: Tensor, stats: Tensor, *, splits: int, decode: bool,
    dependent: bool = False,
) -> None:  # fmt: skip
    rows, heads, rank = wide.shape
    rope = turned.shape[2]
    full, sequences = wide.dtype == torch.float32, len(batch.context_lens)
    group = _group(heads, wide.dtype)
    queries = 1 if decode else max(1, (16 if full else 64) // group)
    grid = (rows if decode else rows // queries + sequences, triton.cdiv(heads, group), splits)
    _attend_latent[grid](
        wide, turned, kv_layer, batch.query_starts, batch.context_lens, batch.block_tables,
        out, partial, stats, scale * LOG2_E, sequences, batch.block_tables.stride(0),
        wide.stride(0), wide.stride(1), turned.stride(0), turned.stride(1),
        HEADS=heads, RANK=rank, ROPE=rope, WIDE_RANK=_padded(rank), WIDE_ROPE=_padded(rope),
        BLOCK_SIZE=batch.block_size, QUERIES=queries, GROUP=group,
        TILE=_tile(group, wide.dtype, decode), SPLITS=splits, FEW=FEW, MOST=MOST,
        LONG=LONG, DECODE=decode, **_launch(dependent), num_warps=8, num_stages=2,
    )  # fmt: skip


def decode_latent(
    wide: Tensor, turned: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float,
    out: Tensor, value_up: Tensor | None = None, dependent: bool = False,
) -> None:  # fmt: skip
    """Attention of queries wide [T, heads, rank] and turned [T, heads, rope] of T sequences. out:
    the mixed latents [T, heads * rank]; with the heads' matrices [heads, value, rank] their
    products [T, heads * value]."""
    rows, heads, rank = wide.shape
    device = wide.device
    context = batch.block_tables.shape[1] * batch.block_size
    splits = FEW if context <= LONG else MOST
    partial = torch.empty((rows, heads, splits, rank), dtype=torch.float32, device=device)
    stats = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=device)
    _attend(
        wide, turned, kv_layer, batch, scale, out, partial, stats, splits=splits, decode=True,
        dependent=dependent,
    )  # fmt: skip
    value = rank if value_up is None else value_up.shape[1]
    each = 1 if value_up is None else _MERGE_ROWS
    tiles = 1 if value_up is None else triton.cdiv(value, each)
    _merge_latent[(heads * tiles, rows)](
        partial, stats, batch.context_lens, out if value_up is None else value_up, out,
        HEADS=heads, RANK=rank, WIDE_RANK=_padded(rank), VALUE=value, ROWS=each, TILES=tiles,
        TILE=_tile(_group(heads, wide.dtype), wide.dtype, True), SPLITS=splits, MERGED=MERGED,
        FEW=FEW, MOST=MOST, LONG=LONG, UP=value_up is not None, **_launch(dependent), num_warps=4,
    )  # fmt: skip


def latent_attention(
    wide: Tensor, turned: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """Causal attention of queries wide [T, heads, rank] and turned [T, heads, rope] over paged
    latents: [T, heads, rank]. Sums in fp32."""
    out = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    if len(wide) == len(batch.context_lens):
        decode_latent(wide, turned, kv_layer, batch, scale, out)
    else:
        _attend(wide, turned, kv_layer, batch, scale, out, out, out, splits=1, decode=False)
    return out


def place_latent_torch(
    shape: LatentShape, q: Tensor, low: Tensor, gain: Tensor, turn: tuple[Tensor, Tensor],
    kv_layer: Tensor, batch: AttentionBatch, key_up: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The plain twin of `place_latent`: (wide, turned), and the cache is written."""
    cos_sin = turn[0][batch.positions], turn[1][batch.positions]
    latent = reference.rms_norm(low[:, : shape.rank], gain, shape.eps)
    key = reference.rotary(low[:, None, shape.rank :], *cos_sin)[:, 0]
    reference.write_latent(torch.cat((latent, key), dim=-1), kv_layer, batch.slots)
    heads = q.view(len(q), shape.heads, shape.head)
    wide = torch.einsum("thn,hrn->thr", heads[..., : shape.nope], key_up)
    return wide, reference.rotary(heads[..., shape.nope :], *cos_sin)


def decode_latent_torch(
    wide: Tensor, turned: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float,
    value_up: Tensor,
) -> Tensor:  # fmt: skip
    """The plain twin of `decode_latent` with `value_up`."""
    mixed = reference.latent_attention(wide, turned, kv_layer, batch, scale)
    return torch.einsum("thr,hvr->thv", mixed, value_up).reshape(len(wide), -1)
