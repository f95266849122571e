"""Products of single rows with int4 matrices, on tensor cores without shared memory.

The same work as the int4 kernels of `expert_gemv` in Gluon, Triton's language with explicit
layouts: a thread loads 16 bytes of a row of the matrix, which are one group of 32 columns, and
makes of them the values that it has to hold itself as the first operand of `mma.m16n8k16`. The
values are 128 + nibble, exact in bf16 and made with one logic instruction for two of them. The
second operand has a column for each of eight groups, with x in the rows that belong to the group
and zeros elsewhere: so the sums of the groups stay apart, and scales and minimums are applied to
them in fp32. A unit of work of one warp is 16 rows times 8 groups; the warps of a program have
different units of the same rows. Only for x in bf16.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import constexpr_function

from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord
from coterie.kernels.triton.link_prefetch import GUESS, HEAD, TILE, TURN

WORD_BYTES = 4
# rows of a matrix that one program has
ROWS = 16
# warps of a program: with more of them each has fewer columns
GATE_UP_WARPS, DOWN_WARPS, PRODUCT_WARPS = 4, 8, 8
# rows of x that one program multiplies with its rows of a matrix
X_ROWS = 8


@constexpr_function
def _warp_bits(warps: int, rank: int) -> list[list[int]]:
    found, step = [], 1
    while step < warps:
        found.append([step, *[0] * (rank - 1)])
        step *= 2
    return found


@constexpr_function
def _word_layout(warps: int) -> Any:
    """Words [units, 16 rows, 8 groups, 4 words], one unit to a warp."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 4, 0], [0, 8, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bits(warps, 4), [], [warps, 16, 8, 4])


@constexpr_function
def _loaded_layout(warps: int, link: bool) -> Any:
    """Words as they are loaded: as they are used; or from the memory of the host whole lines of 128
    bytes of a row at a time, because each request over the link costs as much as 24 bytes."""
    if not link:
        return _word_layout(warps)
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 4, 0, 0], [0, 8, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 1, 0, 0], [0, 2, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bits(warps, 4), [], [warps, 16, 8, 4])


@constexpr_function
def _loaded_scales_layout(warps: int, link: bool) -> Any:
    """Scales [units, 16 rows, 8 groups] as they are loaded, where units are neighbours."""
    if not link or warps != 4:
        return _sum_layout(warps)
    registers = [[0, 0, 1], [0, 0, 2]]
    lanes = [[0, 0, 4], [1, 0, 0], [2, 0, 0], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 4, 0], [0, 8, 0]], [], [warps, 16, 8])


@constexpr_function
def _line_layout(warps: int) -> Any:
    """Words of x [units, 8 groups, 16 words of two columns] as they are loaded."""
    registers = [[0, 0, 1], [0, 0, 2]]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bits(warps, 3), [], [warps, 8, 16])


@constexpr_function
def _x_layout(warps: int) -> Any:
    """Words of x [units, 8 groups, 4 lanes, 16 words] as they are used."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bits(warps, 4), [], [warps, 8, 4, 16])


@constexpr_function
def _sum_layout(warps: int) -> Any:
    """Sums of groups [units, 16 rows, 8 groups]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def _row_layout(warps: int) -> Any:
    """Two values of 16 rows of all units, the same in every warp."""
    registers = [[0, 0, 1], *_warp_bits(warps, 3)]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 0]]
    same = [[0, 0, 0] for _ in _warp_bits(warps, 3)]
    return gl.DistributedLinearLayout(registers, lanes, same, [], [warps, 16, 2])


@constexpr_function
def _result_layout(warps: int) -> Any:
    """One value of 16 rows, the same in every warp."""
    return gl.SliceLayout(1, gl.SliceLayout(0, _row_layout(warps)))


@gluon.jit
def _over_units(first, second, W: gl.constexpr):
    """The sums over all units of two tensors [W, 16]: they are exchanged once, with one barrier
    less than a sum takes."""
    both = gl.convert_layout(gl.join(first, second), _row_layout(W))
    one, other = gl.split(gl.sum(both, 0))
    RESULT: gl.constexpr = _result_layout(W)
    return (
        gl.convert_layout(one, RESULT, assert_trivial=True),
        gl.convert_layout(other, RESULT, assert_trivial=True),
    )


