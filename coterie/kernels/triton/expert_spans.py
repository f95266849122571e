"""Triton kernels for the products of sorted rows whose experts lie in slots of equal size, read
through tensor descriptors (TMA): tiles of rows whose last part may be shorter.

An expert's rows are not padded in the sorted order. They are cut into tiles of TILE + TAIL rows,
and the last one is computed as TILE + TAIL, TILE or TAIL rows: the tail's products share the
weights while these are in shared memory. So few rows are computed that nobody uses, and an expert
with a few more rows than TILE has its weights read once. `gate_up` reads its rows where they are,
and multiplies gate and up as one matrix if rows are on the M side. One or two programs per SM.

`list_tiles` makes the lists of tiles (expert, first row, end): in the order of experts, or, where
there are few tiles, experts with long ones first, so that all programs have equal work. The tiles
of one expert follow each other, and find its weights in L2.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_tile(tiles, place, expert, begin, end):
    tl.store(tiles + 3 * place, expert)
    tl.store(tiles + 3 * place + 1, begin)
    tl.store(tiles + 3 * place + 2, end)


@triton.jit
def list_tiles(
    tiles, tile_count, total, expert, me, first,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The tiles of expert `me`, whose rows begin at `first`, from the rows `total` of all experts.
    LONG > 0: experts with several tiles come first, then those with more than LONG rows."""
    tiles_of = (total + TILE - 1) // TILE
    own = tl.sum(tl.where(expert == me, total, 0), 0)
    earlier = expert < me
    if LONG > 0:
        rank = (total <= TILE).to(tl.int32) + (total <= LONG).to(tl.int32)
        mine = (own <= TILE).to(tl.int32) + (own <= LONG).to(tl.int32)
        earlier = (rank < mine) | ((rank == mine) & earlier)
    before = tl.sum(tl.where(earlier, tiles_of, 0), 0)
    for tile in range((own + TILE - 1) // TILE):
        begin = first + tile * TILE
        _store_tile(tiles, before + tile, me, begin, tl.minimum(begin + TILE, first + own))
    if me == EXPERTS - 1:
        tl.store(tile_count, tl.sum(tiles_of, 0))


@triton.jit
def _product(rows, weight, total, FLIP: tl.constexpr):
    """FLIP: the weights are on the M side."""
    if FLIP:
        return tl.dot(weight, rows.T, total, input_precision="ieee")
    else:
        return tl.dot(rows, weight.T, total, input_precision="ieee")


@triton.jit
def _zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr):
    if FLIP:
        return tl.zeros([BLOCK, ROWS], tl.float32)
    else:
        return tl.zeros([ROWS, BLOCK], tl.float32)


