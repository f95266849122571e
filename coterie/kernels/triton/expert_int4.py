"""int4 experts of a batch of decoding rows, on tensor cores without shared memory.

The same work as `expert_tiles` in Gluon, Triton's language with explicit layouts: a thread loads 16
bytes of a row, which are one group of 32 columns, and makes of them the values that it has to hold
itself as the first operand of `mma.m16n8k16`. The order of the columns in the sum is free, so the
rows x are loaded in that order too: nothing is exchanged between threads. In 128 columns, product j
of eight takes nibble j of all words: column 32 * q + 4 * j + 2 * h + b is its column 8 * h + 2 * q
+ b. Only for bf16; elsewhere `expert_tiles` runs int4 as well.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from coterie.kernels.triton.expert_gemv import ExpertPool
from coterie.kernels.triton.expert_tiles import SortedPairs, launch


@constexpr_function
def _bits(first: int, end: int, place: int, rank: int) -> list[list[int]]:
    """Bases first, 2 * first, ... below `end` in one dimension."""
    found = []
    while first < end:
        found.append([first if dim == place else 0 for dim in range(rank)])
        first *= 2
    return found


@constexpr_function
def _word_layout(rows: int, warps: int) -> Any:
    """Words [rows, 4 groups, 4 words]."""
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0], *_bits(16 * warps, rows, 0, 3)]
    lanes = [*_bits(1, 4, 1, 3), *_bits(1, 8, 0, 3)]
    own = _bits(16, 16 * warps, 0, 3)
    return gl.DistributedLinearLayout(registers, lanes, own, [], [rows, 4, 4])


@constexpr_function
def _x_layout(count: int, warps: int) -> Any:
    """Rows x [count, 4 groups, 16 words of two columns], the same in every warp."""
    registers = [*_bits(1, 16, 2, 3), *_bits(8, count, 0, 3)]
    lanes = [*_bits(1, 4, 1, 3), *_bits(1, 8, 0, 3)]
    own = [[0, 0, 0] for _ in _bits(1, warps, 0, 1)]
    return gl.DistributedLinearLayout(registers, lanes, own, [], [count, 4, 16])


@gluon.jit
def _nibbles(words, scale, centre):
    """Eight bf16 tensors, number j with the values of nibble j of the words: (nibble - 8) * scale +
    centre. Two words at a time: a nibble of each is put under the exponent of 128 in the halves of
    one register, then times 1 minus 136, which is exact: two values an instruction."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 lo, hi, t, m, e, o, z;
        prmt.b32 lo, $8, $9, 0x5410;
        prmt.b32 hi, $8, $9, 0x7632;
        mov.b32 m, 0x000F000F; mov.b32 e, 0x43004300;
        mov.b32 o, 0x3F803F80; mov.b32 z, 0xC308C308;
        lop3.b32 $0, lo, m, e, 0xEA;
        shr.u32 t, lo, 4;  lop3.b32 $1, t, m, e, 0xEA;
        shr.u32 t, lo, 8;  lop3.b32 $2, t, m, e, 0xEA;
        shr.u32 t, lo, 12; lop3.b32 $3, t, m, e, 0xEA;
        lop3.b32 $4, hi, m, e, 0xEA;
        shr.u32 t, hi, 4;  lop3.b32 $5, t, m, e, 0xEA;
        shr.u32 t, hi, 8;  lop3.b32 $6, t, m, e, 0xEA;
        shr.u32 t, hi, 12; lop3.b32 $7, t, m, e, 0xEA;
        fma.rn.bf16x2 $0, $0, o, z; fma.rn.bf16x2 $0, $0, $10, $11;
        fma.rn.bf16x2 $1, $1, o, z; fma.rn.bf16x2 $1, $1, $10, $11;
        fma.rn.bf16x2 $2, $2, o, z; fma.rn.bf16x2 $2, $2, $10, $11;
        fma.rn.bf16x2 $3, $3, o, z; fma.rn.bf16x2 $3, $3, $10, $11;
        fma.rn.bf16x2 $4, $4, o, z; fma.rn.bf16x2 $4, $4, $10, $11;
        fma.rn.bf16x2 $5, $5, o, z; fma.rn.bf16x2 $5, $5, $10, $11;
        fma.rn.bf16x2 $6, $6, o, z; fma.rn.bf16x2 $6, $6, $10, $11;
        fma.rn.bf16x2 $7, $7, o, z; fma.rn.bf16x2 $7, $7, $10, $11;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words, scale, centre],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _values(words, pairs):
    """As `_nibbles`, with the word of scale and minimum of every group. Nibble 8 is near zero, so
    that the rounding of its value is small."""
    scale = (pairs & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    minimum = ((pairs >> 16) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    centre = gl.expand_dims((minimum + 8.0 * scale).to(gl.bfloat16), 2)
    scale = gl.expand_dims(scale.to(gl.bfloat16), 2)
    words, scale = gl.broadcast(words, scale)
    words, centre = gl.broadcast(words, centre)
    return _nibbles(words, scale, centre)


@gluon.jit
def _halves(x, ORDER: gl.constexpr):
    """Split along the dimension that ORDER puts last."""
    return gl.split(gl.permute(x, ORDER))


@gluon.jit
def _columns(x, COUNT: gl.constexpr):
    """Words x [COUNT, 4, 16] as eight tensors [COUNT, 4, 2], number j with columns 4 * j to 4 * j +
    3."""
    x = gl.reshape(x, [COUNT, 4, 2, 2, 2, 2])
    low, high = _halves(x, (0, 1, 3, 4, 5, 2))
    a, b = _halves(low, (0, 1, 3, 4, 2))
    c, d = _halves(high, (0, 1, 3, 4, 2))
    x0, x1 = _halves(a, (0, 1, 3, 2))
    x2, x3 = _halves(b, (0, 1, 3, 2))
    x4, x5 = _halves(c, (0, 1, 3, 2))
    x6, x7 = _halves(d, (0, 1, 3, 2))
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def _both_columns(words):
    """The two bf16 of each word, in a new last dimension."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high)


@gluon.jit
def _first(values, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 4, 4] as the first operand [ROWS, 16]: only registers change their names."""
    parts = gl.permute(gl.reshape(values, [ROWS, 4, 2, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(parts, [ROWS, 16]), LAYOUT, assert_trivial=True)


@gluon.jit
def _second(values, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [COUNT, 4, 2] as the second operand [16, COUNT]."""
    parts = gl.permute(_both_columns(values), (2, 1, 3, 0))
    return gl.convert_layout(gl.reshape(parts, [16, COUNT]), LAYOUT, assert_trivial=True)


@gluon.jit
def _product(values, x, total, ROWS: gl.constexpr, COUNT: gl.constexpr, SUMS: gl.constexpr):
    """total [ROWS, COUNT] + one step's values times x."""
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    for j in gl.static_range(8):
        total = mma_v2(_first(values[j], ROWS, A), _second(x[j], COUNT, B), total)
    return total


@gluon.jit
def _request_step(weight, scales, row, group, word, live, begin, WIDTH: gl.constexpr):
    """Words [ROWS, 4, 4] and scales [ROWS, 4] of the step that begins at group `begin`."""
    inside = live & (begin + group < WIDTH // 32)
    pairs = gl.load(scales + row * (WIDTH // 32) + begin + group, mask=inside, other=0)
    place = gl.expand_dims(row * (WIDTH // 8) + (begin + group) * 4, 2) + word
    return gl.load(weight + place, mask=gl.expand_dims(inside, 2), other=0), pairs


@gluon.jit
def _request(
    weight, scales, row, group, word, live, begin, WIDTH: gl.constexpr, SPAN: gl.constexpr
):
    """Words and scales of SPAN steps, whose bytes are neighbours in every row."""
    words, pairs = _request_step(weight, scales, row, group, word, live, begin, WIDTH)
    if SPAN == 1:
        found = words, pairs
    else:
        more = _request(weight, scales, row, group, word, live, begin + 4, WIDTH, SPAN - 1)
        found = (words, pairs) + more  # noqa: RUF005
    return found


@gluon.jit
def _lines(x, source, used, group, word, begin, WIDTH: gl.constexpr):
    """Words x [COUNT, 4, 16] of the step that begins at group `begin`."""
    inside = used & (begin + group < WIDTH // 32)
    return gl.load(x + source + (begin * 16 + word), mask=inside, other=0)


@gluon.jit
def _word_places(first, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows [ROWS, 1], groups [1, 4] and words [1, 1, 4] of a step."""
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    return gl.expand_dims(row, 1), gl.expand_dims(group, 0), word


@gluon.jit
def _line_places(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Pairs [COUNT], groups [1, 4, 1] and words [1, 4, 16] of a step."""
    line = gl.arange(0, COUNT, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    group = gl.expand_dims(gl.expand_dims(group, 0), 2)
    return line, group, group * 16 + gl.expand_dims(gl.expand_dims(word, 0), 1)


@gluon.jit
def _store(
    values, own, out, begin, total, first,
    WIDTH: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """out[pair, first + r] = values [ROWS, COUNT]."""
    line = begin + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    pairs = gl.load(own + line, mask=line < total, other=0).to(gl.int64)
    target = out + gl.expand_dims(pairs * WIDTH, 0) + gl.expand_dims(row, 1)
    inside = gl.expand_dims(line < total, 0) & gl.expand_dims(row < WIDTH, 1)
    gl.store(target, values, mask=inside)


@gluon.jit
def _int4_gate_up(
    x, row_pairs, spans, places, pool, out,
    SCALES_AT: gl.constexpr, UNIT: gl.constexpr,
    TOP_K: gl.constexpr, INNER: gl.constexpr, WIDTH: gl.constexpr,
    COUNT: gl.constexpr, ROWS: gl.constexpr, SPAN: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out[pair] = silu(gate) * up of x[pair // TOP_K]; x is words of two columns. Grid: (tiles of
    INNER, experts)."""
    WORDS: gl.constexpr = _word_layout(ROWS, WARPS)
    LINES: gl.constexpr = _x_layout(COUNT, WARPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    expert = gl.program_id(1)
    if PDL:
        gdc_wait()
        # only now: `down` reads the pairs before it waits
        gdc_launch_dependents()
    own = row_pairs + gl.load(spans + 2 * expert)
    total = gl.load(spans + 2 * expert + 1)
    place = gl.load(places + expert) * UNIT
    gates = pool + place
    gate_scales = pool + (place + SCALES_AT)
    ups = gates + INNER * (WIDTH // 8)
    up_scales = gate_scales + INNER * (WIDTH // 32)
    first = gl.program_id(0) * ROWS
    row, group, word = _word_places(first, ROWS, WORDS)
    line, x_group, x_word = _line_places(COUNT, LINES)
    live = row < INNER
    for begin in range(0, total, COUNT):
        used = begin + line < total
        pairs = gl.load(own + begin + line, mask=used, other=0)
        source = gl.expand_dims(gl.expand_dims((pairs // TOP_K).to(gl.int64) * (WIDTH // 2), 1), 2)
        used = gl.expand_dims(gl.expand_dims(used, 1), 2)
        gate = gl.zeros([ROWS, COUNT], gl.float32, layout=SUMS)
        up = gl.zeros([ROWS, COUNT], gl.float32, layout=SUMS)
        # fmt: off
        some_gates = _request(gates, gate_scales, row, group, word, live, 0, WIDTH, SPAN)
        some_ups = _request(ups, up_scales, row, group, word, live, 0, WIDTH, SPAN)
        lines = _lines(x, source, used, x_group, x_word, 0, WIDTH)
        for step in range(0, WIDTH // 32, 4 * SPAN):
            next_gates = _request(
                gates, gate_scales, row, group, word, live, step + 4 * SPAN, WIDTH, SPAN)
            next_ups = _request(
                ups, up_scales, row, group, word, live, step + 4 * SPAN, WIDTH, SPAN)
            # or the compiler moves the requests behind the products
            gl.thread_barrier()
            for part in gl.static_range(SPAN):
                next_lines = _lines(
                    x, source, used, x_group, x_word, step + 4 * part + 4, WIDTH)
                columns = _columns(lines, COUNT)
                values = _values(some_gates[2 * part], some_gates[2 * part + 1])
                gate = _product(values, columns, gate, ROWS, COUNT, SUMS)
                values = _values(some_ups[2 * part], some_ups[2 * part + 1])
                up = _product(values, columns, up, ROWS, COUNT, SUMS)
                lines = next_lines
            some_gates, some_ups = next_gates, next_ups
        # fmt: on
        acts = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
        _store(gl.convert_layout(acts, OUT), own, out, begin, total, first, INNER, COUNT, ROWS, OUT)


@gluon.jit
def _int4_down(
    acts, row_pairs, spans, places, pool, out,
    DOWN_AT: gl.constexpr, SCALES_AT: gl.constexpr, UNIT: gl.constexpr,
    INNER: gl.constexpr, WIDTH: gl.constexpr,
    COUNT: gl.constexpr, ROWS: gl.constexpr, SPAN: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """out[pair] = down of acts[pair], words of two columns. Grid: (tiles of WIDTH, experts)."""
    WORDS: gl.constexpr = _word_layout(ROWS, WARPS)
    LINES: gl.constexpr = _x_layout(COUNT, WARPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    expert = gl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    own = row_pairs + gl.load(spans + 2 * expert, cache_modifier=".cg")
    total = gl.load(spans + 2 * expert + 1, cache_modifier=".cg")
    place = gl.load(places + expert) * UNIT
    weight = pool + (place + DOWN_AT)
    scales = pool + (place + SCALES_AT)
    first = gl.program_id(0) * ROWS
    row, group, word = _word_places(first, ROWS, WORDS)
    line, x_group, x_word = _line_places(COUNT, LINES)
    live = row < WIDTH
    for begin in range(0, total, COUNT):
        used = begin + line < total
        pairs = gl.load(own + begin + line, mask=used, other=0, cache_modifier=".cg")
        source = gl.expand_dims(gl.expand_dims(pairs.to(gl.int64) * (INNER // 2), 1), 2)
        used = gl.expand_dims(gl.expand_dims(used, 1), 2)
        y = gl.zeros([ROWS, COUNT], gl.float32, layout=SUMS)
        # fmt: off
        some = _request(weight, scales, row, group, word, live, 0, INNER, SPAN)
        if PDL:
            gdc_wait()
        lines = _lines(acts, source, used, x_group, x_word, 0, INNER)
        for step in range(0, INNER // 32, 4 * SPAN):
            others = _request(
                weight, scales, row, group, word, live, step + 4 * SPAN, INNER, SPAN)
            # or the compiler moves the requests behind the products
            gl.thread_barrier()
            for part in gl.static_range(SPAN):
                next_lines = _lines(
                    acts, source, used, x_group, x_word, step + 4 * part + 4, INNER)
                columns = _columns(lines, COUNT)
                values = _values(some[2 * part], some[2 * part + 1])
                y = _product(values, columns, y, ROWS, COUNT, SUMS)
                lines = next_lines
            some = others
        # fmt: on
        y = gl.convert_layout(y.to(gl.bfloat16), OUT)
        _store(y, own, out, begin, total, first, WIDTH, COUNT, ROWS, OUT)


@dataclass(frozen=True, slots=True)
class Int4Size:
    """Of a program: output rows (64 or more, 16 or more to a warp), warps, and the number of steps
    of 128 columns whose words are requested together."""

    rows: int
    warps: int
    span: int


@dataclass(frozen=True, slots=True)
class Int4Sizes:
    """`count`: pairs at a time, 8 or more."""

    count: int
    gate_up: Int4Size
    down: Int4Size


def int4_gate_up(
    x: Tensor, top_k: int, order: SortedPairs, pool: ExpertPool, out: Tensor, sizes: Int4Sizes,
    dependent: bool = False,
) -> None:  # fmt: skip
    """out [T * K, I] = silu(gate) * up, of x [T, D] that is normed, bf16."""
    record, size = pool.record, sizes.gate_up
    matrices, _, shape = pool.views()
    _int4_gate_up[(triton.cdiv(record.intermediate, size.rows), len(pool.places))](
        x.view(torch.int32), order.row_pairs, order.spans, pool.places, matrices, out,
        SCALES_AT=pool.at(record.gate_up_scales_at), UNIT=shape["UNIT"], TOP_K=top_k,
        INNER=record.intermediate, WIDTH=record.hidden, COUNT=sizes.count, ROWS=size.rows,
        SPAN=size.span, WARPS=size.warps, num_warps=size.warps, **launch(dependent),
    )  # fmt: skip


def int4_down(
    acts: Tensor, order: SortedPairs, pool: ExpertPool, out: Tensor, sizes: Int4Sizes,
    dependent: bool = False,
) -> None:  # fmt: skip
    """out [T * K, D] = down of acts [T * K, I], bf16."""
    record, size = pool.record, sizes.down
    matrices, _, shape = pool.views()
    _int4_down[(triton.cdiv(record.hidden, size.rows), len(pool.places))](
        acts.view(torch.int32), order.row_pairs, order.spans, pool.places, matrices, out,
        DOWN_AT=pool.at(record.down_at), SCALES_AT=pool.at(record.down_scales_at),
        UNIT=shape["UNIT"], INNER=record.intermediate, WIDTH=record.hidden, COUNT=sizes.count,
        ROWS=size.rows, SPAN=size.span, WARPS=size.warps, num_warps=size.warps,
        **launch(dependent),
    )  # fmt: skip
