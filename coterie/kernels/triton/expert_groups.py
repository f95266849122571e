"""Triton kernels for the experts of many rows: pairs (row, chosen expert) are sorted by expert on
the device, and one product per expert covers all its rows.

Kernels: a counting sort (count, place experts, place pairs: no order of arrival in it, so that it
gives the same order each time), a copy of the rows in that order with every expert padded to whole
tiles (or halves of them), `gate_up` with SwiGLU, `down`, and `combine`. The two products have one
program per SM and read through tensor descriptors (TMA) where the experts lie in slots of equal
size; otherwise by pointers, from wherever their places lead. Quantised experts that are used are
widened into a workspace first. All start in order: with early starts they took 2 to 4% longer.

`run_experts_many` chooses between these kernels and those of `expert_tiles` and `expert_int4`.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import repeat
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord
from coterie.kernels.size_table import expert_shape, tuned
from coterie.kernels.triton.expert_gemv import ExpertPool, RoutedRows
from coterie.kernels.triton.expert_int4 import Int4Size, Int4Sizes, int4_down, int4_gate_up
from coterie.kernels.triton.expert_tiles import (
    RowNorm,
    SortedPairs,
    TileSize,
    TileSizes,
    combine,
    find_pairs,
    tile_down,
    tile_gate_up,
    weight_tile,
)


# counts change from step to step: specialising on them would compile while serving
@triton.jit(do_not_specialize=["pairs", "blocks"])
def _count_pairs(
    ids, counts, totals, pairs, blocks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts[e, b]: pairs of expert e in block b of the pairs; totals[e], which was 0."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, PADDED)
    own = tl.load(ids + pair, mask=pair < pairs, other=-1)
    count = tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    real = expert < EXPERTS
    tl.store(counts + expert * blocks + block, count, mask=real)
    # integers: the order of the additions changes nothing
    tl.atomic_add(totals + expert, count, mask=real, sem="relaxed")


@triton.jit(do_not_specialize=["blocks"])
def _place_experts(
    counts, totals, starts, spans, tile_experts, tile_rows, tile_count, blocks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program per expert: where its pairs of every block begin, its first row and number of
    pairs, and its name and first row on its tiles. It has whole PARTs of a tile, and the last tile
    may be one part. Behind the last tile of all is the row where it ends."""
    me = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    total = tl.load(totals + expert, mask=expert < EXPERTS, other=0)
    rows = (total + PART - 1) // PART * PART
    tiles = (rows + TILE - 1) // TILE
    first = tl.sum(tl.where(expert < me, rows, 0), 0)
    before = tl.sum(tl.where(expert < me, tiles, 0), 0)
    mine = tl.sum(tl.where(expert == me, tiles, 0), 0)
    block = tl.arange(0, WIDE)
    count = tl.load(counts + me * blocks + block, mask=block < blocks, other=0)
    start = first + tl.cumsum(count, 0) - count
    tl.store(starts + block * EXPERTS + me, start, mask=block < blocks)
    tl.store(spans + 2 * me, first)
    tl.store(spans + 2 * me + 1, tl.sum(tl.where(expert == me, total, 0), 0))
    for tile in range(mine):
        tl.store(tile_experts + before + tile, me)
        tl.store(tile_rows + before + tile, first + tile * TILE)
    if me == EXPERTS - 1:
        tl.store(tile_count, before + mine)
        tl.store(tile_rows + before + mine, tl.sum(rows, 0))


