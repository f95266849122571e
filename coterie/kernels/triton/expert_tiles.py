"""Triton kernels for the experts of a batch of decoding rows: one program per (expert, tile of its
output rows), so that an expert's weights are read once however many rows are routed to it.

`find_pairs` sorts the pairs (row, chosen expert) by expert with one kernel. Weights are on the M
side of the products, the pairs' rows on the N side, a few at a time. `combine` adds the outputs in
the order of the top-k, so that a row's result does not depend on other rows. Records:
`device_record`; an id outside the experts means no expert. PDL: see `gemv`.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.triton.expert_gemv import ExpertPool, RoutedRows
from coterie.kernels.triton.unpack import (
    FIRST_BLOCK,
    block_values,
    in_order,
    nibble,
    request_blocks,
    scale_and_minimum,
)


# counts change from step to step: specialising on them would compile while serving
@triton.jit(do_not_specialize=["pairs"])
def _find_pairs(ids, row_pairs, spans, pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One program per expert: its pairs behind those of the experts before it, in their order."""
    if PDL:
        gdc_launch_dependents()
    me = tl.program_id(0)
    before = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1)
        before += ((own >= 0) & (own < me)).to(tl.int32)
    first = tl.sum(before, 0)
    found = 0
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        hit = tl.load(ids + pair, mask=pair < pairs, other=-1) == me
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(row_pairs + first + found + rank - 1, pair, mask=hit)
        found += tl.sum(hit.to(tl.int32), 0)
    tl.store(spans + 2 * me, first)
    tl.store(spans + 2 * me + 1, found)


@triton.jit
def _int4_value(words, scale, minimum, j: tl.constexpr):
    return nibble(words, j) * (scale * (1.0 / 16 ** (j % 4))) + minimum


