"""Triton kernels that apply patches to the rows of a decoder layer, without additional launches.

y = out_scale * (W (in_scale * x)) + shift + (x a^T) b: the kernel that computes x also computes the
terms x a^T, and the kernel that reads y applies b. Any row may have any patch; for a row without
one the result is that of the plain kernels. Import it only where triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from coterie.kernels.batch import KINDS, WORDS
from coterie.kernels.patch import PARTS

# the most ranks that one program has at once
RANKS = 16

# kinds of a step's patches: bf16 of few ranks, bf16 of any rank, or all patches
_DEEP, _FULL = tl.constexpr(KINDS.index("deep")), tl.constexpr(KINDS.index("wide"))
# words of one site in a step's table
SITE = tl.constexpr(WORDS)
_A, _B, _IN_SCALE, _OUT_SCALE, _SHIFT = (tl.constexpr(word) for word in range(5))
_RANK, _WIDE, _BYTES = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)


@triton.jit
def _matrix(site, WORD: tl.constexpr):
    """Address, rank and type of a site's a or b."""
    return tl.load(site + WORD), tl.load(site + _RANK).to(tl.int32), tl.load(site + _WIDE)


@triton.jit
def _tile(
    matrix, first, column, inside, width,
    RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Rows first .. of a matrix [rank, width], in loads of ALIGN bytes: each thread has ALIGN // 2
    columns and all ranks of them. Where a step has fp32 matrices, both types are loaded with a
    mask: with a branch every load would wait for the one before."""
    address, rank, wide = matrix
    r = first + tl.arange(0, RANKS)
    live = (r < rank)[:, None] & inside[None, :]
    place = r[:, None] * width + column[None, :]
    narrow = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), ALIGN) + place
    if KIND == _FULL:
        full = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + place
        tile = tl.load(narrow, mask=live & (wide == 0), other=0).to(tl.float32)
        tile += tl.load(full, mask=live & (wide != 0), other=0)
    else:
        tile = tl.load(narrow, mask=live, other=0)
    return tile


@triton.jit
def request_columns(site, column, inside, width, RANKS: tl.constexpr):
    """The given columns [groups, columns] of a site's a, in bf16: [groups, RANKS, columns]."""
    address, rank, _ = _matrix(site, _A)
    r = tl.arange(0, RANKS)
    place = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
    place = place + r[None, :, None] * width + column[:, None, :]
    return tl.load(place, mask=(r < rank)[None, :, None] & inside[:, None, :], other=0)


@triton.jit
def _vector(site, WORD: tl.constexpr, column, inside, missing):
    address = tl.load(site + WORD)
    place = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + column
    return tl.load(place, mask=inside & (address != 0), other=missing)


@triton.jit
def _pieces(terms, first, rank, room, SPLITS: tl.constexpr, RANKS: tl.constexpr):
    """x a^T of one row [.., RANKS], not yet summed over the pieces of x."""
    PADDED: tl.constexpr = triton.next_power_of_2(SPLITS)
    r, split = first + tl.arange(0, RANKS), tl.arange(0, PADDED)
    live = (split < SPLITS)[:, None] & (r < rank)[None, :]
    return tl.load(terms + split[:, None] * room + r[None, :], mask=live, other=0)


@triton.jit
def _scaled(y, site, column, inside, KIND: tl.constexpr):
    if KIND == _FULL:
        y = y * _vector(site, _OUT_SCALE, column, inside, 1.0)
        y = y + _vector(site, _SHIFT, column, inside, 0.0)
    return y


@triton.jit
def _fetch(first, nbytes):
    """Prefetch a range of memory (of a long one, its start) into the device's L2 cache, without
    waiting. One thread of one warp does it."""
    size = tl.minimum(nbytes, 1 << 19) // 16 * 16
    tl.inline_asm_elementwise(
        """{ .reg .pred p; elect.sync _|p, 0xffffffff;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r", [first, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fetch_lines(first, nbytes):
    """Prefetch several ranges of memory, one by each thread of the first warp. For a tensor of
    addresses and one of bytes, multiples of 16."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r", [first, nbytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fetch_site(table, row, site, sites):
    """Prefetch a and b of a row's site for kernels that will read them soon. Of several rows with
    one stack, the first does it."""
    own = table + (row * sites + site) * SITE
    a, b, nbytes = tl.load(own + _A), tl.load(own + _B), tl.load(own + _BYTES)
    above = tl.load(own - sites * SITE + _A, mask=row > 0, other=0)
    if (nbytes != 0) & (above != a):
        _fetch(a, (nbytes & 0x7FFFFFFF).to(tl.int32))
        _fetch(b, (nbytes >> 32).to(tl.int32))


# A patch is read in one function and applied in another, so that no load waits for a sum: sums end
# in barriers.


@triton.jit
def read_patch(
    y, site, terms, room, column, inside, width,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """out_scale * y + shift of some columns of one row, and the terms to add."""
    b = _matrix(site, _B)
    tile = _tile(b, 0, column, inside, width, RANKS, KIND, ALIGN)
    pieces = _pieces(terms, 0, b[1], room, SPLITS, RANKS)
    return _scaled(y, site, column, inside, KIND), b, tile, pieces


@triton.jit
def apply_patch(
    patch, terms, room, column, inside, width,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """out_scale * y + shift + terms b, fp32."""
    y, b, tile, pieces = patch
    y += tl.sum(tile.to(tl.float32) * tl.sum(pieces, 0)[:, None], 0)
    if KIND >= _DEEP:
        for first in range(RANKS, b[1], RANKS):
            tile = _tile(b, first, column, inside, width, RANKS, KIND, ALIGN)
            pieces = _pieces(terms, first, b[1], room, SPLITS, RANKS)
            y += tl.sum(tile.to(tl.float32) * tl.sum(pieces, 0)[:, None], 0)
    return y


@triton.jit
def patch_head(
    first, second, q_site, terms, room, head, half, inside,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    RANKS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The two halves of one head of q, k or v, whose terms are [3, room]."""
    part = 0 if head < HEADS else 1 + (head - HEADS) // KV_HEADS
    width = (HEADS if head < HEADS else KV_HEADS) * HEAD_DIM
    low = (head if head < HEADS else (head - HEADS) % KV_HEADS) * HEAD_DIM + half
    high = low + HEAD_DIM // 2
    site, own = q_site + part * SITE, terms + part * room
    one = read_patch(first, site, own, room, low, inside, width, 1, RANKS, KIND, 16)
    two = read_patch(second, site, own, room, high, inside, width, 1, RANKS, KIND, 16)
    first = apply_patch(one, own, room, low, inside, width, 1, RANKS, KIND, 16)
    return first, apply_patch(two, own, room, high, inside, width, 1, RANKS, KIND, 16)


@triton.jit
def _shrink(
    x, scale, a, tile, terms, begin, step, column, inside, width,
    RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Stores scale * x a^T, or one piece of it, of every `step`th RANKS from `begin`, whose rows
    of a are in `tile`."""
    r = begin + tl.arange(0, RANKS)
    total = tl.sum(tile.to(tl.float32) * x[None, :], 1) * scale
    # of few ranks all are stored, with zeros behind the last: their reader needs no mask
    tl.store(terms + r, total, mask=(r < a[1]) | (KIND < _DEEP))
    if KIND >= _DEEP:
        for first in range(begin + step, a[1], step):
            tile = _tile(a, first, column, inside, width, RANKS, KIND, ALIGN)
            total = tl.sum(tile.to(tl.float32) * x[None, :], 1) * scale
            r = first + tl.arange(0, RANKS)
            tl.store(terms + r, total, mask=r < a[1])


@triton.jit
def _through(
    y, source, site, column, inside, width,
    DEPTH: tl.constexpr, PADDED: tl.constexpr,
    RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """As `apply_patch`, with the terms computed here from the whole x [DEPTH] at `source`."""
    inner = tl.arange(0, PADDED)
    in_source = inner < DEPTH
    a, b = _matrix(site, _A), _matrix(site, _B)
    down = _tile(a, 0, inner, in_source, DEPTH, RANKS, KIND, ALIGN)
    up = _tile(b, 0, column, inside, width, RANKS, KIND, ALIGN)
    y = _scaled(y, site, column, inside, KIND)
    x = tl.load(source + inner, mask=in_source, other=0).to(tl.float32)
    terms = tl.sum(down.to(tl.float32) * x[None, :], 1)
    y += tl.sum(up.to(tl.float32) * terms[:, None], 0)
    if KIND >= _DEEP:
        for first in range(RANKS, a[1], RANKS):
            down = _tile(a, first, inner, in_source, DEPTH, RANKS, KIND, ALIGN)
            up = _tile(b, first, column, inside, width, RANKS, KIND, ALIGN)
            terms = tl.sum(down.to(tl.float32) * x[None, :], 1)
            y += tl.sum(up.to(tl.float32) * terms[:, None], 0)
    return y


# the sites' numbers change from layer to layer: one compilation is enough for all
@triton.jit(do_not_specialize=["before", "behind"])
def _norm_rows(
    hidden, delta, source, terms, weight, table, summed, normed, shrunk,
    eps, sites, room, before, behind,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SOURCE: tl.constexpr, SOURCE_PADDED: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr, ADD: tl.constexpr,
    RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """SHARES programs per (row, part of the next product): summed = hidden + patched delta,
    normed = rms_norm(summed) * weight, shrunk = the terms of that part; each program computes some
    of their ranks. Without parts there is no norm."""
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = share // SHARES
    OWN: tl.constexpr = RANKS // SHARES
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    place = row * WIDTH + column
    own = table + row * sites * SITE
    if PARTS > 0:
        a = _matrix(own + (behind + part) * SITE, _A)
        begin = share % SHARES * OWN
        tile = _tile(a, begin, column, inside, WIDTH, OWN, KIND, ALIGN)
        scales = tl.load(weight + column, mask=inside, other=0)
    x = tl.load(hidden + place, mask=inside, other=0)
    if ADD:
        y = tl.load(delta + place, mask=inside, other=0).to(tl.float32)
        site = own + before * SITE
        # fmt: off
        if SOURCE > 0:
            y = _through(y, source + row * SOURCE, site, column, inside, WIDTH,
                         SOURCE, SOURCE_PADDED, RANKS, KIND, ALIGN)
        else:
            made = terms + row * SPLITS * room
            patch = read_patch(y, site, made, room, column, inside, WIDTH,
                               SPLITS, RANKS, KIND, ALIGN)
            y = apply_patch(patch, made, room, column, inside, WIDTH, SPLITS, RANKS, KIND, ALIGN)
        # fmt: on
        x = (x.to(tl.float32) + y.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(summed + place, x, mask=inside & (share == 0))
    if PARTS > 0:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        result = ((wide * scale).to(x.dtype).to(tl.float32) * scales).to(x.dtype)
        tl.store(normed + place, result, mask=inside & (share == 0))
        target = shrunk + (row * PARTS + part) * room
        # uses the norm before rounding, so that this sum does not wait for the one above
        _shrink(wide * scales, scale, a, tile, target, begin, RANKS, column, inside, WIDTH,
                OWN, KIND, ALIGN)  # fmt: skip


@triton.jit(do_not_specialize=["gate_site"])
def _silu_rows(
    gate_up, table, terms, out, shrunk, sites, room, gate_site,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    RANKS: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up with their patches, times down's in_scale; and its piece of down's terms,
    which are computed without the scale."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < WIDTH
    site = table + (row * sites + gate_site) * SITE
    place = gate_up + row * 2 * WIDTH + column
    dtype = gate_up.dtype.element_ty
    gate = tl.load(place, mask=inside, other=0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0).to(tl.float32)
    first = terms + row * 2 * room
    second, down = first + room, site + 2 * SITE
    one = read_patch(gate, site, first, room, column, inside, WIDTH, 1, RANKS, KIND, ALIGN)
    up_site = site + SITE
    two = read_patch(up, up_site, second, room, column, inside, WIDTH, 1, RANKS, KIND, ALIGN)
    a = _matrix(down, _A)
    tile = _tile(a, 0, column, inside, WIDTH, RANKS, KIND, ALIGN)
    in_scale = _vector(down, _IN_SCALE, column, inside, 1.0) if KIND == _FULL else 1.0
    gate = apply_patch(one, first, room, column, inside, WIDTH, 1, RANKS, KIND, ALIGN)
    up = apply_patch(two, second, room, column, inside, WIDTH, 1, RANKS, KIND, ALIGN)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    acts = (silu * up).to(dtype).to(tl.float32)
    target = shrunk + (row * CHUNKS + chunk) * room
    _shrink(acts, 1.0, a, tile, target, 0, RANKS, column, inside, WIDTH, RANKS, KIND, ALIGN)
    tl.store(out + row * WIDTH + column, (acts * in_scale).to(dtype), mask=inside)


def site_of(layer: int, part: str) -> int:
    return layer * len(PARTS) + PARTS.index(part)
