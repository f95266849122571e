"""The kernels of `gemv` for one row with an adapter of few ranks: no launch is added.

x a^T is made in pieces by the programs that make x, each of its own columns, and summed by every
program that applies b to its own rows. Norms scale both at the end. Pieces are fp32 [programs,
parts, RANKS]. Patches with more ranks, other types or vectors take `row_products`. Import this
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.batch import PatchRows
from coterie.kernels.triton.gemv import (
    DeviceMatrix,
    GemvSize,
    _arguments,
    both_times_x,
    request_rows,
    scales_of,
    times_x,
)
from coterie.kernels.triton.patches import _A, _B, _RANK, RANKS, SITE, _matrix, _tile, site_of

# columns of which one program of `first_pieces` makes the pieces
CHUNK = 512


# What a kernel reads is requested before the first sum: sums end in barriers, behind which loads
# would start.


@triton.jit
def _request_pieces(pieces, stride, COUNT: tl.constexpr, RANKS: tl.constexpr):
    """Of one part; their sum over the first axis is its terms."""
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    at, r = tl.arange(0, PADDED), tl.arange(0, RANKS)
    place = pieces + at[:, None] * stride + r[None, :]
    return tl.load(place, mask=(at < COUNT)[:, None], other=0)


@triton.jit
def _expand(pieces, up):
    """The sum of pieces times b's rows."""
    return tl.sum(up.to(tl.float32) * tl.sum(pieces, 0)[:, None], 0)


@triton.jit
def _request_a(site, column, inside, PARTS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """Some columns of a of sites that read the same x: [parts, RANKS, columns]."""
    PADDED: tl.constexpr = triton.next_power_of_2(PARTS)
    part, r = tl.arange(0, PADDED), tl.arange(0, RANKS)
    own = site + part * SITE
    address = tl.load(own + _A, mask=part < PARTS, other=0)
    rank = tl.load(own + _RANK, mask=part < PARTS, other=0)
    used = (r[None, :, None] < rank[:, None, None]) & inside[None, None, :]
    place = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), [16])[:, None, None]
    place = place + r[None, :, None] * WIDTH + column[None, None, :]
    return tl.load(place, mask=used, other=0)


@triton.jit
def _store_pieces(tile, x, pieces, PARTS: tl.constexpr, RANKS: tl.constexpr):
    PADDED: tl.constexpr = triton.next_power_of_2(PARTS)
    part, r = tl.arange(0, PADDED), tl.arange(0, RANKS)
    made = tl.sum(tile.to(tl.float32) * x[None, None, :], 2)
    place = pieces + part[:, None] * RANKS + r[None, :]
    tl.store(place, made, mask=(part < PARTS)[:, None])


