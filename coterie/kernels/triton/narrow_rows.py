"""The kernels of `row_products` for decoding rows without patches, or with low-rank bf16 ones of
few ranks, in Gluon, Triton's language with explicit layouts. The sums of a product are the same,
bit by bit.

A product copies its weight, which never changes, to shared memory before it waits for x, and
applies patches while x arrives. In a norm a thread has all ranks of its own columns, so that terms
times b needs nothing from other threads; the sums x a^T are exchanged once: every thread gets 16
columns of one rank. Import this module only where triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from coterie.kernels.batch import FEW, WORDS, PatchRows

# words of one site in a step's table, and the places of a, b and the rank
SITE = gl.constexpr(WORDS)
_A, _B, _RANK = gl.constexpr(0), gl.constexpr(1), gl.constexpr(5)
RANKS = gl.constexpr(FEW)
# rows of which a program has a and b at once; the most pieces of terms that it sums
NORM_WIDTHS, MOST_PIECES = range(128, 2049), 8


@constexpr_function
def _tile_layout(columns: int, warps: int) -> Any:
    """[RANKS, width]: all ranks of `columns` columns in a thread."""
    return gl.BlockedLayout([FEW, columns], [1, 32], [1, warps], [1, 0])


@constexpr_function
def _rank_layout(warps: int) -> Any:
    """[RANKS, threads]: 16 columns of one rank in a thread, all of a rank in one warp."""
    return gl.BlockedLayout([1, FEW], [16 // warps, 2 * warps], [warps, 1], [1, 0])


@gluon.jit
def _request(site, WORD: gl.constexpr, column, inside, WIDTH: gl.constexpr, TILE: gl.constexpr):
    """a or b of a site, [RANKS, columns], zeros behind its rank."""
    address, rank = gl.load(site + WORD), gl.load(site + _RANK).to(gl.int32)
    r = gl.arange(0, RANKS, layout=gl.SliceLayout(1, TILE))
    place = address.to(gl.pointer_type(gl.bfloat16))
    place = gl.multiple_of(place, 16) + r[:, None] * WIDTH + column[None, :]
    return gl.load(place, mask=(r < rank)[:, None] & inside[None, :], other=0.0)


@gluon.jit
def _over_columns(tile, WARPS: gl.constexpr):
    """The sums of a tile [RANKS, columns] over its columns: those of a thread, then of a warp, to
    which all threads give theirs of one rank."""
    COLUMNS: gl.constexpr = tile.shape[1] // (32 * WARPS)
    each = gl.sum(gl.reshape(tile, [RANKS, 32 * WARPS, COLUMNS]), 2)
    return gl.sum(gl.convert_layout(each, _rank_layout(WARPS)), 1)


@gluon.jit
def _shared(values, LAYOUT: gl.constexpr):
    """Values in another layout, by shared memory. The compiler moves loads behind computation, but
    not behind this: all that is requested before it is on its way."""
    ORDER: gl.constexpr = [1, 0] if len(values.shape) == 2 else [0]
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, ORDER)
    return gl.allocate_shared_memory(values.dtype, values.shape, SHARED, values).load(LAYOUT)


@gluon.jit(do_not_specialize=["before", "behind", "count"])
def _narrow_norm(
    hidden, planes, pieces, gain, table, summed, normed, terms,
    eps, count, sites, room, before, behind,
    WIDTH: gl.constexpr, PADDED: gl.constexpr, PLANES: gl.constexpr, PIECES: gl.constexpr,
    PARTS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `row_products._norm_rows`, where terms and pieces have zeros behind a rank. Grid: (rows,
    PARTS)."""
    COLUMNS: gl.constexpr = PADDED // (32 * WARPS)
    TILE: gl.constexpr = _tile_layout(COLUMNS, WARPS)
    row, part = gl.program_id(0).to(gl.int64), gl.program_id(1)
    column = gl.arange(0, PADDED, layout=gl.SliceLayout(0, TILE))
    inside = column < WIDTH
    place = row * WIDTH + column
    if PDL:
        gdc_launch_dependents()
    own = table + row * sites * SITE
    if PLANES > 0:
        up = _request(own + before * SITE, _B, column, inside, WIDTH, TILE)
    if PARTS > 0:
        down = _request(own + (behind + part) * SITE, _A, column, inside, WIDTH, TILE)
    gains = gl.load(gain + column, mask=inside, other=0.0).to(gl.float32)
    if PDL:
        gdc_wait()
    x = gl.load(hidden + place, mask=inside, other=0.0)
    dtype: gl.constexpr = hidden.dtype.element_ty
    if PLANES > 0:
        source = planes + row * WIDTH + column
        y = gl.load(source, mask=inside, other=0.0).to(gl.float32)
        for plane in gl.static_range(1, PLANES):
            y += gl.load(source + plane * count * WIDTH, mask=inside, other=0.0).to(gl.float32)
        r = gl.arange(0, RANKS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        made = pieces + row * PIECES * room + r
        factor = gl.load(made)
        for piece in gl.static_range(1, PIECES):
            factor += gl.load(made + piece * room)
        factor = _shared(factor, gl.SliceLayout(1, TILE))
        y += gl.sum(up.to(gl.float32) * factor[:, None], 0)
        x = (x.to(gl.float32) + y).to(dtype)
        gl.store(summed + place, x, mask=inside & (part == 0))
    wide = x.to(gl.float32)
    scale = gl.rsqrt(gl.sum(wide * wide, 0) / WIDTH + eps)
    if PARTS > 0:
        # of the norm before it is rounded
        total = _over_columns(down.to(gl.float32) * (wide * gains)[None, :], WARPS) * scale
        r = gl.arange(0, RANKS, layout=gl.SliceLayout(1, _rank_layout(WARPS)))
        gl.store(terms + (row * PARTS + part) * room + r, total)
    result = ((wide * scale).to(dtype).to(gl.float32) * gains).to(dtype)
    gl.store(normed + place, result, mask=inside & (part == 0))


@constexpr_function
def _patch_layout(columns: int) -> Any:
    """b of each row [32, RANKS, columns]: all ranks of a quarter of a row's columns in a thread."""
    return gl.BlockedLayout([1, 1, columns // 4], [8, 1, 4], [4, 1, 1], [2, 0, 1])


@constexpr_function
def _terms_layout() -> Any:
    """Terms [32, RANKS] as they are loaded."""
    return gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])


@constexpr_function
def _tiles(count: int, columns: int) -> int:
    return -(-count // columns)


@constexpr_function
def _copy_layout() -> Any:
    """A step of a row is 8 threads' loads of 16 bytes."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@constexpr_function
def _product_layout() -> Any:
    return gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])


@gluon.jit
def _patched_rows(first, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    PATCH: gl.constexpr = _patch_layout(COLUMNS)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, PATCH)))
    return row.to(gl.int64)


@gluon.jit
def _patched_columns(tile, COLUMNS: gl.constexpr):
    PATCH: gl.constexpr = _patch_layout(COLUMNS)
    own = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, PATCH)))
    return tile * COLUMNS + own


@gluon.jit
def _request_rows(own, live, column, inside, width):
    """b of each row's site, zeros behind its rank."""
    PATCH: gl.constexpr = _patch_layout(column.shape[0])
    address = gl.load(own + _B, mask=live, other=0)
    rank = gl.load(own + _RANK, mask=live, other=0).to(gl.int32)
    r = gl.arange(0, RANKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PATCH)))
    r = gl.expand_dims(gl.expand_dims(r, 0), 2)
    used = (r < rank[:, None, None]) & inside[None, None, :]
    place = gl.multiple_of(address.to(gl.pointer_type(gl.bfloat16)), [16])
    place = place[:, None, None] + r * width + column[None, None, :]
    return gl.load(place, mask=used, other=0.0)