@triton.jit
def tokens_of(row_pairs, begin, pairs, TOP_K: tl.constexpr, ROWS: tl.constexpr):
    """The rows of x of sorted rows; behind the last pair, any."""
    at = tl.minimum(begin + tl.arange(0, ROWS), pairs - 1)
    pair = tl.minimum(tl.maximum(tl.load(row_pairs + at), 0), pairs - 1)
    return (pair // TOP_K).to(tl.int64)


@triton.jit
def _rows(x, tokens, used, k, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros for rows that are not used: they take less power than any others."""
    column = k + tl.arange(0, COLUMNS)
    place = x + tokens[:, None] * WIDTH + column[None, :]
    if WIDTH % COLUMNS == 0:
        return tl.load(place, mask=used[:, None], other=0)
    else:
        return tl.load(place, mask=used[:, None] & (column < WIDTH)[None, :], other=0)


@triton.jit
def _store_rows(
    out, value, begin, end, first,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    at = (begin + tl.arange(0, ROWS)).to(tl.int64)
    column = first + tl.arange(0, BLOCK)
    if FLIP:
        value = value.T
    inside = (at < end)[:, None] & (column < WIDTH)[None, :]
    target = out + at[:, None] * WIDTH + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(both, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up of sums that have gate's columns before those of up."""
    gate, up = tl.split(tl.permute(tl.reshape(both, [ROWS, 2, BLOCK]), [0, 2, 1]))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gate_up_tile(
    x, row_pairs, pairs, pool, out, begin, end, slot, first,
    INNER: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    tokens = tokens_of(row_pairs, begin, pairs, TOP_K, ROWS)
    used = begin + tl.arange(0, ROWS) < end
    if TAIL > 0:
        tail_used = begin + ROWS + tl.arange(0, TAIL) < end
        tail_tokens = tokens_of(row_pairs, begin + ROWS, pairs, TOP_K, TAIL)
    if FLIP:
        gate, up = _zeros(ROWS, BLOCK, True), _zeros(ROWS, BLOCK, True)
        if TAIL > 0:
            tail_gate, tail_up = _zeros(TAIL, BLOCK, True), _zeros(TAIL, BLOCK, True)
        for k in range(0, WIDTH, COLUMNS):
            rows = _rows(x, tokens, used, k, WIDTH, COLUMNS)
            one = pool.load([slot, 0, first, k]).reshape(BLOCK, COLUMNS)
            two = pool.load([slot, 1, first, k]).reshape(BLOCK, COLUMNS)
            if TAIL > 0:
                rest = _rows(x, tail_tokens, tail_used, k, WIDTH, COLUMNS)
            gate = _product(rows, one, gate, True)
            up = _product(rows, two, up, True)
            if TAIL > 0:
                tail_gate = _product(rest, one, tail_gate, True)
                tail_up = _product(rest, two, tail_up, True)
        acts = gate / (1.0 + tl.exp(-gate)) * up
        if TAIL > 0:
            tail_acts = tail_gate / (1.0 + tl.exp(-tail_gate)) * tail_up
    else:
        both = _zeros(ROWS, 2 * BLOCK, False)
        if TAIL > 0:
            tail_both = _zeros(TAIL, 2 * BLOCK, False)
        for k in range(0, WIDTH, COLUMNS):
            rows = _rows(x, tokens, used, k, WIDTH, COLUMNS)
            own = pool.load([slot, 0, first, k]).reshape(2 * BLOCK, COLUMNS)
            if TAIL > 0:
                rest = _rows(x, tail_tokens, tail_used, k, WIDTH, COLUMNS)
            both = _product(rows, own, both, False)
            if TAIL > 0:
                tail_both = _product(rest, own, tail_both, False)
        acts = _swiglu(both, ROWS, BLOCK)
        if TAIL > 0:
            tail_acts = _swiglu(tail_both, TAIL, BLOCK)
    _store_rows(out, acts, begin, end, first, INNER, ROWS, BLOCK, FLIP)
    if TAIL > 0:
        _store_rows(out, tail_acts, begin + ROWS, end, first, INNER, TAIL, BLOCK, FLIP)


@triton.jit
def _tile(tiles, places, index, SLOT: tl.constexpr):
    """Slot, first row and end of a tile."""
    slot = tl.load(places + tl.load(tiles + 3 * index)) // SLOT
    return slot.to(tl.int32), tl.load(tiles + 3 * index + 1), tl.load(tiles + 3 * index + 2)


# counts change from step to step: specialising on them would compile while serving
@triton.jit(do_not_specialize=["pairs"])
def span_gate_up(
    x, row_pairs, pairs, pool, out, places, tiles, tile_count,
    SLOT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    TILE: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up of sorted rows of x; the pool is [slots, 2, INNER, WIDTH]."""
    ACROSS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    for index in tl.range(tl.program_id(0), tl.load(tile_count) * ACROSS, PROGRAMS):
        slot, begin, end = _tile(tiles, places, index // ACROSS, SLOT)
        first = (index % ACROSS) * BLOCK
        # fmt: off
        if TAIL == 0:
            _gate_up_tile(x, row_pairs, pairs, pool, out, begin, end, slot, first,
                          INNER, WIDTH, TOP_K, TILE, 0, BLOCK, COLUMNS, FLIP)
        elif end - begin > TILE:
            _gate_up_tile(x, row_pairs, pairs, pool, out, begin, end, slot, first,
                          INNER, WIDTH, TOP_K, TILE, TAIL, BLOCK, COLUMNS, FLIP)
        elif end - begin > TAIL:
            _gate_up_tile(x, row_pairs, pairs, pool, out, begin, end, slot, first,
                          INNER, WIDTH, TOP_K, TILE, 0, BLOCK, COLUMNS, FLIP)
        else:
            _gate_up_tile(x, row_pairs, pairs, pool, out, begin, end, slot, first,
                          INNER, WIDTH, TOP_K, TAIL, 0, BLOCK, COLUMNS, FLIP)
        # fmt: on


@triton.jit
def _down_tile(
    acts, acts_tail, pool, out, begin, end, slot, first,
    INNER: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    FLIP: tl.constexpr,
):  # fmt: skip
    y = _zeros(ROWS, BLOCK, FLIP)
    if TAIL > 0:
        tail = _zeros(TAIL, BLOCK, FLIP)
    for k in range(0, INNER, COLUMNS):
        rows = acts.load([begin, k])
        own = pool.load([slot, first, k]).reshape(BLOCK, COLUMNS)
        if TAIL > 0:
            rest = acts_tail.load([begin + ROWS, k])
        y = _product(rows, own, y, FLIP)
        if TAIL > 0:
            tail = _product(rest, own, tail, FLIP)
    _store_rows(out, y, begin, end, first, WIDTH, ROWS, BLOCK, FLIP)
    if TAIL > 0:
        _store_rows(out, tail, begin + ROWS, end, first, WIDTH, TAIL, BLOCK, FLIP)


# which of two lists is read changes their alignment
@triton.jit(do_not_specialize_on_alignment=["tiles", "tile_count"])
def span_down(
    acts, acts_tail, pool, out, places, tiles, tile_count,
    SLOT: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """out = down of the sorted activations; the pool is [slots, WIDTH, INNER]. Descriptors of TILE
    and of TAIL rows. FLATTEN, where TAIL is 0: the loops over tiles and columns are made one, which
    cannot branch."""
    ACROSS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    total = tl.load(tile_count) * ACROSS
    for index in tl.range(tl.program_id(0), total, PROGRAMS, flatten=FLATTEN):
        slot, begin, end = _tile(tiles, places, index // ACROSS, SLOT)
        first = (index % ACROSS) * BLOCK
        # fmt: off
        if TAIL == 0:
            _down_tile(acts, acts_tail, pool, out, begin, end, slot, first,
                       INNER, WIDTH, TILE, 0, BLOCK, COLUMNS, FLIP)
        elif end - begin > TILE:
            _down_tile(acts, acts_tail, pool, out, begin, end, slot, first,
                       INNER, WIDTH, TILE, TAIL, BLOCK, COLUMNS, FLIP)
        elif end - begin > TAIL:
            _down_tile(acts, acts_tail, pool, out, begin, end, slot, first,
                       INNER, WIDTH, TILE, 0, BLOCK, COLUMNS, FLIP)
        else:
            _down_tile(acts_tail, acts_tail, pool, out, begin, end, slot, first,
                       INNER, WIDTH, TAIL, 0, BLOCK, COLUMNS, FLIP)
        # fmt: on