@triton.jit(do_not_specialize=["site"])
def _first_pieces(
    x, gain, table, pieces, site,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, RANKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Pieces of (x * gain) a^T where no product makes x. Grid: (chunks, parts)."""
    chunk, part = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < WIDTH
    if PDL:
        gdc_launch_dependents()
    tile = _request_a(table + (site + part) * SITE, column, inside, 1, WIDTH, RANKS)
    scales = tl.load(gain + column, mask=inside, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    values = tl.load(x + column, mask=inside, other=0).to(tl.float32) * scales
    _store_pieces(tile, values, pieces + (chunk * PARTS + part) * RANKS, 1, RANKS)


@triton.jit(do_not_specialize=["site"])
def _norm_product(
    x, gain, weight, scales, bias, y, table, pieces, eps, site,
    FIRST: tl.constexpr, OTHER: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As gemv's: parts of FIRST, OTHER, OTHER .. rows, each a multiple of ROWS."""
    COUNT: tl.constexpr = FIRST + (PARTS - 1) * OTHER
    begin = tl.program_id(0) * ROWS
    row = begin + tl.arange(0, ROWS)
    live = row < COUNT
    part = tl.where(begin < FIRST, 0, 1 + tl.maximum(begin - FIRST, 0) // OTHER)
    start = tl.where(part == 0, 0, FIRST + (part - 1) * OTHER)
    # the compiler has to see that 16 divides the width
    UNIT: tl.constexpr = 16 if FIRST % 16 == 0 and OTHER % 16 == 0 else 1
    width = tl.where(part == 0, FIRST // UNIT, OTHER // UNIT) * UNIT
    if PDL:
        gdc_launch_dependents()
    EVEN: tl.constexpr = WIDTH == PADDED and COUNT % ROWS == 0
    # fmt: off
    tile, own_scales = request_rows(
        weight, scales, row.to(tl.int64), live, WIDTH, PADDED, KIND, EVEN)
    # fmt: on
    b = _matrix(table + (site + part) * SITE, _B)
    up = _tile(b, 0, row - start, live, width, RANKS, 0, 16)
    if BIAS:
        biases = tl.load(bias + row, mask=live, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    given = _request_pieces(pieces + part * RANKS, PARTS * RANKS, PIECES, RANKS)
    total, squares = times_x(tile, own_scales, x, gain, ROWS, WIDTH, PADDED, KIND, True)
    total = (total + _expand(given, up)) * tl.rsqrt(squares / WIDTH + eps)
    if BIAS:
        total += biases
    tl.store(y + row, total.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["site", "behind"])
def _product_add(
    x, weight, scales, hidden, gain, table, pieces, made, site, behind,
    COUNT: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, RANKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As gemv's; made: the pieces of (hidden * gain) a^T of the PARTS that read its norm."""
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    live = row < COUNT
    if PDL:
        gdc_launch_dependents()
    EVEN: tl.constexpr = WIDTH == PADDED and COUNT % ROWS == 0
    # fmt: off
    tile, own_scales = request_rows(
        weight, scales, row.to(tl.int64), live, WIDTH, PADDED, KIND, EVEN)
    # fmt: on
    up = _tile(_matrix(table + site * SITE, _B), 0, row, live, COUNT, RANKS, 0, 16)
    if PARTS > 0:
        down = _request_a(table + behind * SITE, row, live, PARTS, COUNT, RANKS)
        gains = tl.load(gain + row, mask=live, other=0).to(tl.float32)
    if PDL:
        gdc_wait()
    given = _request_pieces(pieces, RANKS, PIECES, RANKS)
    before = tl.load(hidden + row, mask=live, other=0).to(tl.float32)
    total, _ = times_x(tile, own_scales, x, x, ROWS, WIDTH, PADDED, KIND, False)
    result = (before + total + _expand(given, up)).to(hidden.dtype.element_ty)
    tl.store(hidden + row, result, mask=live)
    if PARTS > 0:
        values = tl.where(live, result.to(tl.float32) * gains, 0)
        _store_pieces(down, values, made + program * PARTS * RANKS, PARTS, RANKS)


@triton.jit(do_not_specialize=["site"])
def _norm_gate_up(
    x, gain, weight, scales, out, table, pieces, made, eps, site,
    INNER: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KIND: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As gemv's; made: the pieces of out a^T of down, which is behind gate and up in the table."""
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    live = row < INNER
    place = row.to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    EVEN: tl.constexpr = WIDTH == PADDED and INNER % ROWS == 0
    gates, gate_scales = request_rows(weight, scales, place, live, WIDTH, PADDED, KIND, EVEN)
    ups, up_scales = request_rows(weight, scales, place + INNER, live, WIDTH, PADDED, KIND, EVEN)
    own = table + site * SITE
    gate_b = _tile(_matrix(own, _B), 0, row, live, INNER, RANKS, 0, 16)
    up_b = _tile(_matrix(own + SITE, _B), 0, row, live, INNER, RANKS, 0, 16)
    down = _request_a(own + 2 * SITE, row, live, 1, INNER, RANKS)
    if PDL:
        gdc_wait()
    gate_given = _request_pieces(pieces, 2 * RANKS, PIECES, RANKS)
    up_given = _request_pieces(pieces + RANKS, 2 * RANKS, PIECES, RANKS)
    gate, up, squares = both_times_x(
        gates, gate_scales, ups, up_scales, x, gain, ROWS, WIDTH, PADDED, KIND, True
    )
    scale = tl.rsqrt(squares / WIDTH + eps)
    gate = (gate + _expand(gate_given, gate_b)) * scale
    up = (up + _expand(up_given, up_b)) * scale
    acts = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    tl.store(out + row, acts, mask=live)
    values = tl.where(live, acts.to(tl.float32), 0)
    _store_pieces(down, values, made + program * RANKS, 1, RANKS)


class NormReader(NamedTuple):
    """The parts of a layer that read a norm, and the norm's gain."""

    gain: Tensor
    layer: int
    parts: tuple[str, ...]


def _pieces(programs: int, parts: int, device: torch.device) -> Tensor:
    return torch.empty((programs, parts, RANKS), device=device)


def first_pieces(rows: PatchRows, x: Tensor, reader: NormReader, dependent: bool = False) -> Tensor:
    """Pieces of (x * gain) a^T of a reader's parts, for x [1, width] that no kernel here made."""
    width, count = x.shape[1], len(reader.parts)
    chunk = min(CHUNK, triton.next_power_of_2(width))
    made = _pieces(triton.cdiv(width, chunk), count, x.device)
    _first_pieces[(len(made), count)](
        x, reader.gain, rows.table, made, site_of(reader.layer, reader.parts[0]),
        PARTS=count, WIDTH=width, CHUNK=chunk, RANKS=RANKS, PDL=dependent, num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return made


def norm_product(
    rows: PatchRows, x: Tensor, reader: NormReader, eps: float, matrix: DeviceMatrix,
    heights: tuple[int, int], y: Tensor, size: GemvSize, pieces: Tensor, bias: Tensor | None,
    dependent: bool = False,
) -> None:  # fmt: skip
    """y [1, count] = rms_norm(x) * gain times the matrix, with patches and bias. The first part has
    heights[0] rows, each other one heights[1]: multiples of the size's rows."""
    _norm_product[(triton.cdiv(matrix.count, size.rows),)](
        x, reader.gain, matrix.weight, scales_of(matrix), x if bias is None else bias, y,
        rows.table, pieces, eps, site_of(reader.layer, reader.parts[0]),
        FIRST=heights[0], OTHER=heights[1], PARTS=len(reader.parts), PIECES=len(pieces),
        BIAS=bias is not None, RANKS=RANKS, **_arguments(matrix, size, dependent),
    )  # fmt: skip


def product_add(
    rows: PatchRows, x: Tensor, matrix: DeviceMatrix, site: tuple[int, str], hidden: Tensor,
    size: GemvSize, pieces: Tensor, reader: NormReader | None, dependent: bool = False,
) -> Tensor:  # fmt: skip
    """hidden [1, count] += x times the matrix with its patch; the pieces of what reads hidden."""
    programs = triton.cdiv(matrix.count, size.rows)
    parts: tuple[str, ...] = () if reader is None else reader.parts
    made = _pieces(programs, max(1, len(parts)), x.device)
    unused: Any = x
    _product_add[(programs,)](
        x, matrix.weight, scales_of(matrix), hidden, unused if reader is None else reader.gain,
        rows.table, pieces, made, site_of(*site),
        0 if reader is None else site_of(reader.layer, reader.parts[0]),
        COUNT=matrix.count, PIECES=len(pieces), PARTS=len(parts), RANKS=RANKS,
        **_arguments(matrix, size, dependent),
    )  # fmt: skip
    return made


def norm_gate_up(
    rows: PatchRows, x: Tensor, reader: NormReader, eps: float, matrix: DeviceMatrix, out: Tensor,
    size: GemvSize, pieces: Tensor, dependent: bool = False,
) -> Tensor:  # fmt: skip
    """out [1, count / 2] = silu(gate) * up with their patches; down's pieces."""
    inner = matrix.count // 2
    programs = triton.cdiv(inner, size.rows)
    made = _pieces(programs, 1, x.device)
    _norm_gate_up[(programs,)](
        x, reader.gain, matrix.weight, scales_of(matrix), out, rows.table, pieces, made, eps,
        site_of(reader.layer, "gate"),
        INNER=inner, PIECES=len(pieces), RANKS=RANKS, **_arguments(matrix, size, dependent),
    )  # fmt: skip
    return made
