"""Triton kernels for the experts of few rows: one product per (row, expert) pair.

Three kernels: `route` (norm, gate, top-k by its last program), `gate_up`, `down` (with the sum over
experts and the residual). An expert is found by its place: a 64-bit offset from the beginning of
the pool, in units of 16 bytes, which may lead out of the pool into other memory that the device
reads.
Records: `device_record`. With PDL see `gemv`; `down` requests its weights before `gate_up` has
ended, because `route` has told it the places.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.cpu.share import HINT_HEAD, HINT_WORDS
from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord, dense_matrices
from coterie.kernels.expert_gate import GateRule
from coterie.kernels.triton.gemv import both_times_x, request_rows, times_x
from coterie.kernels.triton.int4_rows import int4_pair_down, int4_pair_gate_up
from coterie.kernels.triton.link_prefetch import (
    CHOSEN,
    GUESS,
    TILE,
    TURN,
    LayerGuess,
    is_copied,
)
from coterie.kernels.triton.unpack import load_if, nibble, scale_and_minimum
from coterie.weights.kinds import GROUP


@triton.jit
def _rank_and_store(
    logits, places, penalty, ids, chosen, weights,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SCALE: tl.constexpr, EQUAL: tl.constexpr, PENALTY: tl.constexpr,
):  # fmt: skip
    """Top-k of one row's logits by one comparison of all with all; ties go to the lower index.
    `places`: those of all experts, already loaded."""
    e = tl.arange(0, PADDED)
    inside = e < EXPERTS
    v = tl.load(logits + e, mask=inside, other=-float("inf"), cache_modifier=".cg")
    ranked = v
    if PENALTY:
        absent = tl.load(penalty + e, mask=inside, other=-2.0) < 0
        ranked = tl.where(absent, -float("inf"), v)
    ahead = (ranked[:, None] > ranked[None, :]) | (
        (ranked[:, None] == ranked[None, :]) & (e[:, None] < e[None, :])
    )
    rank = tl.sum(ahead.to(tl.int32), 0)
    keep = (rank < TOP_K) & inside
    share = tl.where(inside, tl.exp(v - tl.max(v, 0)), 0.0)
    if EQUAL:
        weight = tl.full([PADDED], SCALE, tl.float32)
    else:
        counted = tl.where(keep, share, 0.0) if NORMALISE else share
        weight = share / tl.sum(counted, 0) * SCALE
    tl.store(ids + rank, e, mask=keep)
    tl.store(chosen + rank, places, mask=keep)
    tl.store(weights + rank, weight, mask=keep)


@triton.jit
def _guess_and_tell(
    logits, tiers, penalty, state, hint, layer,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, PENALTY: tl.constexpr, HINTS: tl.constexpr,
    COPIED: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The best expert that is not on the device is the guess; the best ones, as many as HINTS and
    without the guess if it is COPIED, are the hint."""
    e = tl.arange(0, PADDED)
    missing = tl.load(tiers + e, mask=e < EXPERTS, other=0) != 0
    v = tl.load(logits + e, mask=missing, other=-float("inf"), cache_modifier=".cg")
    if PENALTY:
        v = tl.where(tl.load(penalty + e, mask=missing, other=-2.0) < 0, -float("inf"), v)
    missing = missing & (v > -float("inf"))
    turn = tl.load(state + TURN) + 1
    tl.store(state + TURN, turn)
    if HINTS:
        ahead = (v[:, None] > v[None, :]) | ((v[:, None] == v[None, :]) & (e[:, None] < e[None, :]))
        rank = tl.where(missing, tl.sum(ahead.to(tl.int32), 0), PADDED)
        word = tl.arange(0, WORDS)
        wanted = tl.where(word < FIRST, 2 * PADDED, word - FIRST + COPIED)
        told = tl.sum(tl.where(rank[None, :] == wanted[:, None], e[None, :], 0), 1)
        count = tl.minimum(tl.maximum(tl.sum(missing.to(tl.int32), 0) - COPIED, 0), HINTS)
        told = tl.where(word == 0, layer, tl.where(word == 1, turn, told))
        tl.store(hint + word, tl.where(word == 2, count, told))
        tl.store(state + GUESS, tl.max(tl.where(rank == 0, e, -1), 0))
    else:
        tl.store(state + GUESS, tl.where(tl.max(v, 0) > -float("inf"), tl.argmax(v, 0), -1))