@gluon.jit
def _request_terms(terms, first, count, room, part, PARTS: gl.constexpr, ROWS: gl.constexpr):
    """Terms [ROWS, RANKS] of one of PARTS; rows behind the last repeat row 0."""
    TERMS: gl.constexpr = _terms_layout()
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TERMS))
    row = gl.where(row < count, row, 0).to(gl.int64)
    r = gl.arange(0, RANKS, layout=gl.SliceLayout(0, TERMS))
    return gl.load(terms + ((row * PARTS + part) * room)[:, None] + r[None, :])


@gluon.jit
def _expanded(terms, b, SUMS: gl.constexpr):
    """terms b."""
    factor = _shared(terms, gl.SliceLayout(2, _patch_layout(b.shape[2])))
    return gl.convert_layout(gl.sum(b.to(gl.float32) * gl.expand_dims(factor, 2), 1), SUMS)


@gluon.jit
def _copy(
    source, begin, ROWS: gl.constexpr, SHARE: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, GROUP: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start to copy SHARE columns from `begin` on of rows [ROWS, WIDTH] of which `source` are the
    starts, in steps of DEPTH columns. To memory of its own for each step: between copies to the
    same one there would be barriers. GROUP steps can be waited for at a time."""
    STEPS: gl.constexpr = (SHARE + DEPTH - 1) // DEPTH
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    steps = ()
    for step in gl.static_range(STEPS):
        memory = gl.allocate_shared_memory(source.dtype.element_ty, [ROWS, DEPTH], SHARED)
        column = begin + step * DEPTH + gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
        place = source[:, None] + column[None, :]
        if WIDTH % SHARE == 0 and SHARE % DEPTH == 0:
            async_copy.async_copy_global_to_shared(memory, place)
        else:
            async_copy.async_copy_global_to_shared(memory, place, mask=(column < WIDTH)[None, :])
        if step % GROUP == GROUP - 1 or step == STEPS - 1:
            async_copy.commit_group()
        steps += (memory,)
    return steps


@gluon.jit
def _copy_rows(
    x, first, count, begin, ROWS: gl.constexpr, SHARE: gl.constexpr, WIDTH: gl.constexpr,
    DEPTH: gl.constexpr, GROUP: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Start to copy rows of x; rows behind the last repeat row 0."""
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    row = gl.where(row < count, row, 0).to(gl.int64)
    return _copy(x + row * WIDTH, begin, ROWS, SHARE, WIDTH, DEPTH, GROUP, COPY)


@gluon.jit
def _times(total, left, right, step: gl.constexpr, SUMS: gl.constexpr):
    """total + one step of the left rows times the right rows."""
    first = left[step].load(gl.DotOperandLayout(0, SUMS, 2))
    second = right[step].permute((1, 0)).load(gl.DotOperandLayout(1, SUMS, 2))
    return mma_v2(first, second, total)


@gluon.jit
def _product_tile(
    program, row_tiles, x, weight, bias, y, table, terms, count, sites, room, site,
    FIRST: gl.constexpr, OTHER: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    SHARE: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr, EXPAND: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One tile of one part, and one part of the depth."""
    FIRST_TILES: gl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    OTHER_TILES: gl.constexpr = (OTHER + COLUMNS - 1) // COLUMNS
    TOTAL: gl.constexpr = FIRST + (PARTS - 1) * OTHER
    STEPS: gl.constexpr = (SHARE + DEPTH - 1) // DEPTH
    COPY: gl.constexpr = _copy_layout()
    SUMS: gl.constexpr = _product_layout()
    split = program // row_tiles % SPLITS
    tile = program // (row_tiles * SPLITS)
    behind = gl.maximum(tile - FIRST_TILES, 0)
    part = gl.where(tile < FIRST_TILES, 0, 1 + behind // OTHER_TILES)
    tile = gl.where(part == 0, tile, behind % OTHER_TILES)
    start = gl.where(part == 0, 0, FIRST + (part - 1) * OTHER)
    # the compiler has to see that 16 divides the width
    UNIT: gl.constexpr = 16 if FIRST % 16 == 0 and OTHER % 16 == 0 else 1
    width = gl.where(part == 0, FIRST // UNIT, OTHER // UNIT) * UNIT
    first = program % row_tiles * ROWS
    begin = split * SHARE
    # columns behind the last repeat another one
    column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPY))
    column = (start + gl.where(column < width, column, 0)).to(gl.int64)
    place = weight + column * WIDTH
    weights = _copy(place, begin, COLUMNS, SHARE, WIDTH, DEPTH, STEPS, COPY)
    if EXPAND:
        row = _patched_rows(first, ROWS, COLUMNS)
        own = table + (row * sites + site + part) * SITE
        at = _patched_columns(tile, COLUMNS)
        b = _request_rows(own, row < count, at, at < width, width)
    column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
    inside = column < width
    if BIAS:
        biases = gl.load(bias + start + column, mask=inside, other=0.0).to(gl.float32)
    if PDL:
        gdc_wait()
    xs = _copy_rows(x, first, count, begin, ROWS, SHARE, WIDTH, DEPTH, GROUP, COPY)
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
    if EXPAND:
        own_terms = _request_terms(terms, first, count, room, part, PARTS, ROWS)
        total = _expanded(own_terms, b, SUMS)
    for step in gl.static_range(STEPS):
        if step % GROUP == 0:
            async_copy.wait_group((STEPS - 1 - step) // GROUP)
            gl.thread_barrier()
        total = _times(total, xs, weights, step, SUMS)
    if BIAS:
        total += biases[None, :]
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    target = (split * count + row).to(gl.int64)[:, None] * TOTAL + (start + column)[None, :]
    mask = (row < count)[:, None] & inside[None, :]
    gl.store(y + target, total.to(y.dtype.element_ty), mask=mask)


@gluon.jit
def _shrink_chunk(
    index, x, table, pieces, sites, room, site,
    WIDTH: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """x a^T of some columns of one row."""
    TILE: gl.constexpr = _tile_layout(CHUNK // (32 * WARPS), WARPS)
    row = (index // CHUNKS).to(gl.int64)
    column = index % CHUNKS * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TILE))
    inside = column < WIDTH
    down = _request(table + (row * sites + site) * SITE, _A, column, inside, WIDTH, TILE)
    if PDL:
        gdc_wait()
    values = gl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(gl.float32)
    total = _over_columns(down.to(gl.float32) * values[None, :], WARPS)
    r = gl.arange(0, RANKS, layout=gl.SliceLayout(1, _rank_layout(WARPS)))
    gl.store(pieces + index.to(gl.int64) * room + r, total)


@gluon.jit(do_not_specialize=["count", "site"])
def _narrow_product(
    x, weight, bias, y, table, terms, pieces, count, sites, room, site,
    FIRST: gl.constexpr, OTHER: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    SHARE: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, GROUP: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    BIAS: gl.constexpr, EXPAND: gl.constexpr, SHRINK: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As `row_products._product_rows`."""
    TILES: gl.constexpr = _tiles(FIRST, COLUMNS) + (PARTS - 1) * _tiles(OTHER, COLUMNS)
    if PDL:
        gdc_launch_dependents()
    row_tiles = (count + ROWS - 1) // ROWS
    tiles = row_tiles * SPLITS * TILES
    program = gl.program_id(0)
    # fmt: off
    if program < tiles:
        _product_tile(program, row_tiles, x, weight, bias, y, table, terms, count, sites, room,
                      site, FIRST, OTHER, PARTS, WIDTH, SHARE, SPLITS, ROWS, COLUMNS, DEPTH,
                      GROUP, BIAS, EXPAND, PDL)
    elif SHRINK:
        _shrink_chunk(program - tiles, x, table, pieces, sites, room, site, WIDTH, CHUNK, CHUNKS,
                      WARPS, PDL)
    # fmt: on


@gluon.jit(do_not_specialize=["count", "site"])
def _narrow_gate_up(
    x, weight, acts, table, terms, count, sites, room, site,
    INNER: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, GROUP: gl.constexpr, EXPAND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `row_products._gate_up_rows`."""
    STEPS: gl.constexpr = (WIDTH + DEPTH - 1) // DEPTH
    COPY: gl.constexpr = _copy_layout()
    SUMS: gl.constexpr = _product_layout()
    if PDL:
        gdc_launch_dependents()
    row_tiles = (count + ROWS - 1) // ROWS
    tile, first = gl.program_id(0) // row_tiles, gl.program_id(0) % row_tiles * ROWS
    column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, COPY))
    place = weight + gl.where(column < INNER, column, 0).to(gl.int64) * WIDTH
    gates = _copy(place, 0, COLUMNS, WIDTH, WIDTH, DEPTH, STEPS, COPY)
    ups = _copy(place + INNER * WIDTH, 0, COLUMNS, WIDTH, WIDTH, DEPTH, STEPS, COPY)
    if EXPAND:
        row = _patched_rows(first, ROWS, COLUMNS)
        own = table + (row * sites + site) * SITE
        at = _patched_columns(tile, COLUMNS)
        gate_b = _request_rows(own, row < count, at, at < INNER, INNER)
        up_b = _request_rows(own + SITE, row < count, at, at < INNER, INNER)
    if PDL:
        gdc_wait()
    xs = _copy_rows(x, first, count, 0, ROWS, WIDTH, WIDTH, DEPTH, GROUP, COPY)
    gate = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
    up = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
    if EXPAND:
        gate_terms = _request_terms(terms, first, count, room, 0, 2, ROWS)
        up_terms = _request_terms(terms, first, count, room, 1, 2, ROWS)
        gate = _expanded(gate_terms, gate_b, SUMS)
        up = _expanded(up_terms, up_b, SUMS)
    for step in gl.static_range(STEPS):
        if step % GROUP == 0:
            async_copy.wait_group((STEPS - 1 - step) // GROUP)
            gl.thread_barrier()
        gate = _times(gate, xs, gates, step, SUMS)
        up = _times(up, xs, ups, step, SUMS)
    result = gate / (1.0 + gl.exp(-gate)) * up
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    column = tile * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
    target = acts + row.to(gl.int64)[:, None] * INNER + column[None, :]
    mask = (row < count)[:, None] & (column < INNER)[None, :]
    gl.store(target, result.to(acts.dtype.element_ty), mask=mask)


# rows of a program of a product; columns of x of a step; steps that are waited for at a time; warps
ROWS, DEPTH, GROUP, PRODUCT_WARPS = 32, 64, 16, 4
# programs that keep a large device busy
MOST_PROGRAMS = 128
# of a program's shared memory, bytes that are not for its copies
_SHARED_REST = 4096


def norm_warps(padded: int) -> int:
    """Of the norm of a row of so many columns: 4 columns to a thread, or 8."""
    return padded // (128 if padded <= 1024 else 256)


def fits_norm(padded: int, pieces: int) -> bool:
    # Triton's interpreter does not know Gluon
    return padded in NORM_WIDTHS and pieces <= MOST_PIECES and not triton.knobs.runtime.interpret


def columns_of(programs: int) -> int:
    """Of a program of a product that has so many programs of 32 columns: half as many columns where
    there are few."""
    return 16 if 2 * programs <= MOST_PROGRAMS else 32


def fits_product(
    rows: PatchRows | None, x: Tensor, weight: Tensor, share: int, both: bool = False
) -> bool:
    """Whether the kernels support a product: `share` columns of x at a time, of one weight or of
    two."""
    supported = rows is None or rows.kind == 0
    half = x.dtype == weight.dtype == torch.bfloat16 and x.shape[1] % 8 == 0
    copies = (ROWS + 32 * (2 if both else 1)) * -(-share // DEPTH) * DEPTH * 2
    room = _shared_bytes(x.device) - _SHARED_REST
    return supported and half and copies <= room and not triton.knobs.runtime.interpret


@cache
def _shared_bytes(device: torch.device) -> int:
    """The most that a program can have."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def tile_arguments(width: int, columns: int) -> dict[str, int]:
    return {
        "WIDTH": width,
        "ROWS": ROWS,
        "COLUMNS": columns,
        "DEPTH": DEPTH,
        "GROUP": GROUP,
        "num_warps": PRODUCT_WARPS,
    }


def product_arguments(width: int, share: int, columns: int) -> dict[str, int]:
    return {
        **tile_arguments(width, columns),
        "SHARE": share,
        "SPLITS": triton.cdiv(width, share),
        "WARPS": PRODUCT_WARPS,
    }
