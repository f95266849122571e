"""Integers of quantised matrices, as Triton kernels unpack them: int4 (`device_record`), and GGUF's
blocks (`device_blocks`), whose kinds have numbers from FIRST_BLOCK on.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import os
from dataclasses import astuple

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from coterie.kernels.device_blocks import FORMS, BlockForm
from coterie.weights.kinds import BLOCK_KINDS

# the interpreter has no assembly
_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")

# the numbers of kinds in kernels
KINDS = ("dense", "int8", "int4", *BLOCK_KINDS)
FIRST_BLOCK = tl.constexpr(KINDS.index(BLOCK_KINDS[0]))


# plain numbers: Triton compares what a kernel refers to at every launch
_TABLE = tuple(astuple(FORMS[kind]) if kind in FORMS else () for kind in KINDS)


@constexpr_function
def _form(kind: int) -> BlockForm:
    return BlockForm(*_TABLE[kind])


@constexpr_function
def _row_words(kind: int, width: int) -> int:
    """The length of a row in words of four bytes."""
    form: BlockForm = _form(kind)
    return form.row_bytes(width) // 4


# where parts of a row begin, in their own elements


@constexpr_function
def _high_at(kind: int, width: int) -> int:
    form: BlockForm = _form(kind)
    return form.high_at(width) // max(1, form.bits - 4)


@constexpr_function
def _scales_at(kind: int, width: int) -> int:
    form: BlockForm = _form(kind)
    return form.scales_at(width) // form.scale_bytes


@constexpr_function
def _factors_at(kind: int, width: int) -> int:
    form: BlockForm = _form(kind)
    return form.factors_at(width) // form.factor_bytes


@constexpr_function
def bits_of(kind: int) -> int:
    form: BlockForm = _form(kind)
    return form.bits


@constexpr_function
def offset_of(kind: int) -> int:
    form: BlockForm = _form(kind)
    return form.offset


@constexpr_function
def has_minimum(kind: int) -> bool:
    form: BlockForm = _form(kind)
    return 4 in (form.scale_bytes, form.factor_bytes)


@constexpr_function
def has_factors(kind: int) -> bool:
    form: BlockForm = _form(kind)
    return form.factor_bytes > 0


@constexpr_function
def has_halves(kind: int) -> bool:
    """Whether columns 0 to 15 of a group, of nibbles 0 to 3, have a scale of their own."""
    form: BlockForm = _form(kind)
    return form.factor_bytes == 2


@triton.jit
def _field(words, MASK: tl.constexpr):
    """The bits of the mask where they are, exact in fp32: put under the exponent of 2 ** 23, which
    is then subtracted. One logic instruction and no conversion of integers."""
    if _ASSEMBLY:
        wide = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [words, tl.full([], MASK, tl.int32), tl.full([], 0x4B000000, tl.int32)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        wide = ((words & MASK) | 0x4B000000).to(tl.float32, bitcast=True)
    return wide - 8388608.0


@triton.jit
def nibble(words, j: tl.constexpr):
    """Nibble j times 16 ** (j % 4), exact in fp32."""
    MASK: tl.constexpr = 15 << (4 * (j % 4))
    if j >= 4:
        words = words >> 16
    return _field(words, MASK)


@triton.jit
def scale_and_minimum(pairs):
    """The two fp16 values of a word."""
    scale = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    minimum = ((pairs >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def load_if(place, inside, EVEN: tl.constexpr):
    """With EVEN everything is inside. The compiler moves loads with a mask behind computation, so
    that fewer bytes are requested at once: the measured cost is a fifth."""
    return tl.load(place) if EVEN else tl.load(place, mask=inside, other=0)


@triton.jit
def code(words, high, j: tl.constexpr, KIND: tl.constexpr):
    """Integer j of each word times 16 ** (j % 4), exact in fp32, its offset not subtracted."""
    value = nibble(words, j)
    BITS: tl.constexpr = bits_of(KIND) - 4
    if BITS > 0:
        MASK: tl.constexpr = (2**BITS - 1) << (BITS * j)
        # exact: a power of two
        value += _field(high, MASK) * (16.0 * 16 ** (j % 4) / 2 ** (BITS * j))
    return value


@triton.jit
def request_blocks(
    weight, rows, live, first,
    WORDS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Words [rows, WORDS] from word `first` of the rows on, and what belongs to them: high bits,
    and scales and factors [rows, groups]; what there is not is the part before it."""
    STRIDE: tl.constexpr = _row_words(KIND, WIDTH)
    HIGH_AT: tl.constexpr = _high_at(KIND, WIDTH)
    SCALES_AT: tl.constexpr = _scales_at(KIND, WIDTH)
    BITS: tl.constexpr = bits_of(KIND)
    FACTORS: tl.constexpr = has_factors(KIND)
    MINIMUM: tl.constexpr = has_minimum(KIND)
    word = first + tl.arange(0, WORDS)
    inside = live[:, None] & (word < WIDTH // 8)[None, :]
    start = weight + rows[:, None] * STRIDE
    words = load_if(start + word[None, :], inside, EVEN)
    high = words
    if BITS > 4:
        place = _typed(start, tl.uint8 if BITS == 5 else tl.int16)
        high = load_if(place + (HIGH_AT + word)[None, :], inside, EVEN)
    group = first // 4 + tl.arange(0, WORDS // 4)
    inside = live[:, None] & (group < WIDTH // 32)[None, :]
    if FACTORS:
        FACTORS_AT: tl.constexpr = _factors_at(KIND, WIDTH)
        scales = load_if(_typed(start, tl.int16) + (SCALES_AT + group)[None, :], inside, EVEN)
        place = _typed(start, tl.int32 if MINIMUM else tl.float16)
        factors = load_if(place + (FACTORS_AT + group // 8)[None, :], inside, EVEN)
    else:
        place = _typed(start, tl.int32 if MINIMUM else tl.float16)
        scales = load_if(place + (SCALES_AT + group)[None, :], inside, EVEN)
        factors = scales
    return words, (high, scales, factors)


@triton.jit
def _typed(place, DTYPE: tl.constexpr):
    return place.to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def block_scales(own, KIND: tl.constexpr):
    """Scale and minimum of each group, or the scales of its two halves; what there is not is the
    scale."""
    _high, scales, factors = own
    FACTORS: tl.constexpr = has_factors(KIND)
    MINIMUM: tl.constexpr = has_minimum(KIND)
    if FACTORS:
        both = scales.to(tl.int32)
        if MINIMUM:
            factor, least = scale_and_minimum(factors)
            first = (both & 255).to(tl.float32) * factor
            second = ((both >> 8) & 255).to(tl.float32) * least
        else:
            factor = factors.to(tl.float32)
            first = ((both << 24) >> 24).to(tl.float32) * factor
            second = (both >> 8).to(tl.float32) * factor
    else:
        if MINIMUM:
            first, second = scale_and_minimum(scales)
        else:
            first = scales.to(tl.float32)
            second = first
    return first, second


@triton.jit
def _block_value(words, high, first, second, j: tl.constexpr, KIND: tl.constexpr):
    OFFSET: tl.constexpr = offset_of(KIND) * 16 ** (j % 4)
    HALVES: tl.constexpr = has_halves(KIND)
    MINIMUM: tl.constexpr = has_minimum(KIND)
    value = code(words, high, j, KIND)
    if OFFSET > 0:
        value -= OFFSET
    if HALVES and j >= 4:
        value = value * (second * (1.0 / 16 ** (j % 4)))
    else:
        value = value * (first * (1.0 / 16 ** (j % 4)))
    if MINIMUM:
        value += second
    return value


@triton.jit
def in_order(v0, v1, v2, v3, v4, v5, v6, v7, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Values [ROWS, GROUPS, 4] of the nibbles of words -> columns [ROWS, 32 * GROUPS]."""
    low = tl.join(tl.join(v0, v1), tl.join(v2, v3))
    both = tl.join(low, tl.join(tl.join(v4, v5), tl.join(v6, v7)))
    # [row, group, word, bits of the nibble's number] -> column 4 * nibble + word
    return tl.reshape(tl.permute(both, [0, 1, 5, 4, 3, 2]), [ROWS, 32 * GROUPS])


@triton.jit
def block_values(words, own, ROWS: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr):
    """[ROWS, 32 * GROUPS] fp32, exactly the file's values, from what `request_blocks` returns."""
    first, second = block_scales(own, KIND)
    first, second = first[:, :, None], second[:, :, None]
    words = tl.reshape(words, [ROWS, GROUPS, 4])
    high = tl.reshape(own[0].to(tl.int32), [ROWS, GROUPS, 4])
    return in_order(
        _block_value(words, high, first, second, 0, KIND),
        _block_value(words, high, first, second, 1, KIND),
        _block_value(words, high, first, second, 2, KIND),
        _block_value(words, high, first, second, 3, KIND),
        _block_value(words, high, first, second, 4, KIND),
        _block_value(words, high, first, second, 5, KIND),
        _block_value(words, high, first, second, 6, KIND),
        _block_value(words, high, first, second, 7, KIND),
        ROWS, GROUPS,
    )  # fmt: skip
