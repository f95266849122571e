"""A Triton kernel that arranges a store's record for the device: `device_record.arrange` in one
launch instead of about fifteen.

A program has one panel of 16 rows and some words of each row: it reads the panel's lines of 16
words and writes whole rows. Sizes are arguments, so that each precision is compiled once.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.cpu.expert_record import weight_offset
from coterie.kernels.device_record import device_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.weights.kinds import PANEL

# words of a row that one program moves
_WORDS = 128
# of a record's group: words of 16 rows, scales included
_DENSE, _INT8, _INT4 = 0, 1, 2
_KINDS = {"fp32": _DENSE, "bf16": _DENSE, "int8": _INT8, "int4": _INT4}


@triton.jit
def _arrange(
    words, halves, out, out_halves, up_at, down_at,
    inner_tiles, hidden_tiles, inner_panels, inner_words, hidden_words,
    up_out, down_out, gate_scales, up_scales, down_scales,
    KIND: tl.constexpr, BIAS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Places of parts are in words, those of scales in halves; `inner_words` and `hidden_words`:
    of a row with so many columns. Grid: the tiles of gate, of up, then of down."""
    at = tl.program_id(0)
    gates = inner_panels * hidden_tiles
    is_up = (at >= gates) & (at < 2 * gates)
    is_down = at >= 2 * gates
    own = at - tl.where(is_down, 2 * gates, tl.where(is_up, gates, 0))
    tiles = tl.where(is_down, inner_tiles, hidden_tiles)
    width = tl.where(is_down, inner_words, hidden_words)
    source = tl.where(is_down, down_at, tl.where(is_up, up_at, 0))
    target = tl.where(is_down, down_out, tl.where(is_up, up_out, 0))
    scales = tl.where(is_down, down_scales, tl.where(is_up, up_scales, gate_scales))
    panel, first = own // tiles, own % tiles * WORDS

    row = tl.arange(0, 16)
    word = first + tl.arange(0, WORDS)
    inside = (word < width)[None, :] & (row >= 0)[:, None]
    place = target + (panel * 16 + row)[:, None] * width + word[None, :]
    if KIND == 0:
        line = source + (panel * width + word) * 16
        value = tl.load(words + line[None, :] + row[:, None], mask=inside, other=0)
    elif KIND == 1:
        groups = width // 8
        line = source + (panel * groups + word // 8) * 136 + word % 8 * 16
        value = tl.load(words + line[None, :] + row[:, None], mask=inside, other=0)
        if BIAS:
            # 128 more or less is the highest bit of each byte
            value = value ^ -2139062144
    else:
        groups = width // 4
        line = source + (panel * groups + word // 4) * 80
        shift = (word % 4 * 8)[None, :]
        value = tl.zeros([16, WORDS], tl.int32)
        for k in tl.static_range(4):
            # bytes 4 * k to 4 * k + 3 of the group: columns 4 * k + i below, 16 + 4 * k + i above
            four = tl.load(words + line[None, :] + k * 16 + row[:, None], mask=inside, other=0)
            value = value | (((four >> shift) & 15) << (4 * k))
            value = value | (((four >> (shift + 4)) & 15) << (4 * k + 16))
    tl.store(out + place, value, mask=inside)
    if KIND != 0:
        EACH: tl.constexpr = 8 if KIND == 1 else 4
        group = first // EACH + tl.arange(0, WORDS // EACH)
        count = width // EACH
        inside = (group < count)[None, :] & (row >= 0)[:, None]
        to = (panel * 16 + row)[:, None] * count + group[None, :]
        if KIND == 1:
            begin = 2 * source + (panel * count + group) * 272 + 256
            scale = tl.load(halves + begin[None, :] + row[:, None], mask=inside, other=0)
            tl.store(out_halves + scales + to, scale, mask=inside)
        else:
            begin = 2 * source + (panel * count + group) * 160 + 128
            scale = tl.load(halves + begin[None, :] + row[:, None], mask=inside, other=0)
            minimum = tl.load(halves + begin[None, :] + 16 + row[:, None], mask=inside, other=0)
            tl.store(out_halves + scales + 2 * to, scale, mask=inside)
            tl.store(out_halves + scales + 2 * to + 1, minimum, mask=inside)


def arrange_record(layout: ExpertLayout, record: Tensor, out: Tensor) -> None:
    """The same bytes as `arrange`: a store's record (uint8, on the device) into out[: nbytes]."""
    target = device_record(layout)
    assert target is not None
    _, up, down = layout.parts()
    hidden, inner = target.hidden, target.intermediate
    # a whole matrix's rows are rows of words: 2 elements of bf16, 8 of int4
    each = {"fp32": 1, "bf16": 2, "int8": 4, "int4": 8}[target.kind]
    hidden_words, inner_words = hidden // each, inner // each
    hidden_tiles, inner_tiles = (triton.cdiv(n, _WORDS) for n in (hidden_words, inner_words))
    panels = inner // PANEL
    half = (target.down_scales_at - target.gate_up_scales_at) // 2
    scales = (target.gate_up_scales_at, target.gate_up_scales_at + half, target.down_scales_at)
    whole = out[: target.nbytes]
    _arrange[(2 * panels * hidden_tiles + hidden // PANEL * inner_tiles,)](
        record.view(torch.int32), record.view(torch.int16),
        whole.view(torch.int32), whole.view(torch.int16),
        up.offset // 4, down.offset // 4,
        inner_tiles, hidden_tiles, panels, inner_words, hidden_words,
        target.gate_up_bytes // 8, target.down_at // 4, *(at // 2 for at in scales),
        KIND=_KINDS[target.kind], BIAS=weight_offset() != 0, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip
