"""Triton kernels of a decoder layer's rows under patches, without a launch of their own.

y = out_scale * (W (in_scale * x)) + shift + (x a^T) b: the terms x a^T are made by the kernel that
makes x, and b is applied by the kernel that reads y. Any row may have any patch; a row without one
computes what the plain kernels compute. Import it only where triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from coterie.kernels.patch import PARTS
from coterie.kernels.patch_rows import WORDS

# ranks that one program holds at once, at most
RANKS = 16

# words of one site in a step's table
SITE = tl.constexpr(WORDS)
_A, _B, _IN_SCALE, _OUT_SCALE, _SHIFT = (tl.constexpr(word) for word in range(5))
_RANK, _WIDE = tl.constexpr(5), tl.constexpr(6)


@triton.jit
def _matrix(site, WORD: tl.constexpr):
    """Address, rank and type of a site's a or b."""
    return tl.load(site + WORD), tl.load(site + _RANK).to(tl.int32), tl.load(site + _WIDE)


@triton.jit
def _tile(matrix, rank, wide, first, column, inside, width, RANKS: tl.constexpr):
    """Rows first .. of a matrix [rank, width], fp32. Both types are loaded under a mask: a branch
    would have every load wait for the one before."""
    r = first + tl.arange(0, RANKS)
    live = (r < rank)[:, None] & inside[None, :]
    place = r[:, None] * width + column[None, :]
    narrow = tl.multiple_of(matrix.to(tl.pointer_type(tl.bfloat16)), 16) + place
    full = tl.multiple_of(matrix.to(tl.pointer_type(tl.float32)), 16) + place
    halves = tl.load(narrow, mask=live & (wide == 0), other=0).to(tl.float32)
    return halves + tl.load(full, mask=live & (wide != 0), other=0)


@triton.jit
def _vector(site, WORD: tl.constexpr, column, inside, missing):
    address = tl.load(site + WORD)
    place = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + column
    return tl.load(place, mask=inside & (address != 0), other=missing)


@triton.jit
def _joined(
    terms, first, rank, room, SPLITS: tl.constexpr, PADDED: tl.constexpr, RANKS: tl.constexpr
):
    """x a^T of one row, summed over the pieces of x that were made apart."""
    r, split = first + tl.arange(0, RANKS), tl.arange(0, PADDED)
    live = (split < SPLITS)[:, None] & (r < rank)[None, :]
    return tl.sum(tl.load(terms + split[:, None] * room + r[None, :], mask=live, other=0), 0)


@triton.jit
def expanded(
    y,
    site,
    terms,
    room,
    column,
    inside,
    width,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    RANKS: tl.constexpr,
):
    """out_scale * y + shift + terms b, fp32, of some columns of one row."""
    b, rank, wide = _matrix(site, _B)
    tile = _tile(b, rank, wide, 0, column, inside, width, RANKS)
    y = y * _vector(site, _OUT_SCALE, column, inside, 1.0)
    y += _vector(site, _SHIFT, column, inside, 0.0)
    y += tl.sum(tile * _joined(terms, 0, rank, room, SPLITS, PADDED, RANKS)[:, None], 0)
    for first in range(RANKS, rank, RANKS):
        tile = _tile(b, rank, wide, first, column, inside, width, RANKS)
        y += tl.sum(tile * _joined(terms, first, rank, room, SPLITS, PADDED, RANKS)[:, None], 0)
    return y


