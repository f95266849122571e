"""Triton kernels for the experts of many rows: pairs (row, chosen expert) are sorted by expert on
the device, and one product per expert covers all its rows.

Kernels: a counting sort (count, place experts, place pairs: no order of arrival in it, so that it
gives the same order each time; few pairs take one kernel), `gate_up` with SwiGLU, which reads rows
where they are, `down`, and `combine`. The two products are those of `expert_spans` where the
experts lie in slots of equal size; otherwise they read by pointers, from wherever their places
lead. Quantised experts that are used are widened into a workspace first. All start in order: with
early starts they took 2 to 4% longer.

`run_experts_many` chooses between these kernels and those of `expert_tiles` and `expert_int4`.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
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
from coterie.kernels.triton.expert_spans import list_tiles, span_down, span_gate_up, tokens_of
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


@triton.jit(do_not_specialize=["list_size", "blocks"])
def _place_experts(
    counts, totals, starts, spans, tiles, tile_counts, list_size, blocks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, LONG: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program per expert: where its pairs of every block begin, its first row and number of
    pairs, and its tiles. FLAT > 0: a second list, of tiles of so many rows."""
    me = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    total = tl.load(totals + expert, mask=expert < EXPERTS, other=0)
    first = tl.sum(tl.where(expert < me, total, 0), 0)
    block = tl.arange(0, WIDE)
    count = tl.load(counts + me * blocks + block, mask=block < blocks, other=0)
    start = first + tl.cumsum(count, 0) - count
    tl.store(starts + block * EXPERTS + me, start, mask=block < blocks)
    tl.store(spans + 2 * me, first)
    tl.store(spans + 2 * me + 1, tl.sum(tl.where(expert == me, total, 0), 0))
    list_tiles(tiles, tile_counts, total, expert, me, first, EXPERTS, TILE, LONG)
    if FLAT > 0:
        list_tiles(tiles + list_size, tile_counts + 1, total, expert, me, first, EXPERTS, FLAT, 0)


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