@triton.jit(do_not_specialize=["pairs"])
def _place_pairs(
    ids, starts, totals, pair_rows, row_pairs, pairs,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pair_rows[pair]: its row in the sorted order, -1 without an expert; row_pairs the inverse.
    The totals become 0 for the next sort."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, PADDED)
    own = tl.load(ids + pair, mask=pair < pairs, other=-1)
    real = expert < EXPERTS
    hit = ((own[:, None] == expert[None, :]) & real[None, :]).to(tl.int32)
    start = tl.load(starts + block * EXPERTS + expert, mask=real, other=0)
    row = tl.sum(hit * (tl.cumsum(hit, 0) + start[None, :]), 1) - 1
    tl.store(pair_rows + pair, row, mask=pair < pairs)
    tl.store(row_pairs + row, pair, mask=row >= 0)
    if block == 0:
        tl.store(totals + expert, tl.zeros([PADDED], tl.int32), mask=real)


@triton.jit
def _copy_rows(
    x, pair_rows, out,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """out[row of pair] = x[t] for the pairs of row t. Rows between experts stay as they are."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PADDED + tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(x + t * WIDTH + column, mask=inside, other=0)
    for k in tl.static_range(TOP_K):
        row = tl.load(pair_rows + t * TOP_K + k).to(tl.int64)
        tl.store(out + row * WIDTH + column, value, mask=inside & (row >= 0))


@triton.jit
def _gate_up_rows(
    x, row_pairs, pairs, pool, out, begin, place, first,
    UNIT: tl.constexpr, SLOT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    """out[begin + i, first + j] = silu(gate) * up for ROWS rows and BLOCK columns."""
    row = first + tl.arange(0, BLOCK)
    at = (begin + tl.arange(0, ROWS)).to(tl.int64)
    source = at
    if GATHER:
        # between experts the pairs are whatever was there
        pair = tl.load(row_pairs + at)
        source = (tl.minimum(tl.maximum(pair, 0), pairs - 1) // TOP_K).to(tl.int64)
    gate = tl.zeros([ROWS, BLOCK], tl.float32)
    up = tl.zeros([ROWS, BLOCK], tl.float32)
    if TMA:
        slot = (place // SLOT).to(tl.int32)
        for k in range(0, WIDTH, COLUMNS):
            if GATHER:
                column = k + tl.arange(0, COLUMNS)
                place_of = x + source[:, None] * WIDTH + column[None, :]
                if WIDTH % COLUMNS == 0:
                    rows = tl.load(place_of)
                else:
                    rows = tl.load(place_of, mask=(column < WIDTH)[None, :], other=0)
            else:
                rows = x.load([begin, k])
            one = pool.load([slot, first, k]).reshape(BLOCK, COLUMNS)
            two = pool.load([slot, first + INNER, k]).reshape(BLOCK, COLUMNS)
            gate = tl.dot(rows, one.T, gate, input_precision="ieee")
            up = tl.dot(rows, two.T, up, input_precision="ieee")
    else:
        weight = pool + place * UNIT
        for k in range(0, WIDTH, COLUMNS):
            column = k + tl.arange(0, COLUMNS)
            inside = (column < WIDTH)[None, :]
            rows = tl.load(x + source[:, None] * WIDTH + column[None, :], mask=inside, other=0)
            inside = inside & (row < INNER)[:, None]
            own = weight + row[:, None] * WIDTH + column[None, :]
            one = tl.load(own, mask=inside, other=0).to(rows.dtype)
            two = tl.load(own + INNER * WIDTH, mask=inside, other=0).to(rows.dtype)
            gate = tl.dot(rows, one.T, gate, input_precision="ieee")
            up = tl.dot(rows, two.T, up, input_precision="ieee")
    acts = gate / (1.0 + tl.exp(-gate)) * up
    if TMA_OUT:
        out.store([begin, first], acts.to(out.dtype))
    else:
        target = out + at[:, None] * INNER + row[None, :]
        tl.store(target, acts.to(out.dtype.element_ty), mask=(row < INNER)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _group_gate_up(
    x, x_half, row_pairs, pairs, pool, out, out_rows, places, tile_experts, tile_rows, tile_count,
    UNIT: tl.constexpr, SLOT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, TILE: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up of the sorted rows. With TMA x, pool [slots, 2 * INNER, WIDTH] and out
    are descriptors (x_half that of half a tile), and an expert's place is a multiple of SLOT;
    without, they are pointers. With GATHER x is a pointer to rows that are not sorted. out_rows is
    a pointer: two descriptors that are written need more shared memory than there is."""
    ACROSS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    total = tl.load(tile_count) * ACROSS
    for index in tl.range(tl.program_id(0), total, PROGRAMS, flatten=FLATTEN):
        tile = index // ACROSS
        first = (index % ACROSS) * BLOCK
        place = tl.load(places + tl.load(tile_experts + tile))
        # fmt: off
        if HALVES:
            begin = tl.load(tile_rows + tile)
            if tl.load(tile_rows + tile + 1) - begin < TILE:
                _gate_up_rows(x_half, row_pairs, pairs, pool, out_rows, begin, place, first,
                              UNIT, SLOT, INNER, WIDTH, TOP_K, TILE // 2, BLOCK, COLUMNS, GATHER,
                              TMA, False)
            else:
                _gate_up_rows(x, row_pairs, pairs, pool, out, begin, place, first,
                              UNIT, SLOT, INNER, WIDTH, TOP_K, TILE, BLOCK, COLUMNS, GATHER,
                              TMA, TMA)
        else:
            _gate_up_rows(x, row_pairs, pairs, pool, out, tile * TILE, place, first,
                          UNIT, SLOT, INNER, WIDTH, TOP_K, TILE, BLOCK, COLUMNS, GATHER, TMA, TMA)
        # fmt: on


@triton.jit
def _down_rows(
    acts, pool, out, begin, place, first,
    UNIT: tl.constexpr, DOWN_AT: tl.constexpr, SLOT: tl.constexpr,
    INNER: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, BLOCK)
    at = (begin + tl.arange(0, ROWS)).to(tl.int64)
    y = tl.zeros([ROWS, BLOCK], tl.float32)
    if TMA:
        slot = (place // SLOT).to(tl.int32)
        for k in range(0, INNER, COLUMNS):
            rows = acts.load([begin, k])
            own = pool.load([slot, first, k]).reshape(BLOCK, COLUMNS)
            y = tl.dot(rows, own.T, y, input_precision="ieee")
    else:
        weight = pool + (place * UNIT + DOWN_AT)
        for k in range(0, INNER, COLUMNS):
            column = k + tl.arange(0, COLUMNS)
            inside = (column < INNER)[None, :]
            rows = tl.load(acts + at[:, None] * INNER + column[None, :], mask=inside, other=0)
            inside = inside & (row < WIDTH)[:, None]
            place_of = weight + row[:, None] * INNER + column[None, :]
            own = tl.load(place_of, mask=inside, other=0).to(rows.dtype)
            y = tl.dot(rows, own.T, y, input_precision="ieee")
    if TMA_OUT:
        out.store([begin, first], y.to(out.dtype))
    else:
        target = out + at[:, None] * WIDTH + row[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=(row < WIDTH)[None, :])


@triton.jit
def _group_down(
    acts, acts_half, pool, out, out_rows, places, tile_experts, tile_rows, tile_count,
    UNIT: tl.constexpr, DOWN_AT: tl.constexpr, SLOT: tl.constexpr,
    INNER: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out = down of the sorted activations. With TMA pool is [slots, WIDTH, INNER]."""
    ACROSS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    total = tl.load(tile_count) * ACROSS
    for index in tl.range(tl.program_id(0), total, PROGRAMS, flatten=FLATTEN):
        tile = index // ACROSS
        first = (index % ACROSS) * BLOCK
        place = tl.load(places + tl.load(tile_experts + tile))
        # fmt: off
        if HALVES:
            begin = tl.load(tile_rows + tile)
            if tl.load(tile_rows + tile + 1) - begin < TILE:
                _down_rows(acts_half, pool, out_rows, begin, place, first, UNIT, DOWN_AT, SLOT,
                           INNER, WIDTH, TILE // 2, BLOCK, COLUMNS, TMA, False)
            else:
                _down_rows(acts, pool, out, begin, place, first, UNIT, DOWN_AT, SLOT,
                           INNER, WIDTH, TILE, BLOCK, COLUMNS, TMA, TMA)
        else:
            _down_rows(acts, pool, out, tile * TILE, place, first, UNIT, DOWN_AT, SLOT,
                       INNER, WIDTH, TILE, BLOCK, COLUMNS, TMA, TMA)
        # fmt: on


@triton.jit
def _widen(
    pool, pool_scales, places, spans, out, out_places,
    AT: tl.constexpr, SCALES_AT: tl.constexpr, OUT_AT: tl.constexpr, SIZE: tl.constexpr,
    UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One matrix [COUNT, COLUMNS] of every expert that has pairs, widened to expert e of `out`.
    out_places[e]: where the expert begins in `out`. Grid: (tiles, experts)."""
    expert = tl.program_id(1)
    if tl.program_id(0) == 0:
        tl.store(out_places + expert, expert.to(tl.int64) * (SIZE // OUT_UNIT))
    if tl.load(spans + 2 * expert + 1) > 0:
        ACROSS: tl.constexpr = (COLUMNS + CHUNK - 1) // CHUNK
        row = (tl.program_id(0) // ACROSS) * BLOCK + tl.arange(0, BLOCK)
        k0 = (tl.program_id(0) % ACROSS) * CHUNK
        place = tl.load(places + expert)
        weight = pool + (place * UNIT + AT)
        scales = pool_scales + (place * SCALE_UNIT + SCALES_AT)
        live = row < COUNT
        tile = weight_tile(weight, scales, row, live, k0, COLUMNS, BLOCK, CHUNK, KIND)
        column = k0 + tl.arange(0, CHUNK)
        begin = expert.to(tl.int64) * SIZE + OUT_AT
        target = out + begin + row[:, None] * COLUMNS + column[None, :]
        inside = live[:, None] & (column < COLUMNS)[None, :]
        tl.store(target, tile.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Of a program: output columns, columns of the sum at a time, stages, warps, and whether the
    loop over tiles and that over columns are made one."""

    block: int
    columns: int
    stages: int
    warps: int
    flatten: bool


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """`tile`: rows of a tile; every expert has whole tiles, with `halves` whole halves of them.
    `gathers`: `gate_up` reads rows where they are, instead of a sorted copy."""

    tile: int
    gate_up: GroupSize
    down: GroupSize
    halves: bool = False
    gathers: bool = False

    @property
    def part(self) -> int:
        """Every expert has a multiple of this many rows."""
        return self.tile // 2 if self.halves else self.tile


# Measured on an H200 with 128 experts of 2048 x 768, eight to a row.
LARGE_GROUPS = GroupSizes(128, GroupSize(128, 64, 4, 8, False), GroupSize(256, 64, 3, 8, True))
# a flattened loop cannot branch
HALF_GROUPS = GroupSizes(
    128,
    GroupSize(128, 64, 4, 8, False),
    GroupSize(256, 64, 3, 8, False),
    halves=True,
    gathers=True,
)
# fp32 has no tensor cores that round as it does
FP32_GROUPS = GroupSizes(32, GroupSize(32, 32, 2, 4, False), GroupSize(32, 32, 2, 4, False))
TILES = TileSizes(16, TileSize(64, 128, 3, 4), TileSize(128, 64, 4, 4))
WIDE_TILES = TileSizes(32, TileSize(64, 128, 3, 4), TileSize(128, 64, 4, 4))
WIDEST_TILES = TileSizes(64, TileSize(64, 64, 4, 4), TileSize(128, 64, 3, 4))
FP32_TILES = TileSizes(16, TileSize(32, 32, 2, 4), TileSize(32, 32, 2, 4))
INT4_TILES = Int4Sizes(8, Int4Size(64, 4, 2), Int4Size(64, 4, 3))
WIDE_INT4_TILES = Int4Sizes(16, Int4Size(64, 4, 2), Int4Size(64, 4, 2))
WIDEST_INT4_TILES = Int4Sizes(32, Int4Size(64, 4, 1), Int4Size(64, 4, 1))
# mean numbers of pairs of an expert: up to the first, few pairs at a time, up to the second more;
# from the third on, rows are sorted into groups, from the fourth on without halves of tiles
FEW_PAIRS, MORE_PAIRS, GROUP_PAIRS, LARGE_GROUP_PAIRS = 6, 24, 56, 256
# of int4: up to the first, 16 pairs at a time; from the second on, experts are widened for groups
MORE_INT4_PAIRS, INT4_GROUP_PAIRS = 12, 64
# elements of the comparison of pairs with experts
_COMPARED = 32768
# blocks of the sort are padded to so many, so that few steps need a compilation of their own
_LEAST_BLOCKS = 64

ManySizes = TileSizes | Int4Sizes | GroupSizes


def choose_sizes(rows: int, top_k: int, experts: int, kind: str, dtype: torch.dtype) -> ManySizes:
    """Which kernels run that many rows."""
    each = rows * top_k / experts
    if dtype == torch.float32:
        return FP32_TILES if each < GROUP_PAIRS else FP32_GROUPS
    if kind == "int4" and dtype == torch.bfloat16 and each < INT4_GROUP_PAIRS:
        if each <= FEW_PAIRS:
            return INT4_TILES
        return WIDE_INT4_TILES if each <= MORE_INT4_PAIRS else WIDEST_INT4_TILES
    if each < GROUP_PAIRS:
        if each <= FEW_PAIRS:
            return TILES
        return WIDE_TILES if each < MORE_PAIRS else WIDEST_TILES
    return LARGE_GROUPS if each >= LARGE_GROUP_PAIRS else HALF_GROUPS


def many_shape(sizes: ManySizes, record: DeviceRecord) -> str:
    """The shape class of these kernels in the tables of sizes."""
    if isinstance(sizes, GroupSizes):
        kernel = f"groups{sizes.tile}{'-halves' * sizes.halves}"
    else:
        kernel = f"{'int4-' * isinstance(sizes, Int4Sizes)}tiles{sizes.count}"
    return expert_shape(kernel, record.kind, record.hidden, record.intermediate)


@cache
def measured(sizes: ManySizes, record: DeviceRecord) -> ManySizes:
    """Those of the device's table instead; without an entry, with fewer stages where the device has
    less shared memory than the sizes were measured with."""
    return tuned(many_shape(sizes, record), within(sizes, _shared_bytes()))


def within(sizes: ManySizes, shared_bytes: int) -> ManySizes:
    """Sizes whose tiles of all stages, in 16 bits, take no more shared memory."""
    if isinstance(sizes, Int4Sizes):
        return sizes
    side = sizes.tile if isinstance(sizes, GroupSizes) else sizes.count
    fitting: dict[str, Any] = {}
    for name, matrices in (("gate_up", 2), ("down", 1)):
        own: TileSize | GroupSize = getattr(sizes, name)
        stage_bytes = 2 * own.columns * (side + matrices * own.block)
        fitting[name] = replace(own, stages=max(1, min(own.stages, shared_bytes // stage_bytes)))
    return replace(sizes, **fitting)


def _shared_bytes() -> int:
    """Shared memory that one program may use."""
    if not torch.cuda.is_available():
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties()
    return int(properties.shared_memory_per_block_optin)


def _room(rows: int, top_k: int, experts: int, sizes: ManySizes) -> int:
    """The rows that sorted pairs take at most: each expert in use may end with a part of a tile."""
    pairs = rows * top_k
    if not isinstance(sizes, GroupSizes):
        return pairs
    padded = pairs + min(pairs, experts) * (sizes.part - 1)
    return padded // sizes.part * sizes.part


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Memory for `run_experts_many` of up to `rows` rows; one for all layers of a model, of the
    largest record among them."""

    rows: int
    top_k: int
    # rows in the order of their experts; later the experts' outputs
    values: Tensor
    acts: Tensor
    # the sort: counts and starts by block and expert, totals by expert (zeros between runs)
    counts: Tensor
    starts: Tensor
    totals: Tensor
    spans: Tensor
    tile_experts: Tensor
    tile_rows: Tensor
    tile_count: Tensor
    pair_rows: Tensor
    row_pairs: Tensor
    # quantised experts, widened, and their places; empty where there is no need
    wide: Tensor
    wide_places: Tensor
    # the layers of a step share them: making one takes as long as a launch
    descriptors: dict[tuple[Any, ...], TensorDescriptor] = field(default_factory=dict)

    @classmethod
    def empty(
        cls, rows: int, top_k: int, experts: int, record: DeviceRecord, dtype: torch.dtype,
        device: torch.device | str,
    ) -> ExpertScratch:  # fmt: skip
        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        # the most rows of every size of tile
        borders = (-(-each * experts // top_k) - 1 for each in (GROUP_PAIRS, LARGE_GROUP_PAIRS))
        counted = [rows, *(border for border in borders if 0 < border < rows)]
        sizes = [choose_sizes(each, top_k, experts, record.kind, dtype) for each in counted]
        room = max(map(_room, counted, repeat(top_k), repeat(experts), sizes))
        grouped = isinstance(sizes[0], GroupSizes)
        blocks = triton.cdiv(rows * top_k, _block(experts))
        elements = 3 * record.intermediate * record.hidden
        widened = experts * elements if grouped and record.kind in ("int8", "int4") else 0
        return cls(
            rows=rows,
            top_k=top_k,
            values=torch.empty((room, record.hidden), dtype=dtype, device=device),
            acts=torch.empty((room, record.intermediate), dtype=dtype, device=device),
            counts=ints(experts, blocks),
            starts=ints(blocks, experts),
            totals=torch.zeros(experts, dtype=torch.int32, device=device),
            spans=ints(experts, 2),
            tile_experts=ints(room),
            tile_rows=ints(room + 1),
            tile_count=ints(1),
            pair_rows=ints(rows * top_k),
            row_pairs=ints(room),
            wide=torch.empty(widened, dtype=dtype, device=device),
            wide_places=torch.empty(experts, dtype=torch.int64, device=device),
        )


def _block(experts: int) -> int:
    """Pairs that one program of the sort compares with all experts."""
    padded: int = triton.next_power_of_2(experts)
    return max(16, min(256, _COMPARED // padded))


def sort_pairs(
    routed: RoutedRows, experts: int, sizes: GroupSizes, scratch: ExpertScratch
) -> None:  # fmt: skip
    """Fill the scratch's spans, tile_experts, tile_rows, tile_count, pair_rows and row_pairs."""
    pairs = routed.ids.numel()
    block = _block(experts)
    blocks = triton.cdiv(pairs, block)
    padded = triton.next_power_of_2(experts)
    shape = {"EXPERTS": experts, "PADDED": padded}
    _count_pairs[(blocks,)](
        routed.ids, scratch.counts, scratch.totals, pairs, blocks, **shape, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    _place_experts[(experts,)](
        scratch.counts, scratch.totals, scratch.starts, scratch.spans, scratch.tile_experts,
        scratch.tile_rows, scratch.tile_count, blocks, **shape, TILE=sizes.tile, PART=sizes.part,
        WIDE=max(_LEAST_BLOCKS, triton.next_power_of_2(blocks)),
        num_warps=4,
    )  # fmt: skip
    _place_pairs[(blocks,)](
        routed.ids, scratch.starts, scratch.totals, scratch.pair_rows, scratch.row_pairs, pairs,
        **shape, BLOCK=block, num_warps=8,
    )  # fmt: skip


def copy_rows(x: Tensor, top_k: int, scratch: ExpertScratch) -> None:
    """The scratch's values = rows of x [T, D] in the sorted order."""
    rows, width = x.shape
    padded = min(2048, triton.next_power_of_2(width))
    _copy_rows[(rows, triton.cdiv(width, padded))](
        x, scratch.pair_rows, scratch.values, TOP_K=top_k, WIDTH=width, PADDED=padded,
        num_warps=4,
    )  # fmt: skip


def widen_experts(pool: ExpertPool, scratch: ExpertScratch) -> ExpertPool:
    """The pool's experts that have pairs, in the type of the rows."""
    matrices, scales, shape = pool.views()
    record = pool.record
    hidden, inner = record.hidden, record.intermediate
    own = scratch.wide
    block, warps = 16, 4
    parts = (
        (0, record.gate_up_scales_at, 0, 2 * inner, hidden),
        (record.down_at, record.down_scales_at, 2 * inner * hidden, hidden, inner),
    )
    for at, scales_at, out_at, count, columns in parts:
        chunk = min(256, triton.next_power_of_2(columns))
        grid = (triton.cdiv(count, block) * triton.cdiv(columns, chunk), len(pool.places))
        _widen[grid](
            matrices, scales, pool.places, scratch.spans, own, scratch.wide_places,
            AT=pool.at(at), SCALES_AT=pool.at(scales_at, scales=True), OUT_AT=out_at,
            SIZE=3 * inner * hidden, UNIT=shape["UNIT"], SCALE_UNIT=shape["SCALE_UNIT"],
            OUT_UNIT=UNIT_BYTES // own.element_size(), COUNT=count, COLUMNS=columns,
            BLOCK=block, CHUNK=chunk, KIND=shape["KIND"], num_warps=warps,
        )  # fmt: skip
    kind = "fp32" if own.dtype == torch.float32 else "bf16"
    return ExpertPool(own.view(torch.uint8), scratch.wide_places, DeviceRecord(kind, hidden, inner))


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def _acts(scratch: ExpertScratch, inner: int) -> Tensor:
    return scratch.acts.view(-1)[: len(scratch.acts) * inner].view(-1, inner)


def _tiles(scratch: ExpertScratch, rows: Tensor, tile: int, columns: int, tma: bool) -> Any:
    """Rows as they are read or written: a descriptor of tiles, or the rows themselves."""
    if not tma:
        return rows
    key = (rows.data_ptr(), rows.shape, tile, columns)
    known = scratch.descriptors.get(key)
    if known is None:
        known = scratch.descriptors[key] = TensorDescriptor.from_tensor(rows, [tile, columns])
    return known


def _slots(
    scratch: ExpertScratch, base: Tensor, dtype: torch.dtype, at: int, shape: tuple[int, int],
    slot_bytes: int, block: tuple[int, int],
) -> TensorDescriptor:  # fmt: skip
    """One matrix of all slots: [slots, rows, columns], the slots `slot_bytes` apart."""
    key = (base.data_ptr(), at, shape, slot_bytes, block)
    known = scratch.descriptors.get(key)
    if known is not None:
        return known
    rows, columns = shape
    typed = base[at:].view(dtype)
    stride = slot_bytes // dtype.itemsize
    slots = (len(typed) - rows * columns) // stride + 1
    scratch.descriptors[key] = TensorDescriptor(
        typed, [slots, rows, columns], [stride, columns, 1], [1, block[0], block[1]]
    )
    return scratch.descriptors[key]


def grouped_gate_up(
    pool: ExpertPool, slot_bytes: int | None, scratch: ExpertScratch, sizes: GroupSizes,
    unsorted: Tensor | None = None,
) -> None:  # fmt: skip
    """The scratch's acts = silu(gate) * up of its values, or of rows `unsorted` [T, D] in the
    sorted order. `slot_bytes`: the places are multiples of it, and the pool has the rows' type."""
    record, own = pool.record, sizes.gate_up
    hidden, inner = record.hidden, record.intermediate
    columns = min(own.columns, triton.next_power_of_2(hidden))
    source, target = scratch.values if unsorted is None else unsorted, _acts(scratch, inner)
    weight: Any = pool.views()[0]
    if slot_bytes is not None:
        weight = _slots(
            scratch, pool.base, source.dtype, 0, (2 * inner, hidden), slot_bytes,
            (own.block, columns),
        )  # fmt: skip
    tma = slot_bytes is not None
    by_tiles = tma and unsorted is None
    programs = _programs(pool.base.device)
    _group_gate_up[(programs,)](
        _tiles(scratch, source, sizes.tile, columns, by_tiles),
        _tiles(scratch, source, sizes.part, columns, by_tiles),
        scratch.row_pairs, len(source) * scratch.top_k, weight,
        _tiles(scratch, target, sizes.tile, own.block, tma), target, pool.places,
        scratch.tile_experts, scratch.tile_rows, scratch.tile_count,
        UNIT=pool.views()[2]["UNIT"], SLOT=(slot_bytes or 0) // UNIT_BYTES, INNER=inner,
        WIDTH=hidden, TOP_K=scratch.top_k, TILE=sizes.tile, HALVES=sizes.halves,
        BLOCK=own.block,
        COLUMNS=columns, PROGRAMS=programs, FLATTEN=own.flatten, GATHER=unsorted is not None,
        TMA=tma, num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip


def grouped_down(
    pool: ExpertPool, slot_bytes: int | None, scratch: ExpertScratch, sizes: GroupSizes,
) -> None:  # fmt: skip
    """The scratch's values = down of its acts."""
    record, own = pool.record, sizes.down
    hidden, inner = record.hidden, record.intermediate
    columns = min(own.columns, triton.next_power_of_2(inner))
    source, target = _acts(scratch, inner), scratch.values
    weight: Any = pool.views()[0]
    if slot_bytes is not None:
        weight = _slots(
            scratch, pool.base, source.dtype, record.down_at, (hidden, inner), slot_bytes,
            (own.block, columns),
        )  # fmt: skip
    tma = slot_bytes is not None
    programs = _programs(pool.base.device)
    _group_down[(programs,)](
        _tiles(scratch, source, sizes.tile, columns, tma),
        _tiles(scratch, source, sizes.part, columns, tma), weight,
        _tiles(scratch, target, sizes.tile, own.block, tma), target, pool.places,
        scratch.tile_experts, scratch.tile_rows, scratch.tile_count,
        UNIT=pool.views()[2]["UNIT"], DOWN_AT=pool.at(record.down_at),
        SLOT=(slot_bytes or 0) // UNIT_BYTES, INNER=inner,
        WIDTH=hidden, TILE=sizes.tile, HALVES=sizes.halves, BLOCK=own.block,
        COLUMNS=columns,
        PROGRAMS=programs, FLATTEN=own.flatten, TMA=tma,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip


def run_experts_many(
    x: Tensor, routed: RoutedRows, pool: ExpertPool, hidden: Tensor,
    scratch: ExpertScratch | None = None, slot_bytes: int | None = None, dependent: bool = False,
    norm: RowNorm | None = None, sizes: ManySizes | None = None,
) -> None:  # fmt: skip
    """hidden [T, D] += the weighted sum of the experts of x [T, D], which is normed; then the norm
    of hidden, if given, whose `out` may be x. `slot_bytes`: every place is a multiple of it and
    inside the pool. `dependent`: in a batch, the kernels after the first start before the one
    before them has ended. `sizes`: others than measured ones."""
    rows, top_k = routed.ids.shape
    experts = len(pool.places)
    if scratch is None:
        scratch = ExpertScratch.empty(rows, top_k, experts, pool.record, x.dtype, x.device)
    assert rows <= scratch.rows and top_k == scratch.top_k
    if sizes is None:
        sizes = choose_sizes(rows, top_k, experts, pool.record.kind, x.dtype)
        sizes = sizes if x.dtype == torch.float32 else measured(sizes, pool.record)
    if not isinstance(sizes, GroupSizes):
        order = SortedPairs(scratch.row_pairs, scratch.spans)
        find_pairs(routed.ids, order, dependent)
        if isinstance(sizes, Int4Sizes):
            int4_gate_up(x, top_k, order, pool, scratch.acts, sizes, dependent)
            int4_down(scratch.acts, order, pool, scratch.values, sizes, dependent)
        else:
            tile_gate_up(x, top_k, order, pool, scratch.acts, sizes, dependent)
            tile_down(scratch.acts, order, pool, scratch.values, sizes, dependent)
        combine(scratch.values, routed, experts, hidden, dependent=dependent, norm=norm)
        return
    sort_pairs(routed, experts, sizes, scratch)
    if not sizes.gathers:
        copy_rows(x, top_k, scratch)
    if pool.record.kind in ("int8", "int4"):
        pool = widen_experts(pool, scratch)
        slot_bytes = pool.record.nbytes
    if x.dtype.itemsize != 2 or pool.record.kind != "bf16":
        slot_bytes = None
    unsorted = x if sizes.gathers else None
    grouped_gate_up(pool, slot_bytes, scratch, sizes, unsorted)
    grouped_down(pool, slot_bytes, scratch, sizes)
    combine(scratch.values, routed, experts, hidden, scratch.pair_rows, norm=norm)
