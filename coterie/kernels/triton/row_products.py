"""Triton kernels for decode steps of several rows, with patches on any of them: seven launches a
dense layer, each started before the last has ended (PDL: see `gemv`).

    norm_rows      hidden += product (+ its patch), norm, and x a^T of the products that read it
    product_rows   q, k and v with their patches and bias
    attention
    product_rows   o; programs beside it compute x a^T, which the next norm reads
    norm_rows      as above
    gate_up_rows   silu(gate) * up with their patches
    product_rows   down, as o

y = out_scale * (W (in_scale * x)) + shift + (x a^T) b. What a kernel needs of the patches is
requested before it waits, so that most of it costs no time. A row without a patch has rank 0 in the
table. `narrow_rows` has the same for rows with few ranks. Import this module only where triton is
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.batch import KINDS, PatchRows
from coterie.kernels.triton import narrow_rows
from coterie.kernels.triton.patches import (
    _A,
    _B,
    _DEEP,
    _FULL,
    _IN_SCALE,
    _OUT_SCALE,
    _RANK,
    _SHIFT,
    _WIDE,
    RANKS,
    SITE,
    _matrix,
    _pieces,
    _scaled,
    _shrink,
    _tile,
    apply_patch,
    fetch_lines,
    site_of,
)

# rows of a program of a product; columns of x of which one program computes terms
ROWS, CHUNK = 32, 1024


@triton.jit
def _rows_tile(
    own, live, first, column, inside, width,
    RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """b of each row's site, [rows, RANKS, columns]: in this order a thread has all ranks of its
    columns. And the rows' ranks."""
    address = tl.load(own + _B, mask=live, other=0)
    rank = tl.load(own + _RANK, mask=live, other=0).to(tl.int32)
    r = first + tl.arange(0, RANKS)
    used = (r[None, :, None] < rank[:, None, None]) & inside[None, None, :]
    place = r[None, :, None] * width + column[None, None, :]
    narrow = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), [ALIGN])
    if KIND == _FULL:
        wide = (tl.load(own + _WIDE, mask=live, other=0) != 0)[:, None, None]
        full = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), [ALIGN])
        tile = tl.load(narrow[:, None, None] + place, mask=used & (wide == 0), other=0)
        tile = tile.to(tl.float32)
        tile += tl.load(full[:, None, None] + place, mask=used & wide, other=0)
    else:
        tile = tl.load(narrow[:, None, None] + place, mask=used, other=0)
    return tile, rank


@triton.jit
def _rows_vector(own, live, WORD: tl.constexpr, column, inside, missing):
    """A vector of each row's site, [rows, columns]."""
    address = tl.load(own + WORD, mask=live, other=0)
    place = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), [16])
    used = (address != 0)[:, None] & inside[None, :]
    return tl.load(place[:, None] + column[None, :], mask=used, other=missing)


@triton.jit
def _rows_terms(terms, rank, first, RANKS: tl.constexpr):
    """Terms first .. of each row, [rows, RANKS]."""
    r = first + tl.arange(0, RANKS)
    return tl.load(terms[:, None] + r[None, :], mask=r[None, :] < rank[:, None], other=0)