@gluon.jit
def _nibbles(words):
    """Eight bf16 tensors, number j with 128 + nibble j of the words. Two words at a time: a nibble
    of each is put under the exponent of 128 in the halves of one register."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 lo, hi, t, m, e;
        prmt.b32 lo, $8, $9, 0x5410;
        prmt.b32 hi, $8, $9, 0x7632;
        mov.b32 m, 0x000F000F; mov.b32 e, 0x43004300;
        lop3.b32 $0, lo, m, e, 0xEA;
        shr.u32 t, lo, 4;  lop3.b32 $1, t, m, e, 0xEA;
        shr.u32 t, lo, 8;  lop3.b32 $2, t, m, e, 0xEA;
        shr.u32 t, lo, 12; lop3.b32 $3, t, m, e, 0xEA;
        lop3.b32 $4, hi, m, e, 0xEA;
        shr.u32 t, hi, 4;  lop3.b32 $5, t, m, e, 0xEA;
        shr.u32 t, hi, 8;  lop3.b32 $6, t, m, e, 0xEA;
        shr.u32 t, hi, 12; lop3.b32 $7, t, m, e, 0xEA;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [words],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def _first(values, W: gl.constexpr, LAYOUT: gl.constexpr):
    """[W, 16, 8 groups, 4 words] as the first operand [W, 16, 32]: column 16 * v + 8 * h + 2 * q +
    b is word 2 * v + b of group 4 * h + q. Only registers change their names."""
    parts = gl.permute(gl.reshape(values, [W, 16, 8, 2, 2]), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.reshape(parts, [W, 16, 32]), LAYOUT, assert_trivial=True)


@gluon.jit
def _halves(x, ORDER: gl.constexpr):
    """Split along the dimension that ORDER puts last."""
    return gl.split(gl.permute(x, ORDER))


@gluon.jit
def _columns(x, W: gl.constexpr):
    """Words x [W, 8, 4, 16] as eight tensors [W, 8, 4, 2], number j with columns 4 * j to 4 * j + 3
    of a group."""
    x = gl.reshape(x, [W, 8, 4, 2, 2, 2, 2])
    low, high = _halves(x, (0, 1, 2, 4, 5, 6, 3))
    a, b = _halves(low, (0, 1, 2, 4, 5, 3))
    c, d = _halves(high, (0, 1, 2, 4, 5, 3))
    x0, x1 = _halves(a, (0, 1, 2, 4, 3))
    x2, x3 = _halves(b, (0, 1, 2, 4, 3))
    x4, x5 = _halves(c, (0, 1, 2, 4, 3))
    x6, x7 = _halves(d, (0, 1, 2, 4, 3))
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def _second(early, late, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Words [W, 8, 4, 2] of groups 0 to 3 and of groups 4 to 7 as the second operand [W, 32, 8]:
    group n has x only in the rows of lane n % 4, and of these only in half n // 4."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [gl.join(early, late)],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    # [W, n, lane, v, h, b] -> [W, v, h, lane, b, n]
    parts = gl.permute(gl.join(low, high), (0, 3, 4, 2, 5, 1))
    return gl.convert_layout(gl.reshape(parts, [W, 32, 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def _wide(words):
    """The two bf16 of each word, in fp32."""
    return (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _word(low, high):
    """Two fp32 rounded to the bf16 of one word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _times_gain(lines, gains):
    """Words of x times those of a norm's gain; and the squares of x."""
    low, high = _wide(lines)
    low_gain, high_gain = _wide(gains)
    return _word(low * low_gain, high * high_gain), low * low + high * high