@triton.jit
def _guess_row(
    x, gain, gate, tiers, penalty, logits, count, state, hint, layer, number,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    PENALTY: tl.constexpr, HINTS: tl.constexpr, COPIED: tl.constexpr, HINT_WORDS: tl.constexpr,
    HINT_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row `number` of the next layer's gate times the first row of x; the last program guesses. The
    scale of the norm changes no order."""
    row = number + tl.arange(0, 1)
    tile, _ = request_rows(gate, gate, row, row < EXPERTS, WIDTH, WIDE, 0, WIDTH == WIDE)
    if PDL:
        gdc_wait()
    if tl.program_id(1) == 0:
        total, _squares = times_x(tile, tile, x, gain, 1, WIDTH, WIDE, 0, True)
        tl.store(logits + row, total)
        tl.debug_barrier()
        before = tl.atomic_add(count, 1, sem="acq_rel")
        if before == EXPERTS - 1:
            tl.store(count, 0)
            _guess_and_tell(
                logits, tiers, penalty, state, hint, layer,
                EXPERTS, PADDED, PENALTY, HINTS, COPIED, HINT_WORDS, HINT_HEAD,
            )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _route(
    x, gain, gate, places, penalty, logits, counts, ids, chosen, weights, norms, state, eps,
    next_gain, next_gate, next_tiers, next_penalty, next_logits, next_count, next_state, hint,
    layer,
    WIDTH: tl.constexpr, WIDE: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SCALE: tl.constexpr, EQUAL: tl.constexpr, PENALTY: tl.constexpr, GUESSED: tl.constexpr,
    NEXT: tl.constexpr, NEXT_PENALTY: tl.constexpr, HINTS: tl.constexpr, COPIED: tl.constexpr,
    HINT_WORDS: tl.constexpr, HINT_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gate logits of rms_norm(x[t]) * gain, and their top-k by the last program of each row.
    norms[t]: the norm's scale, which `gate_up` needs. counts[t] is 0 before and after. With GUESSED
    `link_prefetch` ends what it does for this layer. With NEXT, as many programs again guess an
    expert of the next layer."""
    number = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    at = tl.program_id(1).to(tl.int64)
    if number < EXPERTS:
        row = number + tl.arange(0, 1)
        tile, _ = request_rows(gate, gate, row, row < EXPERTS, WIDTH, WIDE, 0, WIDTH == WIDE)
        e = tl.arange(0, PADDED)
        known = tl.load(places + e, mask=e < EXPERTS, other=0)
        if PDL:
            gdc_wait()
        if GUESSED:
            # at the beginning: what is on its way arrives before `gate_up` reads
            tl.store(state + CHOSEN, tl.load(state + TURN))
        total, squares = times_x(tile, tile, x + at * WIDTH, gain, 1, WIDTH, WIDE, 0, True)
        scale = tl.rsqrt(squares / WIDTH + eps)
        tl.store(logits + at * EXPERTS + row, total * scale)
        tl.store(norms + at, scale)
        tl.debug_barrier()
        before = tl.atomic_add(counts + at, 1, sem="acq_rel")
        if before == EXPERTS - 1:
            tl.store(counts + at, 0)
            _rank_and_store(
                logits + at * EXPERTS, known, penalty, ids + at * TOP_K, chosen + at * TOP_K,
                weights + at * TOP_K,
                EXPERTS, PADDED, TOP_K, NORMALISE, SCALE, EQUAL, PENALTY,
            )  # fmt: skip
    elif NEXT:
        _guess_row(
            x, next_gain, next_gate, next_tiers, next_penalty, next_logits, next_count, next_state,
            hint, layer, number - EXPERTS,
            WIDTH, WIDE, EXPERTS, PADDED, NEXT_PENALTY, HINTS, COPIED, HINT_WORDS, HINT_HEAD, PDL,
        )  # fmt: skip


@triton.jit
def _choose(
    logits, places, penalty, ids, chosen, weights,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SCALE: tl.constexpr, EQUAL: tl.constexpr, PENALTY: tl.constexpr,
):  # fmt: skip
    """Top-k of each row's logits, one program per row."""
    at = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED)
    known = tl.load(places + e, mask=e < EXPERTS, other=0)
    _rank_and_store(
        logits + at * EXPERTS, known, penalty, ids + at * TOP_K, chosen + at * TOP_K,
        weights + at * TOP_K,
        EXPERTS, PADDED, TOP_K, NORMALISE, SCALE, EQUAL, PENALTY,
    )  # fmt: skip