@triton.jit(do_not_specialize=["list_size", "pairs"])
def _sort_few(
    ids, pair_rows, row_pairs, spans, tiles, tile_counts, list_size, pairs,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, LONG: tl.constexpr,
    FLAT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The whole sort of few pairs, one program per expert: each looks at all."""
    me = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    total = tl.zeros([PADDED], tl.int32)
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1)
        real = (own >= 0) & (own < EXPERTS)
        total += tl.histogram(tl.where(real, own, 0), PADDED, mask=real)
    first = tl.sum(tl.where(expert < me, total, 0), 0)
    tl.store(spans + 2 * me, first)
    tl.store(spans + 2 * me + 1, tl.sum(tl.where(expert == me, total, 0), 0))
    list_tiles(tiles, tile_counts, total, expert, me, first, EXPERTS, TILE, LONG)
    if FLAT > 0:
        list_tiles(tiles + list_size, tile_counts + 1, total, expert, me, first, EXPERTS, FLAT, 0)
    row = first
    for begin in range(0, pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1)
        hit = own == me
        at = row + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(pair_rows + pair, at, mask=hit)
        tl.store(row_pairs + at, pair, mask=hit)
        row += tl.sum(hit.to(tl.int32), 0)
        if me == 0:
            none = (pair < pairs) & ((own < 0) | (own >= EXPERTS))
            tl.store(pair_rows + pair, tl.full([CHUNK], -1, tl.int32), mask=none)


@triton.jit(do_not_specialize=["pairs"])
def _group_gate_up(
    x, row_pairs, pairs, pool, out, places, tiles, tile_count,
    UNIT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up of the sorted rows of x."""
    ACROSS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    for index in tl.range(tl.program_id(0), tl.load(tile_count) * ACROSS, PROGRAMS):
        tile = tiles + 3 * (index // ACROSS)
        row = (index % ACROSS) * BLOCK + tl.arange(0, BLOCK)
        weight = pool + tl.load(places + tl.load(tile)) * UNIT
        begin = tl.load(tile + 1)
        tokens = tokens_of(row_pairs, begin, pairs, TOP_K, TILE)
        gate = tl.zeros([TILE, BLOCK], tl.float32)
        up = tl.zeros([TILE, BLOCK], tl.float32)
        for k in range(0, WIDTH, COLUMNS):
            column = k + tl.arange(0, COLUMNS)
            inside = (column < WIDTH)[None, :]
            rows = tl.load(x + tokens[:, None] * WIDTH + column[None, :], mask=inside, other=0)
            inside = inside & (row < INNER)[:, None]
            own = weight + row[:, None] * WIDTH + column[None, :]
            one = tl.load(own, mask=inside, other=0).to(rows.dtype)
            two = tl.load(own + INNER * WIDTH, mask=inside, other=0).to(rows.dtype)
            gate = tl.dot(rows, one.T, gate, input_precision="ieee")
            up = tl.dot(rows, two.T, up, input_precision="ieee")
        acts = gate / (1.0 + tl.exp(-gate)) * up
        at = (begin + tl.arange(0, TILE)).to(tl.int64)
        inside = (at < tl.load(tile + 2))[:, None] & (row < INNER)[None, :]
        target = out + at[:, None] * INNER + row[None, :]
        tl.store(target, acts.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _group_down(
    acts, pool, out, places, tiles, tile_count,
    UNIT: tl.constexpr, DOWN_AT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out = down of the sorted activations."""
    ACROSS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    for index in tl.range(tl.program_id(0), tl.load(tile_count) * ACROSS, PROGRAMS):
        tile = tiles + 3 * (index // ACROSS)
        row = (index % ACROSS) * BLOCK + tl.arange(0, BLOCK)
        weight = pool + (tl.load(places + tl.load(tile)) * UNIT + DOWN_AT)
        at = (tl.load(tile + 1) + tl.arange(0, TILE)).to(tl.int64)
        used = (at < tl.load(tile + 2))[:, None]
        y = tl.zeros([TILE, BLOCK], tl.float32)
        for k in range(0, INNER, COLUMNS):
            column = k + tl.arange(0, COLUMNS)
            inside = (column < INNER)[None, :]
            place = acts + at[:, None] * INNER + column[None, :]
            rows = tl.load(place, mask=used & inside, other=0)
            inside = inside & (row < WIDTH)[:, None]
            place = weight + row[:, None] * INNER + column[None, :]
            own = tl.load(place, mask=inside, other=0).to(rows.dtype)
            y = tl.dot(rows, own.T, y, input_precision="ieee")
        target = out + at[:, None] * WIDTH + row[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=used & (row < WIDTH)[None, :])


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
    """Of a program: output columns, columns of the sum at a time, stages, warps."""

    block: int
    columns: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Products that read experts by pointers, `tile` rows at a time."""

    tile: int
    gate_up: GroupSize
    down: GroupSize

    @property
    def lists(self) -> tuple[int, int, int]:
        return self.tile, 0, 0


@dataclass(frozen=True, slots=True)
class SpanSizes:
    """Products of `expert_spans`. `tile`, `tail`: rows of a tile are up to their sum. `flip`: the
    weights are on the M side. `balanced`: long tiles first. `flat`: `down` has tiles of `tile`
    rows, and its two loops are made one. `programs`: on one SM."""

    tile: int
    tail: int
    gate_up: GroupSize
    down: GroupSize
    flip: bool = False
    balanced: bool = False
    flat: bool = False
    programs: int = 1

    @property
    def lists(self) -> tuple[int, int, int]:
        """Rows of a tile, those of a short one if the long ones come first, and rows of a tile in
        the list for `down`, if that has its own."""
        long = self.tile if self.balanced else 0
        return self.tile + self.tail, long, self.tile if self.flat else 0


# Measured on an H200 with 128 experts of 2048 x 768, eight to a row.
LARGE_SPANS = SpanSizes(128, 0, GroupSize(128, 64, 4, 8), GroupSize(256, 64, 3, 8), flat=True)
SPANS = SpanSizes(128, 64, GroupSize(128, 64, 4, 8), GroupSize(256, 64, 4, 8), balanced=True)
FEW_SPANS = SpanSizes(
    32, 16, GroupSize(64, 64, 4, 4), GroupSize(128, 64, 4, 4), flip=True, programs=2
)
GROUPS = GroupSizes(128, GroupSize(128, 64, 3, 8), GroupSize(128, 64, 3, 8))
# fp32 has no tensor cores that round as it does
FP32_GROUPS = GroupSizes(32, GroupSize(32, 32, 2, 4), GroupSize(32, 32, 2, 4))
TILES = TileSizes(16, TileSize(64, 128, 3, 4), TileSize(128, 64, 4, 4))
WIDE_TILES = TileSizes(32, TileSize(64, 128, 3, 4), TileSize(128, 64, 4, 4))
WIDEST_TILES = TileSizes(64, TileSize(64, 64, 4, 4), TileSize(128, 64, 3, 4))
FP32_TILES = TileSizes(16, TileSize(32, 32, 2, 4), TileSize(32, 32, 2, 4))
INT4_TILES = Int4Sizes(8, Int4Size(64, 4, 2), Int4Size(64, 4, 3))
WIDE_INT4_TILES = Int4Sizes(16, Int4Size(64, 4, 2), Int4Size(64, 4, 2))
WIDEST_INT4_TILES = Int4Sizes(32, Int4Size(64, 4, 1), Int4Size(64, 4, 1))
# mean numbers of pairs of an expert: up to the first, few pairs at a time, up to the second more;
# from there on rows are sorted, and from the third and fourth on the tiles are larger
FEW_PAIRS, MORE_PAIRS, GROUP_PAIRS, LARGE_GROUP_PAIRS = 6, 24, 56, 192
# of int4: up to the first, 16 pairs at a time; from the second on, experts are widened for groups
MORE_INT4_PAIRS, INT4_GROUP_PAIRS = 12, 64
# elements of the comparison of pairs with experts
_COMPARED = 16384
# up to so many pairs one kernel sorts them
_FEW_SORTED = 6144
# blocks of the sort are padded to so many, so that few steps need a compilation of their own
_LEAST_BLOCKS = 64

ManySizes = TileSizes | Int4Sizes | GroupSizes | SpanSizes


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
        if each < MORE_PAIRS:
            return WIDE_TILES
        return FEW_SPANS if kind == "bf16" else WIDEST_TILES
    return LARGE_SPANS if each >= LARGE_GROUP_PAIRS else SPANS


def without_slots(sizes: ManySizes) -> ManySizes:
    """Sizes for experts that lie anywhere."""
    if not isinstance(sizes, SpanSizes):
        return sizes
    return WIDEST_TILES if sizes.flip else GROUPS


def many_shape(sizes: ManySizes, record: DeviceRecord) -> str:
    """The shape class of these kernels in the tables of sizes."""
    if isinstance(sizes, GroupSizes):
        kernel = f"groups{sizes.tile}"
    elif isinstance(sizes, SpanSizes):
        kernel = f"spans{sizes.tile}+{sizes.tail}{'-flat' * sizes.flat}"
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
    if isinstance(sizes, TileSizes):
        side = sizes.count
    else:
        side = sizes.tile + (sizes.tail if isinstance(sizes, SpanSizes) else 0)
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


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Memory for `run_experts_many` of up to `rows` rows; one for all layers of a model, of the
    largest record among them."""

    rows: int
    top_k: int
    # in the order of the experts, or of the pairs: outputs, and what `down` reads
    values: Tensor
    acts: Tensor
    # the sort: counts and starts by block and expert, totals by expert (zeros between runs)
    counts: Tensor
    starts: Tensor
    totals: Tensor
    spans: Tensor
    # two lists of tiles (expert, first row, end), and their lengths
    tiles: Tensor
    tile_counts: Tensor
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

        pairs = rows * top_k
        chosen = choose_sizes(rows, top_k, experts, record.kind, dtype)
        grouped = isinstance(chosen, GroupSizes | SpanSizes)
        blocks = triton.cdiv(pairs, _block(experts))
        elements = 3 * record.intermediate * record.hidden
        widened = experts * elements if grouped and record.kind in ("int8", "int4") else 0
        return cls(
            rows=rows,
            top_k=top_k,
            values=torch.empty((pairs, record.hidden), dtype=dtype, device=device),
            acts=torch.empty((pairs, record.intermediate), dtype=dtype, device=device),
            counts=ints(experts, blocks),
            starts=ints(blocks, experts),
            totals=torch.zeros(experts, dtype=torch.int32, device=device),
            spans=ints(experts, 2),
            tiles=ints(2, pairs, 3),
            tile_counts=ints(2),
            pair_rows=ints(pairs),
            row_pairs=ints(pairs),
            wide=torch.empty(widened, dtype=dtype, device=device),
            wide_places=torch.empty(experts, dtype=torch.int64, device=device),
        )


def _block(experts: int) -> int:
    """Pairs that one program of the sort compares with all experts."""
    padded: int = triton.next_power_of_2(experts)
    return max(16, min(256, _COMPARED // padded))


def sort_pairs(
    routed: RoutedRows, experts: int, sizes: GroupSizes | SpanSizes, scratch: ExpertScratch
) -> None:
    """Fill the scratch's spans, tiles, tile_counts, pair_rows and row_pairs."""
    pairs = routed.ids.numel()
    tile, long, flat = sizes.lists
    shape = {"EXPERTS": experts, "PADDED": triton.next_power_of_2(experts)}
    lists = {"TILE": tile, "LONG": long, "FLAT": flat}
    made = (scratch.spans, scratch.tiles, scratch.tile_counts, scratch.tiles.stride(0))
    if pairs <= _FEW_SORTED:
        _sort_few[(experts,)](
            routed.ids, scratch.pair_rows, scratch.row_pairs, *made, pairs, **shape, **lists,
            CHUNK=min(2048, triton.next_power_of_2(pairs)), num_warps=4,
        )  # fmt: skip
        return
    block = _block(experts)
    blocks = triton.cdiv(pairs, block)
    _count_pairs[(blocks,)](
        routed.ids, scratch.counts, scratch.totals, pairs, blocks, **shape, BLOCK=block,
        num_warps=8,
    )  # fmt: skip
    _place_experts[(experts,)](
        scratch.counts, scratch.totals, scratch.starts, *made, blocks, **shape, **lists,
        WIDE=max(_LEAST_BLOCKS, triton.next_power_of_2(blocks)), num_warps=4,
    )  # fmt: skip
    _place_pairs[(blocks,)](
        routed.ids, scratch.starts, scratch.totals, scratch.pair_rows, scratch.row_pairs, pairs,
        **shape, BLOCK=block, num_warps=8,
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


def _tiles(scratch: ExpertScratch, rows: Tensor, tile: int, columns: int) -> TensorDescriptor:
    key = (rows.data_ptr(), rows.shape, tile, columns)
    known = scratch.descriptors.get(key)
    if known is None:
        known = scratch.descriptors[key] = TensorDescriptor.from_tensor(rows, [tile, columns])
    return known


def _slots(
    scratch: ExpertScratch, base: Tensor, dtype: torch.dtype, at: int, shape: tuple[int, ...],
    slot_bytes: int, block: tuple[int, ...],
) -> TensorDescriptor:  # fmt: skip
    """Matrices of all slots: [slots, (matrices,) rows, columns], the slots `slot_bytes` apart."""
    key = (base.data_ptr(), at, shape, slot_bytes, block)
    known = scratch.descriptors.get(key)
    if known is not None:
        return known
    typed = base[at:].view(dtype)
    stride = slot_bytes // dtype.itemsize
    slots = (len(typed) - math.prod(shape)) // stride + 1
    strides = [stride, *(math.prod(shape[place:]) for place in range(1, len(shape))), 1]
    scratch.descriptors[key] = TensorDescriptor(typed, [slots, *shape], strides, [1, *block])
    return scratch.descriptors[key]


def grouped_products(
    x: Tensor, pool: ExpertPool, scratch: ExpertScratch, sizes: GroupSizes
) -> None:  # fmt: skip
    """The scratch's values = down of silu(gate) * up, of the sorted rows of x."""
    record, unit = pool.record, pool.views()[2]["UNIT"]
    hidden, inner = record.hidden, record.intermediate
    acts, programs = _acts(scratch, inner), _programs(x.device)
    shared = {"UNIT": unit, "INNER": inner, "WIDTH": hidden, "TILE": sizes.tile}
    own = sizes.gate_up
    _group_gate_up[(programs,)](
        x, scratch.row_pairs, len(x) * scratch.top_k, pool.views()[0], acts, pool.places,
        scratch.tiles, scratch.tile_counts, **shared, TOP_K=scratch.top_k, BLOCK=own.block,
        COLUMNS=min(own.columns, triton.next_power_of_2(hidden)), PROGRAMS=programs,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    own = sizes.down
    _group_down[(programs,)](
        acts, pool.views()[0], scratch.values, pool.places, scratch.tiles, scratch.tile_counts,
        **shared, DOWN_AT=pool.at(record.down_at), BLOCK=own.block,
        COLUMNS=min(own.columns, triton.next_power_of_2(inner)), PROGRAMS=programs,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip


def span_products(
    x: Tensor, pool: ExpertPool, slot_bytes: int, scratch: ExpertScratch, sizes: SpanSizes
) -> None:  # fmt: skip
    """As `grouped_products`; the places are multiples of `slot_bytes`, and the pool has the type of
    the rows."""
    record = pool.record
    hidden, inner = record.hidden, record.intermediate
    acts, programs = _acts(scratch, inner), sizes.programs * _programs(x.device)
    shared = {"SLOT": slot_bytes // UNIT_BYTES, "INNER": inner, "WIDTH": hidden}
    shared |= {"TILE": sizes.tile, "PROGRAMS": programs, "FLIP": sizes.flip}
    own = sizes.gate_up
    columns = min(own.columns, triton.next_power_of_2(hidden))
    block: tuple[int, ...] = (1 if sizes.flip else 2, own.block, columns)
    weight = _slots(scratch, pool.base, x.dtype, 0, (2, inner, hidden), slot_bytes, block)
    span_gate_up[(programs,)](
        x, scratch.row_pairs, len(x) * scratch.top_k, weight, acts, pool.places,
        scratch.tiles, scratch.tile_counts, **shared, TAIL=sizes.tail, TOP_K=scratch.top_k,
        BLOCK=own.block, COLUMNS=columns, num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    own, flat, tail = sizes.down, int(sizes.flat), 0 if sizes.flat else sizes.tail
    columns = min(own.columns, triton.next_power_of_2(inner))
    block = (own.block, columns)
    at, shape = record.down_at, (hidden, inner)
    weight = _slots(scratch, pool.base, x.dtype, at, shape, slot_bytes, block)
    span_down[(programs,)](
        _tiles(scratch, acts, sizes.tile, columns),
        _tiles(scratch, acts, tail or sizes.tile, columns), weight, scratch.values, pool.places,
        scratch.tiles[flat], scratch.tile_counts[flat:], **shared, TAIL=tail, BLOCK=own.block,
        COLUMNS=columns, FLATTEN=sizes.flat, num_warps=own.warps, num_stages=own.stages,
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
    widens = pool.record.kind in ("int8", "int4")
    if x.dtype.itemsize != 2 or not (widens or pool.record.kind == "bf16"):
        slot_bytes = None
    if slot_bytes is None and not (widens and x.dtype.itemsize == 2):
        sizes = without_slots(sizes)
    if isinstance(sizes, TileSizes | Int4Sizes):
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
    if widens:
        pool = widen_experts(pool, scratch)
        slot_bytes = pool.record.nbytes
    if isinstance(sizes, SpanSizes):
        assert slot_bytes is not None
        span_products(x, pool, slot_bytes, scratch, sizes)
    else:
        grouped_products(x, pool, scratch, sizes)
    combine(scratch.values, routed, experts, hidden, scratch.pair_rows, norm=norm)
