"""Triton kernels that put the inputs of a decode step to fixed addresses: copied from tensors, from
a message of the host, or made from the step before.

Import this module only where triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.step_message import HEADER, ROW_WORDS, DecodeFields, DrawFields

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch

# rows of a program of `_advance`
_ADVANCED = 32


@triton.jit(do_not_specialize=["live", "wanted", "width", "stride", "fixed_stride"])
def _fill(
    token_ids, positions, slots, context_lens, tables, rows,
    fixed_ids, fixed_positions, fixed_slots, fixed_lens, fixed_tables, fixed_rows,
    live, wanted, width, stride, fixed_stride, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per row of the captured step. Rows from `live` on become padding."""
    row = tl.program_id(0)
    used = row < live
    tl.store(fixed_ids + row, tl.load(token_ids + row, mask=used, other=0), mask=used)
    tl.store(fixed_positions + row, tl.load(positions + row, mask=used, other=0), mask=used)
    tl.store(fixed_slots + row, tl.load(slots + row, mask=used, other=-1))
    tl.store(fixed_lens + row, tl.load(context_lens + row, mask=used, other=0))
    needed = row < wanted
    tl.store(fixed_rows + row, tl.load(rows + row, mask=needed, other=0), mask=needed)
    for first in range(0, width, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = (column < width) & used
        place = row.to(tl.int64) * stride + column
        block = tl.load(tables + place, mask=inside, other=0)
        tl.store(fixed_tables + row.to(tl.int64) * fixed_stride + column, block, mask=inside)


def fill_step(
    token_ids: Tensor, batch: AttentionBatch, rows: Tensor, fixed_ids: Tensor,
    fixed: AttentionBatch, fixed_rows: Tensor,
) -> None:  # fmt: skip
    """Copy a step with one row per sequence into `fixed`, which has room for more rows."""
    tables, fixed_tables = batch.block_tables, fixed.block_tables
    _fill[(len(fixed_ids),)](
        token_ids, batch.positions, batch.slots, batch.context_lens, tables, rows,
        fixed_ids, fixed.positions, fixed.slots, fixed.context_lens, fixed_tables, fixed_rows,
        len(token_ids), len(rows), tables.shape[1], tables.stride(0), fixed_tables.stride(0),
        CHUNK=256, num_warps=1,
    )  # fmt: skip


@triton.jit
def _uniform(key, count):
    """SplitMix64 at a position of its stream, as in `engine.draw.uniforms`."""
    state = key.to(tl.uint64, bitcast=True) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16


@triton.jit(do_not_specialize=["room", "stride"])
def _receive(
    ints, longs, floats, doubles, token_ids, rows, positions, slots, context_lens, tables,
    temperatures, top_ks, top_ps, min_ps, noise, keys, counts, drawn, room, stride,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, HEADER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program per row; `ints` to `doubles` are the same message. See `reference.step`."""
    row = tl.program_id(0)
    live = tl.load(ints)
    width = tl.load(ints + 1)
    used = row < live
    draws = used & (tl.load(ints + 2) != 0)
    first = HEADER + 6 * room + row
    token = tl.load(ints + first, mask=used, other=0)
    last = tl.load(drawn + tl.where(token < 0, -1 - token, 0), mask=used & (token < 0), other=0)
    tl.store(token_ids + row, tl.where(token < 0, last, token.to(tl.int64)), mask=used)
    tl.store(rows + row, row.to(tl.int64))
    position = tl.load(ints + first + room, mask=used, other=-1)
    tl.store(positions + row, position.to(tl.int64), mask=used)
    tl.store(context_lens + row, position + 1)
    given = ints + HEADER + WORDS * room + row * width
    column = tl.where(used, position // BLOCK, 0)
    block = tl.load(given + column, mask=used, other=0).to(tl.int64)
    tl.store(slots + row, tl.where(used, block * BLOCK + position % BLOCK, -1))
    for start in range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        inside = (place < width) & used
        value = tl.load(given + place, mask=inside, other=0)
        tl.store(tables + row.to(tl.int64) * stride + place, value, mask=inside)
    # padding takes the greatest logit, so that no draw looks for a cut in it
    wide = HEADER // 2 + row
    temperature = tl.load(floats + first + 4 * room, mask=draws, other=0.0)
    tl.store(temperatures + row, temperature)
    tl.store(top_ks + row, tl.load(ints + first + 3 * room, mask=draws, other=0))
    tl.store(top_ps + row, tl.load(doubles + wide + room, mask=draws, other=1.0))
    tl.store(min_ps + row, tl.load(doubles + wide + 2 * room, mask=draws, other=0.0))
    key = tl.load(longs + wide, mask=draws, other=0)
    count = tl.load(ints + first + 2 * room, mask=draws, other=0).to(tl.int64)
    tl.store(keys + row, key)
    tl.store(counts + row, count)
    tl.store(noise + row, _uniform(key, count))


@triton.jit(do_not_specialize=["room", "width", "stride"])
def _advance(
    token_ids, positions, slots, context_lens, tables, noise, keys, counts, drawn,
    room, width, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < room
    tl.store(token_ids + row, tl.load(drawn + row, mask=inside, other=0), mask=inside)
    length = tl.load(context_lens + row, mask=inside, other=0)
    live = length > 0
    # the position behind the last token
    position = length.to(tl.int64)
    tl.store(positions + row, position, mask=live)
    tl.store(context_lens + row, length + 1, mask=live)
    column = tl.minimum(position // BLOCK, width - 1)
    block = tl.load(tables + row.to(tl.int64) * stride + column, mask=live, other=0).to(tl.int64)
    slot = tl.where(live, block * BLOCK + position % BLOCK, -1)
    tl.store(slots + row, slot, mask=inside)
    count = tl.load(counts + row, mask=inside, other=0) + 1
    tl.store(counts + row, count, mask=inside)
    key = tl.load(keys + row, mask=inside, other=0)
    tl.store(noise + row, _uniform(key, count), mask=inside)


def receive_step(message: Tensor, step: DecodeFields, draws: DrawFields) -> None:
    """`reference.step.receive_step` in one kernel."""
    fixed, wanted, room = step.batch, draws.parameters, len(step.token_ids)
    kinds = (torch.int32, torch.int64, torch.float32, torch.float64)
    _receive[(room,)](
        *(message.view(kind) for kind in kinds), step.token_ids, step.rows, fixed.positions,
        fixed.slots, fixed.context_lens, fixed.block_tables, wanted.temperature, wanted.top_k,
        wanted.top_p, wanted.min_p, draws.noise, draws.keys, draws.counts, draws.tokens, room,
        fixed.block_tables.stride(0), BLOCK=fixed.block_size, CHUNK=256, HEADER=HEADER,
        WORDS=ROW_WORDS, num_warps=1,
    )  # fmt: skip


def advance_step(step: DecodeFields, draws: DrawFields) -> None:
    """`reference.step.advance_step` in one kernel."""
    fixed, room = step.batch, len(step.token_ids)
    _advance[(triton.cdiv(room, _ADVANCED),)](
        step.token_ids, fixed.positions, fixed.slots, fixed.context_lens, fixed.block_tables,
        draws.noise, draws.keys, draws.counts, draws.tokens, room, fixed.block_tables.shape[1],
        fixed.block_tables.stride(0), BLOCK=fixed.block_size, ROWS=_ADVANCED, num_warps=1,
    )  # fmt: skip