# the number of rows changes from step to step: specialising on it would compile while serving
@triton.jit(do_not_specialize=["count"])
def _choose_rows(
    logits, places, penalty, ids, chosen, weights, count,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    SCALE: tl.constexpr, EQUAL: tl.constexpr, PENALTY: tl.constexpr, ROWS: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """As `_choose` for many rows: ROWS of them in a program, which takes the best TOP_K times. A
    key has a logit's bits in the order of integers, and below them the index, lowest first."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    e = tl.arange(0, PADDED)
    live, inside = row < count, e < EXPERTS
    mask = live[:, None] & inside[None, :]
    v = tl.load(logits + row[:, None] * EXPERTS + e[None, :], mask=mask, other=-float("inf"))
    greatest = tl.max(v, 1)
    total = tl.sum(tl.where(inside[None, :], tl.exp(v - greatest[:, None]), 0.0), 1)
    bits = v.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (key << SHIFT) + (PADDED - 1 - e)[None, :]
    lowest: tl.constexpr = -(1 << 62)
    if PENALTY:
        absent = tl.load(penalty + e, mask=inside, other=-2.0) < 0
        key = tl.where(absent[None, :], lowest, key)
    key = tl.where(inside[None, :], key, lowest)
    if NORMALISE:
        total = tl.zeros([ROWS], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], lowest, key)
        index = (PADDED - 1 - (best & (PADDED - 1))).to(tl.int32)
        order = (best >> SHIFT).to(tl.int32)
        own = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
        share = tl.exp(own - greatest)
        if NORMALISE:
            total += share
        at = row * TOP_K + k
        tl.store(ids + at, index, mask=live)
        tl.store(chosen + at, tl.load(places + index, mask=live, other=0), mask=live)
        tl.store(weights + at, share, mask=live)
    # each thread reads what it wrote
    for k in tl.static_range(TOP_K):
        at = row * TOP_K + k
        weight = tl.full([ROWS], SCALE, tl.float32)
        if not EQUAL:
            weight = tl.load(weights + at, mask=live, other=0) / total * SCALE
        tl.store(weights + at, weight, mask=live)


@triton.jit
def _gate_up_tile(
    x, gain, norms, chosen, pool, pool_scales, out, pair, first, ids, state, copied,
    SCALES_AT: tl.constexpr, UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr,
    TOP_K: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr,
    GUESSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS channels of `_pair_gate_up`."""
    row = first + tl.arange(0, ROWS)
    live = row < INNER
    place = tl.load(chosen + pair, cache_modifier=".cg")
    if GUESSED:
        place = tl.where(is_copied(state, tl.load(ids + pair), first), copied, place)
    weight = pool + place * UNIT
    scales = pool_scales + (place * SCALE_UNIT + SCALES_AT)
    EVEN: tl.constexpr = WIDTH == PADDED and INNER % ROWS == 0
    gates, gate_scales = request_rows(weight, scales, row, live, WIDTH, PADDED, KIND, EVEN)
    ups, up_scales = request_rows(weight, scales, row + INNER, live, WIDTH, PADDED, KIND, EVEN)
    at = (pair // TOP_K).to(tl.int64)
    own = x + at * WIDTH
    if PDL:
        # takes no time; the compiler moves no request behind it, where the products wait for x
        gdc_wait()
    if NORM:
        scale = tl.load(norms + at)
    gate, up, _ = both_times_x(
        gates, gate_scales, ups, up_scales, own, gain, ROWS, WIDTH, PADDED, KIND, NORM
    )
    if NORM:
        gate, up = gate * scale, up * scale
    acts = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + pair.to(tl.int64) * INNER + row, acts.to(out.dtype.element_ty), mask=live)


@triton.jit
def _pair_gate_up(
    x, gain, norms, chosen, taken, pool, pool_scales, out, ids, state, copied,
    SCALES_AT: tl.constexpr, UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr,
    PAIRS: tl.constexpr, TOP_K: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr,
    TAKEN: tl.constexpr, GUESSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[pair, i] = silu(gate) * up of x[pair // TOP_K]; with NORM x is not normed yet. With TAKEN
    tiles of channels below taken[pair] are left out; with GUESSED some may be at place `copied`."""
    program = tl.program_id(0)
    pair = program % PAIRS
    first = (program // PAIRS) * ROWS
    if PDL:
        gdc_wait()
        # only now: `down` reads the places before it waits
        gdc_launch_dependents()
    # fmt: off
    if TAKEN:
        if first + ROWS > tl.load(taken + pair, cache_modifier=".cg"):
            _gate_up_tile(
                x, gain, norms, chosen, pool, pool_scales, out, pair, first, ids, state, copied,
                SCALES_AT, UNIT, SCALE_UNIT, TOP_K, INNER, WIDTH, PADDED, ROWS, KIND, NORM, GUESSED,
                PDL)
    else:
        _gate_up_tile(
            x, gain, norms, chosen, pool, pool_scales, out, pair, first, ids, state, copied,
            SCALES_AT, UNIT, SCALE_UNIT, TOP_K, INNER, WIDTH, PADDED, ROWS, KIND, NORM, GUESSED,
            PDL)
    # fmt: on


@triton.jit
def _down_tile(
    weight, scales, row, live, begin, chunk: tl.constexpr,
    INNER: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Part `chunk` of the columns of some rows of all experts: [rows, experts, columns]. Unless
    EVEN: only those from column `begin` of each expert on."""
    WORDS: tl.constexpr = CHUNK // 8 if KIND == 2 else CHUNK
    STRIDE: tl.constexpr = INNER // 8 if KIND == 2 else INNER
    column = chunk * WORDS + tl.arange(0, WORDS)
    inside = live & (column < STRIDE)[None, None, :]
    whole = column // 4 * 32 if KIND == 2 else column
    inside = inside & (whole[None, :] >= begin[:, None])[None, :, :]
    place = weight[None, :, None] + row[:, None, None] * STRIDE + column[None, None, :]
    tile = load_if(place, inside, EVEN)
    if KIND == 0:
        own = tile
    else:
        group = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
        inside = live & (group < INNER // 32)[None, None, :]
        inside = inside & (group[None, :] * 32 >= begin[:, None])[None, :, :]
        place = scales[None, :, None] + row[:, None, None] * (INNER // 32) + group[None, None, :]
        own = load_if(place, inside, EVEN)
    return tile, own


@triton.jit
def _down_values(
    acts, k, used, begin, chunk: tl.constexpr,
    INNER: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The activations of each expert [experts, columns] for one chunk; int4 loads them later."""
    value = k
    if KIND != 2:
        column = tl.arange(0, CHUNK)
        inside = used[:, None] & (column < INNER - chunk * CHUNK)[None, :]
        inside = inside & (column[None, :] + chunk * CHUNK >= begin[:, None])
        value = load_if(acts + k[:, None] * INNER + chunk * CHUNK + column[None, :], inside, EVEN)
    return value


@triton.jit
def _down_products(
    tile, scales, value, acts, k, used, begin, chunk: tl.constexpr,
    INNER: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    KIND: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[rows, experts, part of the columns]: products of one chunk with the activations of each
    expert, not summed yet over the last dimension."""
    own = acts + k[:, None] * INNER + chunk * CHUNK
    left: tl.constexpr = INNER - chunk * CHUNK
    if KIND == 2:
        word = tl.arange(0, CHUNK // 8)
        first = (word // 4) * 32 + word % 4
        inside = used[:, None] & (word < left // 8)[None, :]
        inside = inside & ((word // 4 * 32 + chunk * CHUNK)[None, :] >= begin[:, None])
        total = tl.zeros([ROWS, EXPERTS, CHUNK // 8], tl.float32)
        sums = tl.zeros([EXPERTS, CHUNK // 8], tl.float32)
        for j in tl.static_range(8):
            at = own + first[None, :] + 4 * j
            value = load_if(at, inside, EVEN).to(tl.float32)
            sums += value
            total += nibble(tile, j) * (value * (1.0 / 16 ** (j % 4)))[None, :, :]
        scale, minimum = scale_and_minimum(scales)
        grouped = tl.sum(tl.reshape(total, [ROWS, EXPERTS, CHUNK // 32, 4]), 3)
        each = tl.sum(tl.reshape(sums, [EXPERTS, CHUNK // 32, 4]), 2)
        result = grouped * scale + minimum * each[None, :, :]
    else:
        result = tile.to(tl.float32) * value.to(tl.float32)[None, :, :]
        if KIND == 1:
            grouped = tl.sum(tl.reshape(result, [ROWS, EXPERTS, CHUNK // 32, 32]), 3)
            result = grouped * scales.to(tl.float32)
    return result


@triton.jit
def _pair_down(
    acts, chosen, taken, weights, pool, pool_scales, hidden,
    DOWN_AT: tl.constexpr, SCALES_AT: tl.constexpr, UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, KIND: tl.constexpr,
    ADD: tl.constexpr, TAKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[t] (+)= sum over k of weights[t, k] * down of acts[t, k], in the order of k;
    with TAKEN only of channels from taken[t, k] on. The first chunks of the weights are requested
    before the wait."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, EXPERTS)
    used = k < TOP_K
    live = (row < WIDTH)[:, None, None] & used[None, :, None]
    if PDL:
        gdc_launch_dependents()
    place = tl.load(chosen + at * TOP_K + k, mask=used, other=0, cache_modifier=".cg")
    begin = k * 0
    if TAKEN:
        begin = tl.load(taken + at * TOP_K + k, mask=used, other=INNER, cache_modifier=".cg")
    weight = pool + (place * UNIT + DOWN_AT)
    scales = pool_scales + (place * SCALE_UNIT + SCALES_AT)
    own = acts + at * TOP_K * INNER
    EVEN: tl.constexpr = INNER % CHUNK == 0 and WIDTH % ROWS == 0 and TOP_K == EXPERTS and not TAKEN
    # fmt: off
    tile_0, scales_0 = _down_tile(weight, scales, row, live, begin, 0, INNER, CHUNK, KIND, EVEN)
    if CHUNKS > 1:
        tile_1, scales_1 = _down_tile(weight, scales, row, live, begin, 1, INNER, CHUNK, KIND, EVEN)
    if CHUNKS > 2:
        tile_2, scales_2 = _down_tile(weight, scales, row, live, begin, 2, INNER, CHUNK, KIND, EVEN)
    if PDL:
        gdc_wait()
    # everything at once: each load between barriers would cost a trip to L2
    values_0 = _down_values(own, k, used, begin, 0, INNER, CHUNK, KIND, EVEN)
    if CHUNKS > 1:
        values_1 = _down_values(own, k, used, begin, 1, INNER, CHUNK, KIND, EVEN)
    if CHUNKS > 2:
        values_2 = _down_values(own, k, used, begin, 2, INNER, CHUNK, KIND, EVEN)
    share = tl.load(weights + at * TOP_K + k, mask=used, other=0)
    target = hidden + at * WIDTH + row
    if ADD:
        before = tl.load(target, mask=row < WIDTH, other=0).to(tl.float32)
    total = _down_products(
        tile_0, scales_0, values_0, own, k, used, begin, 0, INNER, CHUNK, ROWS, EXPERTS, KIND, EVEN)
    if CHUNKS > 1:
        total += _down_products(
            tile_1, scales_1, values_1, own, k, used, begin, 1, INNER, CHUNK, ROWS, EXPERTS,
            KIND, EVEN)
    if CHUNKS > 2:
        total += _down_products(
            tile_2, scales_2, values_2, own, k, used, begin, 2, INNER, CHUNK, ROWS, EXPERTS,
            KIND, EVEN)
    for chunk in tl.static_range(3, CHUNKS):
        tile, more = _down_tile(weight, scales, row, live, begin, chunk, INNER, CHUNK, KIND, EVEN)
        values = _down_values(own, k, used, begin, chunk, INNER, CHUNK, KIND, EVEN)
        total += _down_products(
            tile, more, values, own, k, used, begin, chunk, INNER, CHUNK, ROWS, EXPERTS, KIND, EVEN)
    # fmt: on
    y = tl.sum(tl.sum(total, 2) * share[None, :], 1)
    if ADD:
        y += before
    tl.store(target, y.to(hidden.dtype.element_ty), mask=row < WIDTH)


@dataclass(frozen=True, slots=True)
class ExpertPool:
    """The experts of a layer on the device: `places[e]` in units of 16 bytes from `base`."""

    base: Tensor
    places: Tensor
    record: DeviceRecord

    def views(self) -> tuple[Tensor, Tensor, dict[str, int]]:
        """The pool typed as matrices and as scales, and what kernels need to find the parts."""
        record = self.record
        types = {
            "fp32": (torch.float32, torch.float32, 0),
            "bf16": (torch.bfloat16, torch.bfloat16, 0),
            "int8": (torch.int8, torch.float16, 1),
            "int4": (torch.int32, torch.int32, 2),
        }
        own, scale, kind = types[record.kind]
        sizes = {
            "UNIT": UNIT_BYTES // own.itemsize,
            "SCALE_UNIT": UNIT_BYTES // scale.itemsize,
            "KIND": kind,
            "INNER": record.intermediate,
            "WIDTH": record.hidden,
        }
        return self.base.view(own), self.base.view(scale), sizes

    def at(self, nbytes: int, *, scales: bool = False) -> int:
        """A place in a record as a number of elements of the typed pool."""
        matrices, own_scales, _ = self.views()
        return nbytes // (own_scales if scales else matrices).element_size()


@dataclass(frozen=True, slots=True)
class PairSizes:
    """Rows and warps of the programs of `gate_up` and `down`, and columns of a chunk of `down`."""

    gate_up_rows: int
    gate_up_warps: int
    down_rows: int
    down_warps: int
    down_chunk: int


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The chosen experts of T rows: ids int32, places int64 and weights fp32 [T, K]; and the norms'
    scales fp32 [T]."""

    ids: Tensor
    places: Tensor
    weights: Tensor
    norms: Tensor

    @classmethod
    def empty(cls, rows: int, top_k: int, device: torch.device | str) -> RoutedRows:
        shape = (rows, top_k)
        return cls(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.float32, device=device),
        )


def _rule(rule: GateRule, experts: int, penalty: Tensor | None) -> dict[str, Any]:
    return {
        "EXPERTS": experts,
        "PADDED": triton.next_power_of_2(experts),
        "TOP_K": rule.top_k,
        "NORMALISE": rule.normalise,
        "SCALE": rule.scale,
        "EQUAL": rule.equal,
        "PENALTY": penalty is not None,
    }


# more rows are ranked several in a program
MANY_ROWS = 512
# more experts are not ranked for a hint: all compared with all would not fit into registers
RANKED = 128


def _launch(dependent: bool) -> dict[str, Any]:
    return {"PDL": dependent, **({"launch_pdl": True} if dependent else {})}


@dataclass(frozen=True, slots=True)
class NextGate:
    """The next layer, of which an expert is guessed: only those that are not on the device (`tiers`
    int8 [E] not 0). `scratch`: logits fp32 [E], and a zero int32 [1] which stays zero."""

    gain: Tensor
    gate: Tensor
    penalty: Tensor | None
    tiers: Tensor
    scratch: tuple[Tensor, Tensor]
    guess: LayerGuess


def route(
    x: Tensor, gain: Tensor, eps: float, gate: Tensor, rule: GateRule, penalty: Tensor | None,
    places: Tensor, scratch: tuple[Tensor, Tensor], out: RoutedRows, dependent: bool = False,
    guess: LayerGuess | None = None, following: NextGate | None = None,
) -> None:  # fmt: skip
    """The experts of rms_norm(x [T, D]) * gain. `scratch`: logits fp32 [T, E], and zeros int32 [T]
    which stay zeros. Rules with groups are not supported. `guess`: what was prefetched for them.
    `following`: guess an expert of this layer, which has as many, for the first row."""
    experts, width = gate.shape
    logits, counts = scratch
    own = counts if guess is None else guess.state
    assert following is None or following.gate.shape == gate.shape
    told = following.guess.hint if following is not None and experts <= RANKED else None
    copied = int(following is not None and following.guess.place is not None)
    if following is None:
        coming = gain, gate, places, gate, logits, counts, own, own, 0
    else:
        state, other = following.guess.state, following.penalty
        coming = (
            following.gain, following.gate, following.tiers, gate if other is None else other,
            *following.scratch, state, state if told is None else told, following.guess.row,
        )  # fmt: skip
    _route[(experts * (1 if following is None else 2), len(x))](
        x, gain, gate, places, gate if penalty is None else penalty, logits, counts,
        out.ids, out.places, out.weights, out.norms, own, eps, *coming,
        WIDTH=width, WIDE=triton.next_power_of_2(width), GUESSED=guess is not None,
        NEXT=following is not None,
        NEXT_PENALTY=following is not None and following.penalty is not None,
        HINTS=0 if told is None else min(rule.top_k - copied, HINT_WORDS - HINT_HEAD),
        COPIED=copied, HINT_WORDS=HINT_WORDS, HINT_HEAD=HINT_HEAD,
        **_rule(rule, experts, penalty), **_launch(dependent), num_warps=4,
    )  # fmt: skip


def guess_torch(
    x: Tensor, gain: Tensor, gate: Tensor, tiers: Tensor, penalty: Tensor | None
) -> list[int]:
    """The plain twin of what `route` guesses of the following layer, best first; empty: all are on
    the device."""
    logits = (x[0].float() * gain.float()) @ gate.float().T
    possible = tiers != 0 if penalty is None else (tiers != 0) & (penalty >= 0)
    order: list[int] = logits.argsort(descending=True, stable=True).tolist()
    return [expert for expert in order if possible[expert]]


def choose(
    logits: Tensor, rule: GateRule, penalty: Tensor | None, places: Tensor, out: RoutedRows
) -> None:
    """The experts of rows with these gate logits fp32 [T, E]."""
    experts = logits.shape[1]
    if len(logits) > MANY_ROWS:
        rows = 16
        _choose_rows[(triton.cdiv(len(logits), rows),)](
            logits, places, logits if penalty is None else penalty, out.ids, out.places,
            out.weights, len(logits),
            ROWS=rows, SHIFT=triton.next_power_of_2(experts).bit_length() - 1,
            **_rule(rule, experts, penalty), num_warps=4,
        )  # fmt: skip
        return
    _choose[(len(logits),)](
        logits, places, logits if penalty is None else penalty, out.ids, out.places, out.weights,
        **_rule(rule, logits.shape[1], penalty), num_warps=4,
    )  # fmt: skip


def on_tensor_cores(x: Tensor, pool: ExpertPool) -> bool:
    """Whether `int4_rows` has kernels for these experts."""
    return pool.record.kind == "int4" and x.dtype == torch.bfloat16


def pair_gate_up(
    x: Tensor, routed: RoutedRows, pool: ExpertPool, out: Tensor, sizes: PairSizes,
    gain: Tensor | None = None, dependent: bool = False, taken: Tensor | None = None,
    guess: LayerGuess | None = None,
) -> None:  # fmt: skip
    """out [T * K, I] = silu(gate) * up. With `gain` x is not normed yet. `taken` int32 [T, K]: the
    channels of each pair below it are left out; in whole groups of 32. `guess`: of one expert tiles
    may be prefetched."""
    prefetched = None
    if guess is not None:
        assert guess.place is not None
        prefetched = routed.ids, guess.state, guess.place
    if on_tensor_cores(x, pool):
        norm = None if gain is None else (gain, routed.norms)
        own = pool.views()[0], pool.record, out, norm, dependent, taken
        int4_pair_gate_up(x, routed.places, *own, prefetched)
        return
    matrices, scales, shape = pool.views()
    pairs, rows = routed.ids.numel(), sizes.gate_up_rows
    if guess is not None:
        rows = min(rows, TILE.value)
    tiles = triton.cdiv(pool.record.intermediate, rows)
    assert taken is None or GROUP % rows == 0
    ids, state, copied = prefetched or (routed.ids, routed.ids, 0)
    _pair_gate_up[(tiles * pairs,)](
        x, x if gain is None else gain, routed.norms, routed.places,
        routed.ids if taken is None else taken, matrices, scales, out, ids, state, copied,
        TAKEN=taken is not None, GUESSED=guess is not None,
        SCALES_AT=pool.at(pool.record.gate_up_scales_at, scales=True),
        PAIRS=pairs, TOP_K=routed.ids.shape[1],
        PADDED=triton.next_power_of_2(pool.record.hidden), ROWS=rows, NORM=gain is not None,
        **shape, **_launch(dependent), num_warps=sizes.gate_up_warps,
    )  # fmt: skip


def pair_down(
    acts: Tensor, routed: RoutedRows, pool: ExpertPool, hidden: Tensor, sizes: PairSizes,
    add: bool = True, dependent: bool = False, taken: Tensor | None = None,
) -> None:  # fmt: skip
    """hidden [T, D] += the weighted sum of the experts' outputs (or =, without `add`). `taken`: see
    `pair_gate_up`."""
    if on_tensor_cores(acts, pool):
        own = routed.places, routed.weights, pool.views()[0], pool.record
        int4_pair_down(acts, *own, hidden, add, dependent, taken)
        return
    matrices, scales, shape = pool.views()
    record, rows = pool.record, sizes.down_rows
    chunk = min(sizes.down_chunk, max(32, triton.next_power_of_2(record.intermediate)))
    _pair_down[(triton.cdiv(record.hidden, rows), len(hidden))](
        acts, routed.places, routed.ids if taken is None else taken, routed.weights, matrices,
        scales, hidden, TAKEN=taken is not None,
        DOWN_AT=pool.at(record.down_at), SCALES_AT=pool.at(record.down_scales_at, scales=True),
        TOP_K=routed.ids.shape[1], EXPERTS=triton.next_power_of_2(routed.ids.shape[1]),
        ROWS=rows, CHUNK=chunk, CHUNKS=triton.cdiv(record.intermediate, chunk), ADD=add,
        **shape, **_launch(dependent), num_warps=sizes.down_warps,
    )  # fmt: skip


def experts_torch(
    x: Tensor, ids: Tensor, weights: Tensor, pool: ExpertPool, taken: Tensor | None = None
) -> Tensor:
    """The plain twin of `pair_gate_up` and `pair_down`, in fp32, of x that is normed: [T, D]."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t, row in enumerate(x.float()):
        for k, expert in enumerate(ids[t].tolist()):
            begin = int(pool.places[expert]) * UNIT_BYTES
            raw = pool.base[begin : begin + pool.record.nbytes]
            gate_up, down = dense_matrices(pool.record, raw)
            gate, up = (gate_up @ row).chunk(2)
            acts = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
            if taken is not None:
                acts[: int(taken[t, k])] = 0
            out[t] += weights[t, k].float() * (down @ acts)
    return out