@triton.jit
def _rows_patch(
    y, tile, factor, rank, own, terms, live, column, inside, width,
    RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """out_scale * y + shift + terms b of some columns of rows; `tile` and `factor`: the first ranks
    of b and of the terms."""
    if KIND == _FULL:
        y = y * _rows_vector(own, live, _OUT_SCALE, column, inside, 1.0)
        y = y + _rows_vector(own, live, _SHIFT, column, inside, 0.0)
    y += tl.sum(tile.to(tl.float32) * factor[:, :, None], 1)
    if KIND >= _DEEP:
        for first in range(RANKS, tl.max(rank, 0), RANKS):
            tile, _ = _rows_tile(own, live, first, column, inside, width, RANKS, KIND, ALIGN)
            factor = _rows_terms(terms, rank, first, RANKS)
            y += tl.sum(tile.to(tl.float32) * factor[:, :, None], 1)
    return y


@triton.jit
def _fetch_rows(
    weight, first, begin, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SHARE: tl.constexpr
):
    """Have the L2 cache load a tile of the weight, which never changes, before the wait."""
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    row = (first + tl.arange(0, COLUMNS)).to(tl.int64)
    place = weight + row * WIDTH + begin
    left = tl.minimum(WIDTH - begin, SHARE) * SIZE
    fetch_lines(place.to(tl.int64), tl.zeros([COLUMNS], tl.int32) + left)


@triton.jit
def _load_depth(place, inside, EVEN: tl.constexpr):
    return tl.load(place) if EVEN else tl.load(place, mask=inside, other=0)


# the sites' numbers change from layer to layer: one compilation is enough for all
@triton.jit(do_not_specialize=["before", "behind", "count"])
def _norm_rows(
    hidden, planes, pieces, gain, table, summed, normed, terms,
    eps, count, sites, room, before, behind,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, NORM: tl.constexpr, PATCH: tl.constexpr, RANKS: tl.constexpr,
    KIND: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """summed = hidden + the sum of planes (patched); normed = rms_norm(summed) * gain; terms = x
    a^T of the PARTS that read the norm, one program for each."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    place = row * WIDTH + column
    if PDL:
        gdc_launch_dependents()
    if PATCH:
        own = table + row * sites * SITE
        if PLANES > 0:
            b = _matrix(own + before * SITE, _B)
            up = _tile(b, 0, column, inside, WIDTH, RANKS, KIND, ALIGN)
        if PARTS > 0:
            a = _matrix(own + (behind + part) * SITE, _A)
            down = _tile(a, 0, column, inside, WIDTH, RANKS, KIND, ALIGN)
    if NORM:
        scales = tl.load(gain + column, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(hidden + place, mask=inside, other=0)
    if PLANES > 0:
        y = tl.zeros([PADDED], tl.float32)
        for plane in tl.static_range(PLANES):
            source = planes + (plane * count + row) * WIDTH + column
            y += tl.load(source, mask=inside, other=0).to(tl.float32)
        if PATCH:
            made = pieces + row * PIECES * room
            y = _scaled(y, own + before * SITE, column, inside, KIND)
            patch = (y, b, up, _pieces(made, 0, b[1], room, PIECES, RANKS))
            # fmt: off
            y = apply_patch(patch, made, room, column, inside, WIDTH, PIECES, RANKS, KIND, ALIGN)
            # fmt: on
        x = (x.to(tl.float32) + y).to(x.dtype)
        tl.store(summed + place, x, mask=inside & (part == 0))
    if NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        result = ((wide * scale).to(x.dtype).to(tl.float32) * scales).to(x.dtype)
        tl.store(normed + place, result, mask=inside & (part == 0))
        if PATCH and PARTS > 0:
            target = terms + (row * PARTS + part) * room
            # uses the norm before rounding, so that this sum does not wait for the one above
            _shrink(wide * scales, scale, a, down, target, 0, RANKS, column, inside, WIDTH,
                    RANKS, KIND, ALIGN)  # fmt: skip


@triton.jit
def _product_tile(
    program, row_tiles, x, weight, bias, y, table, terms, count, sites, room, site,
    FIRST: tl.constexpr, OTHER: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    SHARE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, EXPAND: tl.constexpr,
    RANKS: tl.constexpr, KIND: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of one part, and one part of the depth."""
    FIRST_TILES: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    OTHER_TILES: tl.constexpr = (OTHER + COLUMNS - 1) // COLUMNS
    TOTAL: tl.constexpr = FIRST + (PARTS - 1) * OTHER
    split = program // row_tiles % SPLITS
    tile = program // (row_tiles * SPLITS)
    behind = tl.maximum(tile - FIRST_TILES, 0)
    part = tl.where(tile < FIRST_TILES, 0, 1 + behind // OTHER_TILES)
    tile = tl.where(part == 0, tile, behind % OTHER_TILES)
    start = tl.where(part == 0, 0, FIRST + (part - 1) * OTHER)
    # the compiler has to see that 16 divides the width
    UNIT: tl.constexpr = 16 if FIRST % 16 == 0 and OTHER % 16 == 0 else 1
    width = tl.where(part == 0, FIRST // UNIT, OTHER // UNIT) * UNIT
    row = (program % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    begin = split * SHARE
    if FETCH:
        _fetch_rows(weight, start + tile * COLUMNS, begin, WIDTH, COLUMNS, SHARE)
    if EXPAND:
        own = table + (row * sites + site + part) * SITE
        up, rank = _rows_tile(own, live, 0, column, inside, width, RANKS, KIND, 16)
    if BIAS:
        biases = tl.load(bias + start + column, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    if EXPAND:
        # before the loop, behind which nothing has to be waited for
        made = terms + (row * PARTS + part) * room
        factor = _rows_terms(made, rank, 0, RANKS)
    # rows and columns behind the last repeat another one
    source = x + tl.where(live, row, 0)[:, None] * WIDTH
    tensor = weight + (start + tl.where(inside, column, 0)).to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    EVEN: tl.constexpr = WIDTH % DEPTH == 0 and SHARE % DEPTH == 0
    PRECISION: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    for first in tl.range(begin, tl.minimum(begin + SHARE, WIDTH), DEPTH, num_stages=STAGES):
        depth = first + tl.arange(0, DEPTH)[None, :]
        left = _load_depth(source + depth, depth < WIDTH, EVEN)
        right = _load_depth(tensor + depth, depth < WIDTH, EVEN)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    if EXPAND:
        # fmt: off
        total = _rows_patch(total, up, factor, rank, own, made, live, column, inside, width,
                            RANKS, KIND, 16)
        # fmt: on
    if BIAS:
        total += biases[None, :]
    target = y + (split * count + row)[:, None] * TOTAL + (start + column)[None, :]
    mask = live[:, None] & inside[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _shrink_chunk(
    index, x, table, pieces, sites, room, site,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, RANKS: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x a^T of some columns of one row."""
    row = (index // CHUNKS).to(tl.int64)
    column = index % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    inside = column < WIDTH
    a = _matrix(table + (row * sites + site) * SITE, _A)
    down = _tile(a, 0, column, inside, WIDTH, RANKS, KIND, 16)
    if PDL:
        gdc_wait()
    values = tl.load(x + row * WIDTH + column, mask=inside, other=0).to(tl.float32)
    target = pieces + index.to(tl.int64) * room
    _shrink(values, 1.0, a, down, target, 0, RANKS, column, inside, WIDTH, RANKS, KIND, 16)


@triton.jit(do_not_specialize=["count", "site"])
def _product_rows(
    x, raw, weight, bias, y, table, terms, pieces, count, sites, room, site,
    FIRST: tl.constexpr, OTHER: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    SHARE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BIAS: tl.constexpr, EXPAND: tl.constexpr, SHRINK: tl.constexpr, RANKS: tl.constexpr,
    KIND: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [SPLITS, count, all parts] = x times the weight, whose rows are parts of FIRST, OTHER,
    OTHER .. rows; with EXPAND their patches by `terms`, and the bias. With SHRINK the last programs
    compute the pieces of raw a^T."""
    TILES: tl.constexpr = tl.cdiv(FIRST, COLUMNS) + (PARTS - 1) * tl.cdiv(OTHER, COLUMNS)
    row_tiles = tl.cdiv(count, ROWS)
    tiles = row_tiles * SPLITS * TILES
    program = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    # fmt: off
    if program < tiles:
        _product_tile(program, row_tiles, x, weight, bias, y, table, terms, count, sites, room,
                      site, FIRST, OTHER, PARTS, WIDTH, SHARE, SPLITS, ROWS, COLUMNS, DEPTH,
                      STAGES, BIAS, EXPAND, RANKS, KIND, FETCH, PDL)
    elif SHRINK:
        _shrink_chunk(program - tiles, raw, table, pieces, sites, room, site,
                      WIDTH, CHUNK, CHUNKS, RANKS, KIND, PDL)
    # fmt: on


@triton.jit(do_not_specialize=["site"])
def _shrink_rows(
    x, table, pieces, sites, room, site,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, RANKS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    # fmt: off
    _shrink_chunk(tl.program_id(0), x, table, pieces, sites, room, site,
                  WIDTH, CHUNK, CHUNKS, RANKS, KIND, False)
    # fmt: on


@triton.jit(do_not_specialize=["count", "site"])
def _expand_rows(
    y, table, terms, count, sites, room, site,
    FIRST: tl.constexpr, OTHER: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The patches of parts of FIRST, OTHER .. columns of y, in place. Grid: (tiles of all parts,
    tiles of rows)."""
    FIRST_TILES: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    OTHER_TILES: tl.constexpr = (OTHER + COLUMNS - 1) // COLUMNS
    TOTAL: tl.constexpr = FIRST + (PARTS - 1) * OTHER
    tile = tl.program_id(0)
    behind = tl.maximum(tile - FIRST_TILES, 0)
    part = tl.where(tile < FIRST_TILES, 0, 1 + behind // OTHER_TILES)
    tile = tl.where(part == 0, tile, behind % OTHER_TILES)
    start = tl.where(part == 0, 0, FIRST + (part - 1) * OTHER)
    UNIT: tl.constexpr = 16 if FIRST % 16 == 0 and OTHER % 16 == 0 else 1
    width = tl.where(part == 0, FIRST // UNIT, OTHER // UNIT) * UNIT
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    own = table + (row * sites + site + part) * SITE
    up, rank = _rows_tile(own, live, 0, column, inside, width, RANKS, KIND, 16)
    place = y + row[:, None] * TOTAL + (start + column)[None, :]
    mask = live[:, None] & inside[None, :]
    value = tl.load(place, mask=mask, other=0).to(tl.float32)
    made = terms + (row * PARTS + part) * room
    factor = _rows_terms(made, rank, 0, RANKS)
    # fmt: off
    value = _rows_patch(value, up, factor, rank, own, made, live, column, inside, width,
                        RANKS, KIND, 16)
    # fmt: on
    tl.store(place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "site"])
def _gate_up_rows(
    x, weight, acts, raw, table, terms, count, sites, room, site,
    INNER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, PATCH: tl.constexpr, RANKS: tl.constexpr,
    KIND: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """acts [count, INNER] = silu(gate) * up with their patches, times down's in_scale; raw: without
    that scale, where some patch may have one."""
    row_tiles = tl.cdiv(count, ROWS)
    row = (tl.program_id(0) % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(0) // row_tiles
    live = row < count
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < INNER
    if PDL:
        gdc_launch_dependents()
    if FETCH:
        _fetch_rows(weight, tile * COLUMNS, 0, WIDTH, COLUMNS, WIDTH)
        _fetch_rows(weight, INNER + tile * COLUMNS, 0, WIDTH, COLUMNS, WIDTH)
    if PATCH:
        own = table + (row * sites + site) * SITE
        gate_b, gate_rank = _rows_tile(own, live, 0, column, inside, INNER, RANKS, KIND, 16)
        up_b, up_rank = _rows_tile(own + SITE, live, 0, column, inside, INNER, RANKS, KIND, 16)
        if KIND == _FULL:
            in_scale = _rows_vector(own + 2 * SITE, live, _IN_SCALE, column, inside, 1.0)
    if PDL:
        gdc_wait()
    if PATCH:
        made = terms + row * 2 * room
        gate_factor = _rows_terms(made, gate_rank, 0, RANKS)
        up_factor = _rows_terms(made + room, up_rank, 0, RANKS)
    source = x + tl.where(live, row, 0)[:, None] * WIDTH
    gates = weight + tl.where(inside, column, 0).to(tl.int64)[:, None] * WIDTH
    ups = gates + INNER * WIDTH
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    EVEN: tl.constexpr = WIDTH % DEPTH == 0
    PRECISION: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    for first in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        depth = first + tl.arange(0, DEPTH)[None, :]
        left = _load_depth(source + depth, depth < WIDTH, EVEN)
        one = _load_depth(gates + depth, depth < WIDTH, EVEN)
        two = _load_depth(ups + depth, depth < WIDTH, EVEN)
        gate = tl.dot(left, tl.trans(one), gate, input_precision=PRECISION)
        up = tl.dot(left, tl.trans(two), up, input_precision=PRECISION)
    if PATCH:
        # fmt: off
        gate = _rows_patch(gate, gate_b, gate_factor, gate_rank, own, made, live, column, inside,
                           INNER, RANKS, KIND, 16)
        up = _rows_patch(up, up_b, up_factor, up_rank, own + SITE, made + room, live, column,
                         inside, INNER, RANKS, KIND, 16)
        # fmt: on
    result = gate / (1.0 + tl.exp(-gate)) * up
    place = row[:, None] * INNER + column[None, :]
    mask = live[:, None] & inside[None, :]
    if PATCH and KIND == _FULL:
        tl.store(raw + place, result.to(raw.dtype.element_ty), mask=mask)
        result = result * in_scale
    tl.store(acts + place, result.to(acts.dtype.element_ty), mask=mask)


class RowSize(NamedTuple):
    """Of the programs of a product: columns, depth of a step, parts of the depth, steps that are
    loaded at a time, warps."""

    columns: int
    depth: int
    splits: int
    stages: int
    warps: int


# programs that keep a large device busy; the least depth of one of them
_PROGRAMS, _LEAST_DEPTH = 128, 256
# shared memory of a program, bytes
_STAGED = 160 * 1024
# whether programs have the L2 cache load their weights before they wait
_FETCH = True


def product_size(
    count: int, width: int, item: int, both: bool = False, split: bool = True
) -> RowSize:
    """Sizes for a weight [count, width] of items of `item` bytes. They do not depend on the number
    of rows, so that a row's sums do not either."""
    columns, depth = 32, min(128, max(16, triton.next_power_of_2(width)))
    tiles = triton.cdiv(count, columns)
    splits = max(1, min(_PROGRAMS // tiles, width // _LEAST_DEPTH)) if split else 1
    share = triton.cdiv(triton.cdiv(width, splits), depth) * depth
    stage = (ROWS + columns * (2 if both else 1)) * depth * item
    # one more than are loaded at a time: all steps of a short product
    stages = max(1, min(7, _STAGED // stage + 1, triton.cdiv(share, depth) + 1))
    return RowSize(columns, depth, triton.cdiv(width, share), stages, 4)


class RowProduct(NamedTuple):
    """The product of o or down of a layer, not yet added to the hidden states."""

    # [splits, T, hidden] fp32: their sum
    planes: Tensor
    layer: int
    part: str
    # [T, pieces, room]: x a^T, to be summed; None without patches
    pieces: Tensor | None


class PatchedNorm(NamedTuple):
    """A norm, and the parts of a layer that read it."""

    gain: Tensor
    eps: float
    layer: int = 0
    parts: tuple[str, ...] = ()


class NormedRows(NamedTuple):
    """Hidden states, their norm, and the terms [T, parts, room] of the parts that read it."""

    hidden: Tensor
    normed: Tensor
    terms: Tensor


def _room(rows: PatchRows | None) -> int:
    return 16 if rows is None else -(-rows.rank // 16) * 16


def _patch_arguments(rows: PatchRows | None, unused: Tensor) -> tuple[Any, int]:
    """Table, and sites of a row."""
    return (unused, 0) if rows is None else (rows.table, rows.table.shape[1])


def _launch(dependent: bool) -> dict[str, Any]:
    # the interpreter knows no launch options
    return {"PDL": dependent, **({"launch_pdl": True} if dependent else {})}


# elements of a and b that fit the registers of one program of `norm_rows`, by kind
_NORM_TILE = {0: 32768, 1: 32768, 2: 16384}
_DEEP_KIND, _WIDE_KIND = KINDS.index("deep"), KINDS.index("wide")


def norm_rows(
    rows: PatchRows | None, hidden: Tensor, product: RowProduct | None, norm: PatchedNorm | None,
    dependent: bool = False,
) -> NormedRows:  # fmt: skip
    """hidden + product with its patch; and the norm of that."""
    count, width = hidden.shape
    parts = norm.parts if norm is not None and rows is not None else ()
    summed = torch.empty_like(hidden) if product is not None else hidden
    normed = torch.empty_like(hidden) if norm is not None else hidden
    room = _room(rows)
    terms = torch.empty((count, max(1, len(parts)), room), device=hidden.device)
    pieces = product.pieces if product is not None else None
    padded = triton.next_power_of_2(width)
    kind = 0 if rows is None else rows.kind
    ranks = max(2, min(RANKS, _NORM_TILE[kind] // padded))
    # columns of a warp: all ranks of 4 or 8 columns for a thread
    columns = 128 if padded <= 1024 or kind == _WIDE_KIND else 256
    table, sites = _patch_arguments(rows, hidden)
    grid = (count, max(1, len(parts)))
    given = (
        hidden, hidden if product is None else product.planes,
        terms if pieces is None else pieces, hidden if norm is None else norm.gain, table,
        summed, normed, terms, 0.0 if norm is None else norm.eps, count, sites, room,
        0 if product is None else site_of(product.layer, product.part),
        site_of(norm.layer, parts[0]) if norm is not None and parts else 0,
    )  # fmt: skip
    counts = {
        "WIDTH": width,
        "PADDED": padded,
        "PLANES": 0 if product is None else len(product.planes),
        "PIECES": 1 if pieces is None else pieces.shape[1],
        "PARTS": len(parts),
    }
    few = rows is not None and kind == 0 and norm is not None
    if few and narrow_rows.fits_norm(padded, counts["PIECES"]):
        warps = narrow_rows.norm_warps(padded)
        sizes = {**counts, "WARPS": warps, "num_warps": warps}
        narrow_rows._narrow_norm[grid](*given, **sizes, **_launch(dependent))
        return NormedRows(summed, normed, terms)
    _norm_rows[grid](
        *given, **counts, NORM=norm is not None, PATCH=rows is not None, RANKS=ranks,
        # fewer ranks at a time than there may be: in a loop
        KIND=max(kind, _DEEP_KIND) if ranks < RANKS else kind,
        ALIGN=columns // 16, num_warps=min(16, max(1, padded // columns)), **_launch(dependent),
    )  # fmt: skip
    return NormedRows(summed, normed, terms)


def product_rows(
    rows: PatchRows | None, x: Tensor, weight: Tensor, layer: int,
    parts: tuple[tuple[str, int], ...], terms: Tensor, bias: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, width] times a weight whose rows are `parts` (name, rows), with their patches and the
    bias; all parts behind the first have as many rows."""
    count, width = x.shape
    total, first = len(weight), parts[0][1]
    other = parts[-1][1]
    size = product_size(total, width, weight.element_size(), split=False)
    few = narrow_rows.fits_product(rows, x, weight, width)
    columns = narrow_rows.columns_of(triton.cdiv(total, 32)) if few else size.columns
    y = torch.empty((count, total), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(first, columns) + (len(parts) - 1) * triton.cdiv(other, columns)
    table, sites = _patch_arguments(rows, x)
    grid = (triton.cdiv(count, ROWS) * tiles,)
    given = (
        weight, x if bias is None else bias, y, table, terms, terms, count, sites, _room(rows),
        site_of(layer, parts[0][0]),
    )  # fmt: skip
    counts = {
        "FIRST": first,
        "OTHER": other,
        "PARTS": len(parts),
        "BIAS": bias is not None,
        "EXPAND": rows is not None,
        "SHRINK": False,
        "CHUNK": 16,
        "CHUNKS": 1,
    }
    if few:
        sizes = narrow_rows.product_arguments(width, width, columns)
        narrow_rows._narrow_product[grid](x, *given, **counts, **sizes, **_launch(dependent))
        return y
    sizes = _product_arguments(weight, (first, other), width, size, rows, dependent)
    _product_rows[grid](x, x, *given, **counts, **sizes)
    return y


def split_product_rows(
    rows: PatchRows | None, x: Tensor, raw: Tensor, weight: Tensor, layer: int, part: str,
    dependent: bool = False,
) -> RowProduct:  # fmt: skip
    """x times the weight, in planes; and the pieces of raw a^T."""
    count, width = x.shape
    total, chunk = len(weight), min(CHUNK, triton.next_power_of_2(width))
    size = product_size(total, width, weight.element_size())
    chunks = triton.cdiv(width, chunk)
    planes = torch.empty((size.splits, count, total), device=x.device)
    room = _room(rows)
    pieces = None if rows is None else torch.empty((count, chunks, room), device=x.device)
    sizes = _product_arguments(weight, (total,), width, size, rows, dependent)
    few = narrow_rows.fits_product(rows, x, weight, sizes["SHARE"])
    programs = triton.cdiv(total, 32) * size.splits
    columns = narrow_rows.columns_of(programs) if few else size.columns
    tiles = triton.cdiv(count, ROWS) * triton.cdiv(total, columns) * size.splits
    table, sites = _patch_arguments(rows, x)
    grid = (tiles + (0 if rows is None else count * chunks),)
    given = (
        weight, x, planes, table, x, planes if pieces is None else pieces, count, sites, room,
        site_of(layer, part),
    )  # fmt: skip
    counts = {
        "FIRST": total,
        "OTHER": total,
        "PARTS": 1,
        "BIAS": False,
        "EXPAND": False,
        "SHRINK": rows is not None,
        "CHUNK": chunk,
        "CHUNKS": chunks,
    }
    if few:
        sizes = narrow_rows.product_arguments(width, sizes["SHARE"], columns)
        narrow_rows._narrow_product[grid](x, *given, **counts, **sizes, **_launch(dependent))
    else:
        _product_rows[grid](x, raw, *given, **counts, **sizes)
    return RowProduct(planes, layer, part, pieces)


def shrink_rows(rows: PatchRows, x: Tensor, layer: int, part: str) -> Tensor:
    """The pieces of x a^T [T, pieces, room] of one part."""
    count, width = x.shape
    chunk = min(CHUNK, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, chunk)
    pieces = torch.empty((count, chunks, _room(rows)), device=x.device)
    _shrink_rows[(count * chunks,)](
        x, rows.table, pieces, rows.table.shape[1], _room(rows), site_of(layer, part),
        WIDTH=width, CHUNK=chunk, CHUNKS=chunks, RANKS=RANKS, KIND=rows.kind, num_warps=4,
    )  # fmt: skip
    return pieces


def expand_rows(
    rows: PatchRows, y: Tensor, layer: int, parts: tuple[tuple[str, int], ...], terms: Tensor
) -> None:
    """Apply the patches of y's parts in place."""
    count, first, other = len(y), parts[0][1], parts[-1][1]
    columns = 32
    tiles = triton.cdiv(first, columns) + (len(parts) - 1) * triton.cdiv(other, columns)
    _expand_rows[(tiles, triton.cdiv(count, ROWS))](
        y, rows.table, terms, count, rows.table.shape[1], _room(rows), site_of(layer, parts[0][0]),
        FIRST=first, OTHER=other, PARTS=len(parts), ROWS=ROWS, COLUMNS=columns, RANKS=RANKS,
        KIND=rows.kind, num_warps=4,
    )  # fmt: skip


def _product_arguments(
    weight: Tensor, heights: tuple[int, ...], width: int, size: RowSize, rows: PatchRows | None,
    dependent: bool,
) -> dict[str, Any]:  # fmt: skip
    share = triton.cdiv(triton.cdiv(width, size.splits), size.depth) * size.depth
    return {
        "WIDTH": width,
        "SHARE": share,
        "SPLITS": size.splits,
        **_tile_arguments(weight, heights, width, size, rows, dependent),
    }


def _tile_arguments(
    weight: Tensor, heights: tuple[int, ...], width: int, size: RowSize, rows: PatchRows | None,
    dependent: bool,
) -> dict[str, Any]:  # fmt: skip
    # whole tiles at addresses that the instruction accepts; the interpreter does not have it
    even = all(height % size.columns == 0 for height in heights)
    aligned = width * weight.element_size() % 16 == 0
    return {
        "ROWS": ROWS,
        "COLUMNS": size.columns,
        "DEPTH": size.depth,
        "STAGES": size.stages,
        "RANKS": RANKS,
        "KIND": 0 if rows is None else rows.kind,
        "FETCH": _FETCH and dependent and even and aligned,
        "num_warps": size.warps,
        **_launch(dependent),
    }


def gate_up_rows(
    rows: PatchRows | None, x: Tensor, weight: Tensor, layer: int, terms: Tensor,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """silu(gate) * up as down's product reads it, and as its patch does."""
    count, width = x.shape
    inner = len(weight) // 2
    size = product_size(inner, width, weight.element_size(), both=True, split=False)
    acts = torch.empty((count, inner), dtype=x.dtype, device=x.device)
    wide = rows is not None and rows.kind == _WIDE_KIND
    raw = torch.empty_like(acts) if wide else acts
    table, sites = _patch_arguments(rows, x)
    row_tiles = triton.cdiv(count, ROWS)
    tiles = row_tiles * triton.cdiv(inner, size.columns)
    if narrow_rows.fits_product(rows, x, weight, width, both=True):
        columns = narrow_rows.columns_of(triton.cdiv(inner, 32))
        narrow_rows._narrow_gate_up[(row_tiles * triton.cdiv(inner, columns),)](
            x, weight, acts, table, terms, count, sites, _room(rows), site_of(layer, "gate"),
            INNER=inner, EXPAND=rows is not None, **narrow_rows.tile_arguments(width, columns),
            **_launch(dependent),
        )  # fmt: skip
        return acts, acts
    given = _tile_arguments(weight, (inner,), width, size, rows, dependent)
    if wide:
        # two tiles of fp32: fewer ranks at a time, and the registers of more warps
        given |= {"RANKS": RANKS // 2, "num_warps": 8}
    _gate_up_rows[(tiles,)](
        x, weight, acts, raw, table, terms, count, sites, _room(rows), site_of(layer, "gate"),
        INNER=inner, WIDTH=width, PATCH=rows is not None, **given,
    )  # fmt: skip
    return acts, raw