@triton.jit
def _int4_values(words, pairs, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, 32 * GROUPS] fp32 from words [ROWS, 4 * GROUPS] and scales [ROWS, GROUPS]."""
    words = tl.reshape(words, [ROWS, GROUPS, 4])
    scale, minimum = scale_and_minimum(pairs)
    scale, minimum = scale[:, :, None], minimum[:, :, None]
    return in_order(
        _int4_value(words, scale, minimum, 0), _int4_value(words, scale, minimum, 1),
        _int4_value(words, scale, minimum, 2), _int4_value(words, scale, minimum, 3),
        _int4_value(words, scale, minimum, 4), _int4_value(words, scale, minimum, 5),
        _int4_value(words, scale, minimum, 6), _int4_value(words, scale, minimum, 7),
        ROWS, GROUPS,
    )  # fmt: skip


@triton.jit
def weight_tile(
    weight, scales, row, live, k0,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Columns k0 to k0 + COLUMNS of rows of a matrix: fp32 where it is quantised."""
    GROUPS: tl.constexpr = COLUMNS // 32
    if KIND >= FIRST_BLOCK:
        words, own = request_blocks(weight, row, live, k0 // 8, COLUMNS // 8, WIDTH, KIND, False)
        return block_values(words, own, BLOCK, GROUPS, KIND)
    elif KIND == 0:
        column = k0 + tl.arange(0, COLUMNS)
        inside = live[:, None] & (column < WIDTH)[None, :]
        return tl.load(weight + row[:, None] * WIDTH + column[None, :], mask=inside, other=0)
    else:
        group = k0 // 32 + tl.arange(0, GROUPS)
        inside = live[:, None] & (group < WIDTH // 32)[None, :]
        place = row[:, None] * (WIDTH // 32) + group[None, :]
        own_scales = tl.load(scales + place, mask=inside, other=0)
        if KIND == 2:
            word = k0 // 8 + tl.arange(0, COLUMNS // 8)
            inside = live[:, None] & (word < WIDTH // 8)[None, :]
            words = tl.load(weight + row[:, None] * (WIDTH // 8) + word[None, :], inside, other=0)
            return _int4_values(words, own_scales, BLOCK, GROUPS)
        else:
            column = k0 + tl.arange(0, COLUMNS)
            inside = live[:, None] & (column < WIDTH)[None, :]
            tile = tl.load(weight + row[:, None] * WIDTH + column[None, :], mask=inside, other=0)
            wide = tl.reshape(tile.to(tl.float32), [BLOCK, GROUPS, 32])
            return tl.reshape(wide * own_scales.to(tl.float32)[:, :, None], [BLOCK, COLUMNS])


@triton.jit
def _tile_gate_up(
    x, row_pairs, spans, places, pool, pool_scales, out,
    SCALES_AT: tl.constexpr, UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr,
    TOP_K: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = silu(gate) * up of x[pair // TOP_K]. Grid: (tiles of INNER, experts)."""
    expert = tl.program_id(1)
    if PDL:
        gdc_wait()
        # only now: `down` reads the pairs before it waits
        gdc_launch_dependents()
    own = row_pairs + tl.load(spans + 2 * expert)
    total = tl.load(spans + 2 * expert + 1)
    place = tl.load(places + expert)
    weight = pool + place * UNIT
    scales = pool_scales + (place * SCALE_UNIT + SCALES_AT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < INNER
    k = tl.arange(0, COLUMNS)
    for begin in range(0, total, COUNT):
        rank = begin + tl.arange(0, COUNT)
        used = rank < total
        pairs = tl.load(own + rank, mask=used, other=0)
        source = x + (pairs // TOP_K).to(tl.int64)[None, :] * WIDTH
        gate = tl.zeros([BLOCK, COUNT], tl.float32)
        up = tl.zeros([BLOCK, COUNT], tl.float32)
        for k0 in range(0, WIDTH, COLUMNS):
            column = k0 + k
            rows = tl.load(
                source + column[:, None], mask=used[None, :] & (column < WIDTH)[:, None], other=0
            )
            tile = weight_tile(weight, scales, row, live, k0, WIDTH, BLOCK, COLUMNS, KIND)
            gate = tl.dot(tile.to(rows.dtype), rows, gate, input_precision="ieee")
            tile = weight_tile(weight, scales, row + INNER, live, k0, WIDTH, BLOCK, COLUMNS, KIND)
            up = tl.dot(tile.to(rows.dtype), rows, up, input_precision="ieee")
        acts = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
        target = out + pairs.to(tl.int64)[None, :] * INNER + row[:, None]
        tl.store(target, acts, mask=used[None, :] & live[:, None])


@triton.jit
def _tile_down(
    acts, row_pairs, spans, places, pool, pool_scales, out,
    DOWN_AT: tl.constexpr, SCALES_AT: tl.constexpr, UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr,
    INNER: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair] = down of acts[pair]. Grid: (tiles of WIDTH, experts)."""
    expert = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    own = row_pairs + tl.load(spans + 2 * expert, cache_modifier=".cg")
    total = tl.load(spans + 2 * expert + 1, cache_modifier=".cg")
    place = tl.load(places + expert)
    weight = pool + (place * UNIT + DOWN_AT)
    scales = pool_scales + (place * SCALE_UNIT + SCALES_AT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < WIDTH
    k = tl.arange(0, COLUMNS)
    if PDL:
        gdc_wait()
    for begin in range(0, total, COUNT):
        rank = begin + tl.arange(0, COUNT)
        used = rank < total
        pairs = tl.load(own + rank, mask=used, other=0)
        source = acts + pairs.to(tl.int64)[None, :] * INNER
        y = tl.zeros([BLOCK, COUNT], tl.float32)
        for k0 in range(0, INNER, COLUMNS):
            column = k0 + k
            rows = tl.load(
                source + column[:, None], mask=used[None, :] & (column < INNER)[:, None], other=0
            )
            tile = weight_tile(weight, scales, row, live, k0, INNER, BLOCK, COLUMNS, KIND)
            y = tl.dot(tile.to(rows.dtype), rows, y, input_precision="ieee")
        target = out + pairs.to(tl.int64)[None, :] * WIDTH + row[:, None]
        tl.store(target, y.to(out.dtype.element_ty), mask=used[None, :] & live[:, None])


@triton.jit
def _combine(
    values, ids, pair_rows, weights, hidden, gain, normed, eps,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SORTED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[t] += sum over k of weights[t, k] * values of that pair, in the order of k. With NORM
    a program has a whole row, and normed = rms_norm(hidden) * gain, as `layers.add_norm` has it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PADDED + tl.arange(0, PADDED)
    inside = column < WIDTH
    total = tl.load(hidden + t * WIDTH + column, mask=inside, other=0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        pair = t * TOP_K + k
        expert = tl.load(ids + pair)
        found = (expert >= 0) & (expert < EXPERTS)
        row = tl.load(pair_rows + pair).to(tl.int64) if SORTED else pair
        value = tl.load(values + row * WIDTH + column, mask=inside & found, other=0)
        total += tl.load(weights + pair) * value.to(tl.float32)
    result = total.to(hidden.dtype.element_ty)
    tl.store(hidden + t * WIDTH + column, result, mask=inside)
    if NORM:
        wide = result.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        scaled = (wide * scale).to(result.dtype).to(tl.float32)
        scaled *= tl.load(gain + column, mask=inside, other=0)
        tl.store(normed + t * WIDTH + column, scaled.to(result.dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class TileSize:
    """Of a program: output rows, columns at a time, stages of the pipeline, warps."""

    block: int
    columns: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class TileSizes:
    """`count`: pairs at a time, on the N side of the products."""

    count: int
    gate_up: TileSize
    down: TileSize


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs in the order of their experts: `row_pairs` int32 [rows], and of every expert its first
    row and its number of pairs, int32 [E, 2]."""

    row_pairs: Tensor
    spans: Tensor


def find_pairs(ids: Tensor, order: SortedPairs, dependent: bool = False) -> None:
    """Sort the pairs of ids [T, K] with one kernel: for batches, not for prompts. `dependent`: the
    next kernel is launched early; this one is not."""
    pairs = ids.numel()
    chunk = min(2048, triton.next_power_of_2(pairs))
    _find_pairs[(len(order.spans),)](
        ids, order.row_pairs, order.spans, pairs, CHUNK=chunk, PDL=dependent, num_warps=4
    )


def launch(dependent: bool) -> dict[str, Any]:
    return {"PDL": dependent, **({"launch_pdl": True} if dependent else {})}


def _arguments(pool: ExpertPool, count: int, size: TileSize, columns: int) -> dict[str, Any]:
    return {
        "COUNT": count,
        "BLOCK": size.block,
        "COLUMNS": min(size.columns, max(32, triton.next_power_of_2(columns))),
        **pool.views()[2],
        "num_warps": size.warps,
        "num_stages": size.stages,
    }


def tile_gate_up(
    x: Tensor, top_k: int, order: SortedPairs, pool: ExpertPool, out: Tensor, sizes: TileSizes,
    dependent: bool = False,
) -> None:  # fmt: skip
    """out [T * K, I] = silu(gate) * up, of x [T, D] that is normed."""
    matrices, scales, _ = pool.views()
    record = pool.record
    grid = (triton.cdiv(record.intermediate, sizes.gate_up.block), len(pool.places))
    _tile_gate_up[grid](
        x, order.row_pairs, order.spans, pool.places, matrices, scales, out,
        SCALES_AT=pool.at(record.gate_up_scales_at, scales=True), TOP_K=top_k,
        **_arguments(pool, sizes.count, sizes.gate_up, record.hidden), **launch(dependent),
    )  # fmt: skip


def tile_down(
    acts: Tensor, order: SortedPairs, pool: ExpertPool, out: Tensor, sizes: TileSizes,
    dependent: bool = False,
) -> None:  # fmt: skip
    """out [T * K, D] = down of acts [T * K, I]."""
    matrices, scales, _ = pool.views()
    record = pool.record
    grid = (triton.cdiv(record.hidden, sizes.down.block), len(pool.places))
    _tile_down[grid](
        acts, order.row_pairs, order.spans, pool.places, matrices, scales, out,
        DOWN_AT=pool.at(record.down_at), SCALES_AT=pool.at(record.down_scales_at, scales=True),
        **_arguments(pool, sizes.count, sizes.down, record.intermediate), **launch(dependent),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMS norm of rows: its weight, its eps, and where the result goes."""

    weight: Tensor
    eps: float
    out: Tensor


def combine(
    values: Tensor, routed: RoutedRows, experts: int, hidden: Tensor,
    pair_rows: Tensor | None = None, dependent: bool = False, norm: RowNorm | None = None,
) -> None:  # fmt: skip
    """hidden [T, D] += the weighted sum of each row's values: value of pair p is row p of `values`,
    or row pair_rows[p]. Then the norm of hidden, if given."""
    rows, width = hidden.shape
    padded = triton.next_power_of_2(width)
    if norm is None:
        padded = min(2048, padded)
    unused: Any = hidden
    _combine[(rows, triton.cdiv(width, padded))](
        values, routed.ids, routed.ids if pair_rows is None else pair_rows, routed.weights, hidden,
        unused if norm is None else norm.weight, unused if norm is None else norm.out,
        0.0 if norm is None else norm.eps,
        EXPERTS=experts, TOP_K=routed.ids.shape[1], WIDTH=width, PADDED=padded,
        SORTED=pair_rows is not None, NORM=norm is not None, **launch(dependent),
        num_warps=8 if padded > 2048 else 4,
    )  # fmt: skip