@triton.jit
def expanded_head(
    first, second, q_site, terms, room, head, half, inside,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """The two halves of one head of q, k or v, whose terms are [3, room]."""
    part = 0 if head < HEADS else 1 + (head - HEADS) // KV_HEADS
    width = (HEADS if head < HEADS else KV_HEADS) * HEAD_DIM
    column = (head if head < HEADS else (head - HEADS) % KV_HEADS) * HEAD_DIM + half
    site, own = q_site + part * SITE, terms + part * room
    first = expanded(first, site, own, room, column, inside, width, 1, 1, RANKS)
    column += HEAD_DIM // 2
    second = expanded(second, site, own, room, column, inside, width, 1, 1, RANKS)
    return first, second


@triton.jit
def _shrink(x, site, terms, column, inside, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """Stores x a^T, or one piece of it."""
    a, rank, wide = _matrix(site, _A)
    for first in range(0, rank, RANKS):
        r = first + tl.arange(0, RANKS)
        tile = _tile(a, rank, wide, first, column, inside, WIDTH, RANKS)
        tl.store(terms + r, tl.sum(tile * x[None, :], 1), mask=r < rank)


@triton.jit
def _through(
    y,
    x,
    site,
    column,
    inside,
    source,
    in_source,
    WIDTH: tl.constexpr,
    SOURCE: tl.constexpr,
    RANKS: tl.constexpr,
):
    """As `expanded`, with the terms made here from the whole x [SOURCE]."""
    a, rank, wide = _matrix(site, _A)
    b = tl.load(site + _B)
    y = y * _vector(site, _OUT_SCALE, column, inside, 1.0)
    y += _vector(site, _SHIFT, column, inside, 0.0)
    for first in range(0, rank, RANKS):
        down = _tile(a, rank, wide, first, source, in_source, SOURCE, RANKS)
        up = _tile(b, rank, wide, first, column, inside, WIDTH, RANKS)
        y += tl.sum(up * tl.sum(down * x[None, :], 1)[:, None], 0)
    return y


# the sites' numbers change from layer to layer: one compilation serves them all
@triton.jit(do_not_specialize=["before", "behind"])
def _norm_rows(
    hidden,
    delta,
    source,
    terms,
    weight,
    table,
    summed,
    normed,
    shrunk,
    eps,
    sites,
    room,
    before,
    behind,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SOURCE: tl.constexpr,
    SOURCE_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program per (row, part of the next product): summed = hidden + patched delta, normed =
    rms_norm(summed) * weight, shrunk = that part's terms. Without parts there is no norm."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    place = row * WIDTH + column
    own = table + row * sites * SITE
    x = tl.load(hidden + place, mask=inside, other=0)
    if ADD:
        y = tl.load(delta + place, mask=inside, other=0).to(tl.float32)
        site = own + before * SITE
        # fmt: off
        if SOURCE > 0:
            wide = tl.arange(0, SOURCE_PADDED)
            inner = tl.load(source + row * SOURCE + wide, mask=wide < SOURCE, other=0)
            y = _through(y, inner.to(tl.float32), site, column, inside, wide, wide < SOURCE,
                         WIDTH, SOURCE, RANKS)
        else:
            y = expanded(y, site, terms + row * SPLITS * room, room, column, inside,
                         WIDTH, SPLITS, SPLITS_PADDED, RANKS)
        # fmt: on
        x = (x.to(tl.float32) + y.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(summed + place, x, mask=inside & (part == 0))
    if PARTS > 0:
        wide_x = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide_x * wide_x, 0) / WIDTH + eps)
        scaled = (wide_x * scale).to(x.dtype).to(tl.float32)
        result = (scaled * tl.load(weight + column, mask=inside, other=0)).to(x.dtype)
        tl.store(normed + place, result, mask=inside & (part == 0))
        site = own + (behind + part) * SITE
        target = shrunk + (row * PARTS + part) * room
        _shrink(result.to(tl.float32), site, target, column, inside, WIDTH, RANKS)


@triton.jit(do_not_specialize=["gate_site"])
def _silu_rows(
    gate_up,
    table,
    terms,
    out,
    shrunk,
    sites,
    room,
    gate_site,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """silu(gate) * up behind their patches, times down's in_scale; and its piece of down's terms,
    which read it unscaled."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < WIDTH
    site = table + (row * sites + gate_site) * SITE
    place = gate_up + row * 2 * WIDTH + column
    dtype = gate_up.dtype.element_ty
    gate = tl.load(place, mask=inside, other=0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0).to(tl.float32)
    first = terms + row * 2 * room
    gate = expanded(gate, site, first, room, column, inside, WIDTH, 1, 1, RANKS)
    up = expanded(up, site + SITE, first + room, room, column, inside, WIDTH, 1, 1, RANKS)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    acts = (silu * up).to(dtype).to(tl.float32)
    down = site + 2 * SITE
    _shrink(acts, down, shrunk + (row * CHUNKS + chunk) * room, column, inside, WIDTH, RANKS)
    acts *= _vector(down, _IN_SCALE, column, inside, 1.0)
    tl.store(out + row * WIDTH + column, acts.to(dtype), mask=inside)


def site_of(layer: int, part: str) -> int:
    return layer * len(PARTS) + PARTS.index(part)
