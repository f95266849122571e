"""A Triton kernel that widens GGUF's blocks out of the panels of a store's record, one launch for a
part of an expert: torch takes about sixty. For experts in a device's slots that its other kernels
do not support. Panels: `weights/kinds.py`.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.cpu.expert_record import read_part
from coterie.kernels.expert_layout import ExpertLayout, PartPlace
from coterie.kernels.triton.unpack import (
    KINDS,
    bits_of,
    has_factors,
    has_halves,
    has_minimum,
    offset_of,
)
from coterie.weights.kinds import BLOCK_KINDS, PANEL
from coterie.weights.kinds import KINDS as MATRIX_KINDS
from coterie.weights.quantize import dense


@triton.jit
def _half(block, item, row):
    """The fp16 of each row that is the item behind `item` bytes of a row."""
    place = (block + 16 * item + 2 * row).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(place).to(tl.float32)


@triton.jit
def _widen_panels(
    panels, out, rows,
    WIDTH: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr, BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [rows, WIDTH]. EACH, BYTES: columns and bytes of one row's block. Grid: (panels, tiles of
    columns); the columns of a tile divide WIDTH."""
    BITS: tl.constexpr = bits_of(KIND)
    OFFSET: tl.constexpr = offset_of(KIND)
    FACTORS: tl.constexpr = has_factors(KIND)
    HALVES: tl.constexpr = has_halves(KIND)
    MINIMUM: tl.constexpr = has_minimum(KIND)
    GROUP: tl.constexpr = 16 + 4 * (BITS - 4)
    # the head is before the groups, or behind the only one
    HEAD: tl.constexpr = BYTES - 8 * GROUP if FACTORS else 0
    row = tl.arange(0, 16)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    panel = tl.program_id(0).to(tl.int64)
    block = panels + (panel * (WIDTH // EACH) + column // EACH) * (16 * BYTES)
    group, k = column % EACH // 32, column % 32
    nibbles = HEAD + group * GROUP
    low = tl.load(block + 16 * (nibbles + k % 16 // 4 * 4) + 4 * row + k % 4).to(tl.int32)
    q = (low >> (k // 16 * 4)) & 15
    if BITS == 5:
        high = tl.load(block + 16 * (nibbles + 16) + 4 * row + k % 4).to(tl.int32)
        q = q | (((high >> (k // 4)) & 1) << 4)
    elif BITS == 6:
        high = tl.load(block + 16 * (nibbles + 16 + k // 16 * 4) + 4 * row + k % 4).to(tl.int32)
        q = q | (((high >> (k % 16 // 4 * 2)) & 3) << 4)
    value = (q - OFFSET).to(tl.float32)
    if HALVES:
        scale = tl.load(block + 16 * (2 + 2 * group + k // 16) + row).to(tl.int8, bitcast=True)
        value = value * (_half(block, 0, row) * scale.to(tl.float32))
    elif FACTORS:
        scale = tl.load(block + 16 * (4 + group) + row).to(tl.float32)
        least = tl.load(block + 16 * (12 + group) + row).to(tl.float32)
        value = value * (_half(block, 0, row) * scale) + _half(block, 2, row) * least
    else:
        value = value * _half(block, GROUP, row)
        if MINIMUM:
            value += _half(block, GROUP + 2, row)
    at = panel * 16 + row
    tl.store(out + at * WIDTH + column, value.to(out.dtype.element_ty), mask=at < rows)


def widened_panels(place: PartPlace, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix of blocks [rows, columns] whose panels are `raw`."""
    kind = MATRIX_KINDS[place.kind]
    out = torch.empty((place.rows, place.columns), dtype=dtype, device=raw.device)
    # groups of 32 are a power of two times something odd
    columns = min(256, place.columns & -place.columns)
    _widen_panels[(triton.cdiv(place.rows, PANEL), place.columns // columns)](
        raw, out, place.rows, WIDTH=place.columns, KIND=KINDS.index(place.kind), EACH=kind.columns,
        BYTES=kind.block_bytes, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out


def panel_parts(layout: ExpertLayout, record: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same as `dense_parts`, of a record on a device."""
    found = {}
    for place in layout.parts():
        raw = record[place.offset : place.offset + place.nbytes]
        if place.kind in BLOCK_KINDS:
            found[place.name] = widened_panels(place, raw, dtype)
        else:
            part = read_part(place, raw)
            found[place.name] = part.to(dtype) if isinstance(part, Tensor) else dense(part, dtype)
    return found