@gluon.jit
def _share(lines, W: gl.constexpr):
    """Puts words of x [W, 8, 16] and the sums of its groups where the warp's other lanes find them.
    Loads that are requested before this are not moved behind the products by the compiler, which
    read it."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    SUM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    low, high = _wide(lines)
    shared = gl.allocate_shared_memory(gl.int32, [W, 8, 16], LINE, lines)
    sums = gl.allocate_shared_memory(gl.float32, [W, 8], SUM, gl.sum(low + high, 2))
    return shared, sums


@gluon.jit
def _shared(shared, sums, W: gl.constexpr):
    """What `_share` put there: x as eight second operands, and the sums of groups [W, 1, 8]."""
    LINES: gl.constexpr = _x_layout(W)
    B: gl.constexpr = gl.DotOperandLayout(1, _sum_layout(W), 2)
    x = gl.expand_dims(shared.load(gl.SliceLayout(2, LINES)), 2)
    n = _along(8, 1, 4, LINES)
    lane = _along(4, 2, 4, LINES)
    first = _columns(gl.where(n == lane, x, 0), W)
    last = _columns(gl.where(n == lane + 4, x, 0), W)
    columns = (
        _second(first[0], last[0], W, B), _second(first[1], last[1], W, B),
        _second(first[2], last[2], W, B), _second(first[3], last[3], W, B),
        _second(first[4], last[4], W, B), _second(first[5], last[5], W, B),
        _second(first[6], last[6], W, B), _second(first[7], last[7], W, B),
    )  # fmt: skip
    return columns, gl.expand_dims(sums.load(gl.SliceLayout(1, _sum_layout(W))), 1)


@gluon.jit
def _products(words, pairs, x, sums, W: gl.constexpr):
    """[W, 16, 8]: the products of the words' values with x by group, scaled."""
    SUMS: gl.constexpr = _sum_layout(W)
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    values = _nibbles(gl.convert_layout(words, _word_layout(W)))
    pairs = gl.convert_layout(pairs, SUMS)
    total = gl.zeros([W, 16, 8], gl.float32, layout=SUMS)
    for j in gl.static_range(8):
        total = mma_v2(_first(values[j], W, A), x[j], total)
    scale = (pairs & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    minimum = ((pairs >> 16) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return scale * total + (minimum - 128.0 * scale) * sums


@constexpr_function
def _slice(layout: Any, dim: int, rank: int) -> Any:
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _along(COUNT: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """0 to COUNT - 1 along one of RANK dimensions."""
    at = gl.arange(0, COUNT, layout=_slice(LAYOUT, DIM, RANK))
    for other in gl.static_range(RANK):
        if other != DIM:
            at = gl.expand_dims(at, other)
    return at


@gluon.jit
def _load_if(place, inside, EVEN: gl.constexpr):
    """With EVEN everything is inside."""
    return gl.load(place) if EVEN else gl.load(place, mask=inside, other=0)


@gluon.jit
def _request(
    weight, scales, first, group, count,
    WIDTH: gl.constexpr, W: gl.constexpr, EVEN: gl.constexpr, LINK: gl.constexpr = False,
):  # fmt: skip
    """Words and scales of 16 rows from `first` on, of the W * 8 groups from `group` on."""
    WORDS: gl.constexpr = _loaded_layout(W, LINK)
    SUMS: gl.constexpr = _loaded_scales_layout(W, LINK)
    row = first + _along(16, 1, 3, SUMS)
    own = group + _along(W, 0, 3, SUMS) * 8 + _along(8, 2, 3, SUMS)
    place = row * (WIDTH // 32) + own
    pairs = _load_if(scales + place, (row < count) & (own < WIDTH // 32), EVEN)
    row = first + _along(16, 1, 4, WORDS)
    own = group + _along(W, 0, 4, WORDS) * 8 + _along(8, 2, 4, WORDS)
    place = row * (WIDTH // 8) + own * 4 + _along(4, 3, 4, WORDS)
    words = _load_if(weight + place, (row < count) & (own < WIDTH // 32), EVEN)
    return words, pairs


@gluon.jit
def _lines(x, group, WIDTH: gl.constexpr, W: gl.constexpr):
    """Words x of the W * 8 groups from `group` on."""
    LINES: gl.constexpr = _line_layout(W)
    own = group + _along(W, 0, 3, LINES) * 8 + _along(8, 1, 3, LINES)
    return gl.load(x + own * 16 + _along(16, 2, 3, LINES), mask=own < WIDTH // 32, other=0)


@gluon.jit
def _normed(x, gain, group, WIDTH: gl.constexpr, W: gl.constexpr, NORM: gl.constexpr):
    """As `_lines`, with NORM times `gain`; and the squares of x, which are of no use without."""
    lines = _lines(x, group, WIDTH, W)
    squares = lines
    if NORM:
        lines, squares = _times_gain(lines, _lines(gain, group, WIDTH, W))
    return lines, squares


@gluon.jit
def _is_copied(state, expert, first):
    """As `link_prefetch.is_copied`."""
    turn = gl.load(state + TURN)
    flag = gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];",
        "=r,l",
        [(state + (HEAD + first // TILE)).to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return (expert == gl.load(state + GUESS)) & (flag == turn)


@gluon.jit
def _gate_up_tile(
    x, gain, norms, chosen, pool, out, pair, first, ids, state, copied,
    SCALES_AT: gl.constexpr, UNIT: gl.constexpr, TOP_K: gl.constexpr,
    INNER: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, NORM: gl.constexpr,
    LINK: gl.constexpr, GUESSED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """16 rows of `_int4_pair_gate_up`."""
    SUMS: gl.constexpr = _sum_layout(WARPS)
    at = (pair // TOP_K).to(gl.int64)
    own = x + at * (WIDTH // 2)
    place = gl.load(chosen + pair, cache_modifier=".cg")
    if GUESSED:
        expert = gl.load(ids + pair, cache_modifier=".cg")
        place = gl.where(_is_copied(state, expert, first), copied, place)
    place = place * UNIT
    gates = pool + place
    gate_scales = pool + (place + SCALES_AT)
    ups = gates + INNER * (WIDTH // 8)
    up_scales = gate_scales + INNER * (WIDTH // 32)
    EACH: gl.constexpr = WARPS * 8
    STEPS: gl.constexpr = (WIDTH // 32 + EACH - 1) // EACH
    EVEN: gl.constexpr = WIDTH % (EACH * 32) == 0 and INNER % 16 == 0
    # of the second step
    ALSO: gl.constexpr = EVEN and STEPS % 2 == 0
    gate = gl.zeros([WARPS, 16, 8], gl.float32, layout=SUMS)
    up = gl.zeros([WARPS, 16, 8], gl.float32, layout=SUMS)
    scale = 1.0
    # fmt: off
    # two steps are requested before anything is computed
    for step in range(0, STEPS, 2):
        begin = step * EACH
        gate_words, gate_pairs = _request(
            gates, gate_scales, first, begin, INNER, WIDTH, WARPS, EVEN, LINK)
        up_words, up_pairs = _request(
            ups, up_scales, first, begin, INNER, WIDTH, WARPS, EVEN, LINK)
        if STEPS > 1:
            begin += EACH
            gate_words_2, gate_pairs_2 = _request(
                gates, gate_scales, first, begin, INNER, WIDTH, WARPS, ALSO, LINK)
            up_words_2, up_pairs_2 = _request(
                ups, up_scales, first, begin, INNER, WIDTH, WARPS, ALSO, LINK)
        if PDL:
            # takes no time; the compiler moves no request behind it, nor x before it
            gdc_wait()
        if NORM:
            scale = gl.load(norms + at)
        if STEPS > 1:
            lines_2, _ = _normed(own, gain, begin, WIDTH, WARPS, NORM)
            shared_2, sums_2 = _share(lines_2, WARPS)
        lines, _ = _normed(own, gain, step * EACH, WIDTH, WARPS, NORM)
        shared, sums = _share(lines, WARPS)
        columns, own_sums = _shared(shared, sums, WARPS)
        gate += _products(gate_words, gate_pairs, columns, own_sums, WARPS)
        up += _products(up_words, up_pairs, columns, own_sums, WARPS)
        if STEPS > 1:
            columns, own_sums = _shared(shared_2, sums_2, WARPS)
            gate += _products(gate_words_2, gate_pairs_2, columns, own_sums, WARPS)
            up += _products(up_words_2, up_pairs_2, columns, own_sums, WARPS)
    # fmt: on
    gate, up = _over_units(gl.sum(gate, 2), gl.sum(up, 2), WARPS)
    if NORM:
        gate, up = gate * scale, up * scale
    acts = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
    row = first + gl.arange(0, 16, layout=_result_layout(WARPS))
    gl.store(out + pair.to(gl.int64) * INNER + row, acts, mask=row < INNER)


@gluon.jit
def _int4_pair_gate_up(
    x, gain, norms, chosen, taken, pool, out, ids, state, copied,
    SCALES_AT: gl.constexpr, UNIT: gl.constexpr, TOP_K: gl.constexpr,
    INNER: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, NORM: gl.constexpr,
    TAKEN: gl.constexpr, GUESSED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[pair, i] = silu(gate) * up of x[pair // TOP_K]; with NORM x is not normed yet. x and gain
    are words of two columns. With TAKEN rows below taken[pair] are left out; with GUESSED some may
    be at place `copied`. Grid: (pairs, tiles of rows)."""
    pair = gl.program_id(0)
    first = gl.program_id(1) * 16
    if PDL:
        gdc_wait()
        # only now: `down` reads the places before it waits
        gdc_launch_dependents()
    # fmt: off
    if TAKEN:
        if first >= gl.load(taken + pair, cache_modifier=".cg"):
            _gate_up_tile(
                x, gain, norms, chosen, pool, out, pair, first, ids, state, copied,
                SCALES_AT, UNIT, TOP_K, INNER, WIDTH, WARPS, NORM, TAKEN, GUESSED, PDL)
    else:
        _gate_up_tile(
            x, gain, norms, chosen, pool, out, pair, first, ids, state, copied,
            SCALES_AT, UNIT, TOP_K, INNER, WIDTH, WARPS, NORM, TAKEN, GUESSED, PDL)
    # fmt: on


@gluon.jit
def _unit_places(
    chosen, unit, pool,
    AT: gl.constexpr, UNIT: gl.constexpr, STEPS: gl.constexpr, TOP_K: gl.constexpr,
):  # fmt: skip
    """Where the expert of each unit begins."""
    k = gl.minimum(unit // STEPS, TOP_K - 1)
    return pool + (gl.load(chosen + k, cache_modifier=".cg") * UNIT + AT)


@gluon.jit
def _is_left(taken, unit, group, STEPS: gl.constexpr, TOP_K: gl.constexpr):
    """Whether nobody else computes this group of the unit's expert."""
    k = gl.minimum(unit // STEPS, TOP_K - 1)
    return group * 32 >= gl.load(taken + k, cache_modifier=".cg")


@gluon.jit
def _request_down(
    chosen, taken, pool, first, s,
    DOWN_AT: gl.constexpr, SCALES_AT: gl.constexpr, UNIT: gl.constexpr, TOP_K: gl.constexpr,
    INNER: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr, TAKEN: gl.constexpr,
):  # fmt: skip
    """Words and scales of 16 rows: unit s of each warp."""
    WORDS: gl.constexpr = _loaded_layout(W, TAKEN)
    SUMS: gl.constexpr = _sum_layout(W)
    STEPS: gl.constexpr = (INNER // 32 + 7) // 8
    PER: gl.constexpr = (TOP_K * STEPS + W - 1) // W
    ALL: gl.constexpr = INNER % 256 == 0 and WIDTH % 16 == 0 and TOP_K * STEPS % W == 0
    EVEN: gl.constexpr = ALL and not TAKEN
    row = first + _along(16, 1, 3, SUMS)
    unit = _along(W, 0, 3, SUMS) * PER + s
    own = unit % STEPS * 8 + _along(8, 2, 3, SUMS)
    inside = (row < WIDTH) & (own < INNER // 32) & (unit < TOP_K * STEPS)
    if TAKEN:
        # those of two groups are one load
        inside = inside & _is_left(taken, unit, own // 2 * 2 + 1, STEPS, TOP_K)
    base = _unit_places(chosen, unit, pool, SCALES_AT, UNIT, STEPS, TOP_K)
    pairs = _load_if(base + (row * (INNER // 32) + own), inside, EVEN)
    row = first + _along(16, 1, 4, WORDS)
    unit = _along(W, 0, 4, WORDS) * PER + s
    own = unit % STEPS * 8 + _along(8, 2, 4, WORDS)
    inside = (row < WIDTH) & (own < INNER // 32) & (unit < TOP_K * STEPS)
    if TAKEN:
        inside = inside & _is_left(taken, unit, own, STEPS, TOP_K)
    base = _unit_places(chosen, unit, pool, DOWN_AT, UNIT, STEPS, TOP_K)
    place = row * (INNER // 8) + own * 4 + _along(4, 3, 4, WORDS)
    return _load_if(base + place, inside, EVEN), pairs


@gluon.jit
def _lines_down(
    acts, taken, weights, s,
    TOP_K: gl.constexpr, INNER: gl.constexpr, W: gl.constexpr, TAKEN: gl.constexpr,
):  # fmt: skip
    """Words of the activations of unit s of each warp, and the weight of its expert."""
    LINES: gl.constexpr = _line_layout(W)
    SUMS: gl.constexpr = _sum_layout(W)
    STEPS: gl.constexpr = (INNER // 32 + 7) // 8
    PER: gl.constexpr = (TOP_K * STEPS + W - 1) // W
    unit = _along(W, 0, 3, LINES) * PER + s
    own = unit % STEPS * 8 + _along(8, 1, 3, LINES)
    inside = (own < INNER // 32) & (unit < TOP_K * STEPS)
    if TAKEN:
        inside = inside & _is_left(taken, unit, own, STEPS, TOP_K)
    place = unit // STEPS * (INNER // 2) + own * 16 + _along(16, 2, 3, LINES)
    lines = gl.load(acts + place, mask=inside, other=0)
    unit = _along(W, 0, 3, SUMS) * PER + s
    return lines, gl.load(weights + unit // STEPS, mask=unit < TOP_K * STEPS, other=0)


@gluon.jit
def _weighted(words, pairs, shared, sums, share, W: gl.constexpr):
    """[W, 16, 8]: products by group, times the weight of the expert."""
    columns, own_sums = _shared(shared, sums, W)
    return share * _products(words, pairs, columns, own_sums, W)


@gluon.jit
def _int4_pair_down(
    acts, chosen, taken, weights, pool, hidden,
    DOWN_AT: gl.constexpr, SCALES_AT: gl.constexpr, UNIT: gl.constexpr, TOP_K: gl.constexpr,
    INNER: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, ADD: gl.constexpr,
    TAKEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """hidden[t] (+)= sum over k of weights[t, k] * down of acts[t, k], words of two columns;
    with TAKEN only of columns from taken[t, k] on. The first units of the weights are requested
    before the wait."""
    STEPS: gl.constexpr = (INNER // 32 + 7) // 8
    PER: gl.constexpr = (TOP_K * STEPS + WARPS - 1) // WARPS
    first = gl.program_id(0) * 16
    at = gl.program_id(1).to(gl.int64)
    if PDL:
        gdc_launch_dependents()
    chosen += at * TOP_K
    taken += at * TOP_K
    acts += at * (TOP_K * INNER // 2)
    weights += at * TOP_K
    # fmt: off
    words_0, pairs_0 = _request_down(
        chosen, taken, pool, first, 0, DOWN_AT, SCALES_AT, UNIT, TOP_K, INNER, WIDTH, WARPS,
        TAKEN)
    if PER > 1:
        words_1, pairs_1 = _request_down(
            chosen, taken, pool, first, 1, DOWN_AT, SCALES_AT, UNIT, TOP_K, INNER, WIDTH, WARPS,
        TAKEN)
    if PER > 2:
        words_2, pairs_2 = _request_down(
            chosen, taken, pool, first, 2, DOWN_AT, SCALES_AT, UNIT, TOP_K, INNER, WIDTH, WARPS,
        TAKEN)
    if PDL:
        gdc_wait()
    row = first + gl.arange(0, 16, layout=_result_layout(WARPS))
    target = hidden + at * WIDTH + row
    if ADD:
        before = gl.load(target, mask=row < WIDTH, other=0).to(gl.float32)
    lines_0, share_0 = _lines_down(acts, taken, weights, 0, TOP_K, INNER, WARPS, TAKEN)
    if PER > 1:
        lines_1, share_1 = _lines_down(acts, taken, weights, 1, TOP_K, INNER, WARPS, TAKEN)
    if PER > 2:
        lines_2, share_2 = _lines_down(acts, taken, weights, 2, TOP_K, INNER, WARPS, TAKEN)
    shared_0, sums_0 = _share(lines_0, WARPS)
    if PER > 1:
        shared_1, sums_1 = _share(lines_1, WARPS)
    if PER > 2:
        shared_2, sums_2 = _share(lines_2, WARPS)
    total = _weighted(words_0, pairs_0, shared_0, sums_0, share_0, WARPS)
    if PER > 1:
        total += _weighted(words_1, pairs_1, shared_1, sums_1, share_1, WARPS)
    if PER > 2:
        total += _weighted(words_2, pairs_2, shared_2, sums_2, share_2, WARPS)
    for s in range(3, PER):
        words, pairs = _request_down(
            chosen, taken, pool, first, s, DOWN_AT, SCALES_AT, UNIT, TOP_K, INNER, WIDTH, WARPS,
            TAKEN)
        lines, share = _lines_down(acts, taken, weights, s, TOP_K, INNER, WARPS, TAKEN)
        shared, sums = _share(lines, WARPS)
        total += _weighted(words, pairs, shared, sums, share, WARPS)
    # fmt: on
    # in the order of k: a warp has consecutive units
    total = gl.sum(total, 2)
    y, _ = _over_units(total, total, WARPS)
    if ADD:
        y += before
    gl.store(target, y.to(gl.bfloat16), mask=row < WIDTH)


@gluon.jit
def _finish_product(
    x, gain, weight, scales, bias, y, eps, first, at, words, pairs, words_2, pairs_2,
    COUNT: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr, NORM: gl.constexpr,
    BIAS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """y[at] of one tile, of which two steps are requested already."""
    EACH: gl.constexpr = W * 8
    STEPS: gl.constexpr = (WIDTH // 32 + EACH - 1) // EACH
    EVEN: gl.constexpr = WIDTH % (EACH * 32) == 0 and COUNT % 16 == 0
    own = x + at * (WIDTH // 2)
    row = first + gl.arange(0, 16, layout=_result_layout(W))
    live = row < COUNT
    target = y + at * COUNT + row
    before = 0.0
    if BIAS:
        before += gl.load(bias + row, mask=live, other=0).to(gl.float32)
    if ADD:
        before += gl.load(target, mask=live, other=0).to(gl.float32)
    # fmt: off
    lines, squares = _normed(own, gain, 0, WIDTH, W, NORM)
    if STEPS > 1:
        lines_2, more = _normed(own, gain, EACH, WIDTH, W, NORM)
        if NORM:
            squares += more
        shared_2, sums_2 = _share(lines_2, W)
    shared, sums = _share(lines, W)
    columns, own_sums = _shared(shared, sums, W)
    total = _products(words, pairs, columns, own_sums, W)
    if STEPS > 1:
        columns, own_sums = _shared(shared_2, sums_2, W)
        total += _products(words_2, pairs_2, columns, own_sums, W)
    for step in range(2, STEPS):
        words, pairs = _request(weight, scales, first, step * EACH, COUNT, WIDTH, W, EVEN)
        lines, more = _normed(own, gain, step * EACH, WIDTH, W, NORM)
        if NORM:
            squares += more
        shared, sums = _share(lines, W)
        columns, own_sums = _shared(shared, sums, W)
        total += _products(words, pairs, columns, own_sums, W)
    # fmt: on
    total = gl.sum(total, 2)

    if NORM:
        each = gl.convert_layout(
            gl.sum(gl.sum(squares, 2), 1), gl.SliceLayout(1, gl.SliceLayout(2, _sum_layout(W)))
        )
        result, square = _over_units(*gl.broadcast(total, gl.expand_dims(each, 1)), W)
        result *= gl.rsqrt(square / WIDTH + eps)
    else:
        result, _ = _over_units(total, total, W)
    if BIAS or ADD:
        result += before
    gl.store(target, result.to(y.dtype.element_ty), mask=live)


@gluon.jit
def _int4_product(
    x, gain, weight, scales, bias, y, eps, rows,
    COUNT: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, X_ROWS: gl.constexpr,
    NORM: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """y[t, n] (+)= W[n] . x[t] (+ bias), with NORM of rms_norm(x[t]) * gain; x and gain are words
    of two columns. Grid: (tiles of rows of W, parts of X_ROWS rows of x)."""
    EACH: gl.constexpr = WARPS * 8
    EVEN: gl.constexpr = WIDTH % (EACH * 32) == 0 and COUNT % 16 == 0
    first = gl.program_id(0).to(gl.int64) * 16
    if PDL:
        gdc_launch_dependents()
    # fmt: off
    words, pairs = _request(weight, scales, first, 0, COUNT, WIDTH, WARPS, EVEN)
    words_2, pairs_2 = words, pairs
    if WIDTH // 32 > EACH:
        words_2, pairs_2 = _request(weight, scales, first, EACH, COUNT, WIDTH, WARPS, EVEN)
    if PDL:
        gdc_wait()
    if X_ROWS == 1:
        _finish_product(
            x, gain, weight, scales, bias, y, eps, first, gl.program_id(1).to(gl.int64),
            words, pairs, words_2, pairs_2, COUNT, WIDTH, WARPS, NORM, BIAS, ADD)
    else:
        begin = gl.program_id(1) * X_ROWS
        for at in range(begin, gl.minimum(begin + X_ROWS, rows)):
            _finish_product(
                x, gain, weight, scales, bias, y, eps, first, at,
                words, pairs, words_2, pairs_2, COUNT, WIDTH, WARPS, NORM, BIAS, ADD)
    # fmt: on


def _launch(warps: int, dependent: bool) -> dict[str, Any]:
    options = {"WARPS": warps, "num_warps": warps, "PDL": dependent}
    return {**options, **({"launch_pdl": True} if dependent else {})}


def _words(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def int4_pair_gate_up(
    x: Tensor, places: Tensor, pool: Tensor, record: DeviceRecord, out: Tensor,
    norm: tuple[Tensor, Tensor] | None = None, dependent: bool = False,
    taken: Tensor | None = None, prefetched: tuple[Tensor, Tensor, int] | None = None,
) -> None:  # fmt: skip
    """out [T * K, I] = silu(gate) * up of the experts at `places` [T, K] of the pool, int32. Where
    x is not normed yet, `norm` has the gain and the scales of the rows [T]. `taken` int32 [T, K]:
    the channels of each pair below it are left out; in whole groups of 32. `prefetched`: the
    experts' ids, and the state and place of a `link_prefetch.LayerGuess`."""
    gain, scales = (x, x) if norm is None else norm
    ids, state, copied = prefetched or (places, places, 0)
    _int4_pair_gate_up[(places.numel(), triton.cdiv(record.intermediate, ROWS))](
        _words(x), _words(gain), scales, places, places if taken is None else taken, pool, out,
        ids, state, copied, GUESSED=prefetched is not None,
        SCALES_AT=record.gate_up_scales_at // WORD_BYTES, UNIT=UNIT_BYTES // WORD_BYTES,
        TOP_K=places.shape[1], INNER=record.intermediate, WIDTH=record.hidden,
        NORM=norm is not None, TAKEN=taken is not None, **_launch(GATE_UP_WARPS, dependent),
    )  # fmt: skip


def int4_pair_down(
    acts: Tensor, places: Tensor, weights: Tensor, pool: Tensor, record: DeviceRecord,
    hidden: Tensor, add: bool = True, dependent: bool = False, taken: Tensor | None = None,
) -> None:  # fmt: skip
    """hidden [T, D] += the weighted sum of the experts' outputs (or =, without `add`). `taken`: see
    `int4_pair_gate_up`."""
    _int4_pair_down[(triton.cdiv(record.hidden, ROWS), len(hidden))](
        _words(acts), places, places if taken is None else taken, weights, pool, hidden,
        DOWN_AT=record.down_at // WORD_BYTES, SCALES_AT=record.down_scales_at // WORD_BYTES,
        UNIT=UNIT_BYTES // WORD_BYTES, TOP_K=places.shape[1], INNER=record.intermediate,
        WIDTH=record.hidden, ADD=add, TAKEN=taken is not None, **_launch(DOWN_WARPS, dependent),
    )  # fmt: skip


def int4_product(
    x: Tensor, weight: Tensor, scales: Tensor, y: Tensor, *, gain: Tensor | None = None,
    eps: float = 0.0, bias: Tensor | None = None, add: bool = False, dependent: bool = False,
) -> None:  # fmt: skip
    """y [T, N] = (or with `add` +=) x [T, D] times a matrix (see `DeviceMatrix`), plus `bias`; with
    `gain` of the normed x. Every row has the same result in any number of rows."""
    count, each = len(weight), min(X_ROWS, len(x))
    _int4_product[(triton.cdiv(count, ROWS), triton.cdiv(len(x), each))](
        _words(x), _words(x if gain is None else gain), weight, scales,
        y if bias is None else bias, y, eps, len(x),
        COUNT=count, WIDTH=x.shape[1], X_ROWS=each, NORM=gain is not None,
        BIAS=bias is not None, ADD=add, **_launch(PRODUCT_WARPS, dependent),
    )  # fmt: skip
