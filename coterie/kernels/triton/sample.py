"""Triton kernels that draw one token per row of logits; the host is never asked.

For each row `_best` finds the greatest logit, a fixed number of `_narrow` kernels make the interval
that holds the filters' cut smaller, and `_draw` sums what is kept and inverts the noise. A program
has a chunk of the vocabulary of one row; the last program of a row to end (a counter says which)
combines the chunks. Sums are in fp64 and in a fixed order, so a token depends neither on other rows
nor on the order in which programs run.

The kept set may be most of the vocabulary, so it is never listed: a `_narrow` compares with `WAYS`
pivots, on integers that are ordered like the scaled logits. As soon as the interval has no more
than `LISTED` tokens, the next `_narrow` lists and sorts these. If the cut is not known after the
last of them (`_finish`), that kernel's last program goes on alone: slow, rare, exact.

The results are those of `engine.sampler`, apart from roundings of sums: weights are
exp(scaled - greatest) in fp64; all ties at top-k's cut are kept; ties at top-p's cut are kept from
the highest id on; the first id whose cumulative weight exceeds noise * total is drawn.

With `PDL` see `gemv`. Here every kernel waits before it lets the next one start, so that what was
written two kernels before may be read before the wait.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.draws import DrawParameters

# a lower temperature means the greatest logit, as in engine.draw
_MIN_TEMPERATURE = tl.constexpr(1e-5)
# the integer of minus infinity; one that is below all; and a count that means all
_LOWEST = tl.constexpr(-2139095041)
_OUTSIDE = tl.constexpr(-2147483648)
_ALL = tl.constexpr(2147483647)
# how far below the greatest scaled logit top-p's cut is looked for at first
_WINDOW = tl.constexpr(16.0)
# intervals with fewer integers are divided evenly by integers, wider ones evenly by values
_FEW = tl.constexpr(65536)

# what a row still has to find
_NOTHING = tl.constexpr(0)
_TOP_K = tl.constexpr(1)
_TOP_P = tl.constexpr(2)

# The state of a row, int32: what to find; the interval [low, high) of the cut and the number of
# tokens from `high` on; the cut, and how many tokens that are equal to it are kept; whether a token
# is drawn; how many passes over the row one program made alone; and whether the interval is listed.
_FIND = tl.constexpr(0)
_LOW = tl.constexpr(1)
_HIGH = tl.constexpr(2)
_COUNT = tl.constexpr(3)
_CUT = tl.constexpr(4)
_TIES = tl.constexpr(5)
_DRAWS = tl.constexpr(6)
_PASSES = tl.constexpr(7)
_LISTS = tl.constexpr(8)
_INTS = tl.constexpr(9)
# and fp64: the mass from `high` on; the mass that top-p keeps (0 = not known yet); the greatest
# scaled logit; the window
_MASS = tl.constexpr(0)
_TARGET = tl.constexpr(1)
_GREATEST = tl.constexpr(2)
_SPAN = tl.constexpr(3)
_FLOATS = tl.constexpr(4)


@triton.jit
def ordered_int(value):
    """An integer that is ordered like the fp32 value; the same for both zeros."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _OUTSIDE, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(scaled, greatest):
    """exp of the fp32 difference, in fp64."""
    return tl.exp((scaled - greatest).to(tl.float64))


@triton.jit
def is_last_program(counters, row):
    """Whether all other programs of this row have stored their part. Resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counters + row, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(counters + row, 0)
    return last


@triton.jit
def _pivots(low, high, span, WAYS: tl.constexpr, EVEN: tl.constexpr):
    """`WAYS` ascending integers that divide [low, high); the first is `low`. Evenly by value, not
    further than `span` from the upper end; or, if there are few integers or if EVEN, evenly by
    integer, which always comes to an end."""
    i = tl.arange(0, WAYS)
    width = high.to(tl.int64) - low.to(tl.int64)
    by_integer = (low + (width * i) // WAYS).to(tl.int32)
    upper = float_of(high - 1)
    reach = tl.minimum(upper - float_of(low), span.to(tl.float32))
    by_value = ordered_int(upper - reach * ((WAYS - i).to(tl.float32) / WAYS))
    by_value = tl.minimum(tl.maximum(by_value, low), high - 1)
    by_value = tl.where(i == 0, low, by_value)
    if EVEN:
        return by_integer
    return tl.where(width <= _FEW, by_integer, by_value)


@triton.jit
def _begin(
    best, least, lowest_best, temperature, top_k, top_p, ints, floats, pivots,
    CHUNKS: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """A row's first state, from its greatest and its least finite logit, and the lowest of the
    greatest logits of its chunks."""
    draws = (temperature >= _MIN_TEMPERATURE) & (best > -float("inf"))
    temperature = tl.where(draws, temperature, 1.0)
    greatest = tl.div_rn(best, temperature)
    find = tl.where(top_k > 0, _TOP_K, tl.where(top_p < 1, _TOP_P, _NOTHING))
    find = tl.where(draws, find, _NOTHING)
    high = ordered_int(greatest) + 1
    # as many tokens as there are chunks reach the lowest of the chunks' greatest
    bound = tl.where((top_k > 0) & (top_k <= CHUNKS), lowest_best, -float("inf"))
    low = ordered_int(tl.div_rn(bound, temperature))
    span = greatest - tl.div_rn(least, temperature)
    span = tl.where(find == _TOP_P, tl.minimum(span, _WINDOW), span)
    tl.store(ints + _FIND, find)
    tl.store(ints + _LOW, low)
    tl.store(ints + _HIGH, high)
    tl.store(ints + _COUNT, 0)
    tl.store(ints + _CUT, _LOWEST)
    tl.store(ints + _TIES, _ALL)
    tl.store(ints + _DRAWS, draws.to(tl.int32))
    tl.store(ints + _PASSES, 0)
    tl.store(ints + _LISTS, 0)
    tl.store(floats + _MASS, 0.0)
    tl.store(floats + _TARGET, 0.0)
    tl.store(floats + _GREATEST, greatest.to(tl.float64))
    tl.store(floats + _SPAN, span.to(tl.float64))
    tl.store(pivots + tl.arange(0, WAYS), _pivots(low, high, span, WAYS, False))


@triton.jit
def _best(
    logits, temperatures, top_ks, top_ps, out, counters, bests, leasts, places, ints, floats,
    pivots,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    WAYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = the lowest id among the greatest logits, and the first state of each row. Grid here
    and below: (chunks, rows)."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    place = part * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + row * VOCAB + place, mask=place < VOCAB, other=-float("inf"))
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row)
    own = tl.max(x, 0)
    tl.store(bests + row * CHUNKS + part, own)
    least = tl.min(tl.where(x > -float("inf"), x, float("inf")), 0)
    tl.store(leasts + row * CHUNKS + part, least)
    tl.store(places + row * CHUNKS + part, tl.min(tl.where(x == own, place, VOCAB), 0))
    if is_last_program(counters, row):
        chunk = tl.arange(0, PADDED)
        there = chunk < CHUNKS
        entry = row * CHUNKS + chunk
        # fmt: off
        every = tl.load(bests + entry, mask=there, other=-float("inf"), cache_modifier=".cg")
        first = tl.load(places + entry, mask=there, other=VOCAB, cache_modifier=".cg")
        finite = tl.load(leasts + entry, mask=there, other=float("inf"), cache_modifier=".cg")
        # fmt: on
        best = tl.max(every, 0)
        token = tl.min(tl.where(every == best, first, VOCAB), 0)
        # only a row without any number has no greatest logit
        tl.store(out + row, tl.where(token < VOCAB, token, 0).to(tl.int64))
        _begin(
            best, tl.min(finite, 0), tl.min(tl.where(there, every, best), 0),
            temperature, top_k, top_p,
            ints + row * _INTS, floats + row * _FLOATS, pivots + row * WAYS, CHUNKS, WAYS,
        )  # fmt: skip


@triton.jit
def _compare(
    x, inside, temperature, greatest, find, lists, low, high, pivot, masses, counts, ends, listed,
    WAYS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Of a chunk's tokens in [low, high) store mass and number from each pivot on, and the lowest
    and the highest integer; or add their integers to the list."""
    way = tl.arange(0, WAYS)
    scaled = tl.div_rn(x, temperature)
    key = tl.where(inside, ordered_int(scaled), _OUTSIDE)
    key = tl.where((key >= low) & (key < high), key, _OUTSIDE)
    highest = tl.max(key, 0)
    # a small interval has tokens in few chunks
    some = highest != _OUTSIDE
    if lists != 0:
        if some:
            # in any order: the list will be sorted
            there = (key != _OUTSIDE).to(tl.int32)
            before = tl.atomic_add(listed, tl.sum(there, 0), sem="relaxed")
            place = before + tl.cumsum(there, 0)
            tl.store(listed + place, key, mask=(there != 0) & (place <= LISTED))
    else:
        mass = tl.zeros([WAYS], tl.float64)
        count = tl.zeros([WAYS], tl.int32)
        lowest = tl.full([], _ALL, tl.int32)
        if some:
            lowest = tl.min(tl.where(key != _OUTSIDE, key, _ALL), 0)
            count = tl.sum((key[None, :] >= pivot[:, None]).to(tl.int32), 1)
            if find == _TOP_P:
                weight = _weight(scaled, greatest)[None, :]
                # the same comparison, written so that its results are not kept in registers
                mass = tl.sum(tl.where(key[None, :] > (pivot - 1)[:, None], weight, 0.0), 1)
        tl.store(ends, lowest)
        tl.store(ends + 1, highest)
        tl.store(masses + way, mass)
        tl.store(counts + way, count)


@triton.jit
def _at(values, index, i):
    return tl.sum(tl.where(index == i, values, 0), 0)


@triton.jit
def _choose(
    top_k, top_p, ints, floats, pivots, masses, counts, ends,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, WAYS: tl.constexpr,
    LISTED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of a row, choose the next interval, and notice if the cut is found.
    Returns what is still to find."""
    chunk = tl.arange(0, PADDED)
    way = tl.arange(0, WAYS)
    there = chunk < CHUNKS
    pivot = tl.load(pivots + way, cache_modifier=".cg")
    find = tl.load(ints + _FIND, cache_modifier=".cg")
    high = tl.load(ints + _HIGH, cache_modifier=".cg")
    count_above = tl.load(ints + _COUNT, cache_modifier=".cg")
    mass_above = tl.load(floats + _MASS, cache_modifier=".cg")
    target = tl.load(floats + _TARGET, cache_modifier=".cg")
    greatest = tl.load(floats + _GREATEST, cache_modifier=".cg").to(tl.float32)
    span = tl.load(floats + _SPAN, cache_modifier=".cg").to(tl.float32)
    # fmt: off
    every = chunk[:, None] * WAYS + way[None, :]
    mass = mass_above + tl.sum(
        tl.load(masses + every, mask=there[:, None], other=0.0, cache_modifier=".cg"), 0)
    count = count_above + tl.sum(
        tl.load(counts + every, mask=there[:, None], other=0, cache_modifier=".cg"), 0)
    lowest = tl.min(
        tl.load(ends + chunk * 2, mask=there, other=_ALL, cache_modifier=".cg"), 0)
    highest = tl.max(
        tl.load(ends + chunk * 2 + 1, mask=there, other=_OUTSIDE, cache_modifier=".cg"), 0)
    # fmt: on

    # the first pivot is the lowest token that top-p may keep: the mass from there on is the whole
    target = tl.where(target > 0, target, tl.maximum(top_p * _at(mass, way, 0), 1e-300))
    reached = tl.where(find == _TOP_K, count >= tl.minimum(top_k, VOCAB), mass >= target)
    chosen = tl.max(tl.where(reached, way, 0), 0)
    low = _at(pivot, way, chosen)
    count_low = _at(count, way, chosen)
    if chosen < WAYS - 1:
        high = _at(pivot, way, chosen + 1)
        count_above = _at(count, way, chosen + 1)
        mass_above = _at(mass, way, chosen + 1)
    # no token is outside of these ends
    low = tl.maximum(low, lowest)
    high = tl.minimum(high, highest + 1)
    equal = count_low - count_above
    # in 64 bits, since the interval may have 2 ** 32 integers
    one_value = high.to(tl.int64) - low.to(tl.int64) <= 1
    # every warp has read the state before one of them writes the next
    tl.debug_barrier()
    if (equal <= 1) | one_value:
        weight = _weight(float_of(low), greatest)
        kept = tl.ceil((target - mass_above) / tl.where(weight > 0, weight, 1.0))
        ties = tl.minimum(tl.maximum(kept, 1.0), equal.to(tl.float64)).to(tl.int32)
        find = _found(
            low, count_low, ties, equal, greatest, find, top_p, ints, floats, pivots, WAYS, LISTED
        )
    else:
        tl.store(ints + _LOW, low)
        tl.store(ints + _HIGH, high)
        tl.store(ints + _COUNT, count_above)
        tl.store(ints + _LISTS, (equal <= LISTED).to(tl.int32))
        tl.store(floats + _MASS, mass_above)
        tl.store(floats + _TARGET, tl.where(find == _TOP_P, target, 0.0))
        tl.store(pivots + way, _pivots(low, high, span, WAYS, EVEN))
    return find


@triton.jit
def _found(
    cut, count, ties, equal, greatest, find, top_p, ints, floats, pivots,
    WAYS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Store a cut that `count` tokens reach, `equal` of which are equal to it. Returns what is
    still to find: behind top-k, top-p is looked for among what it keeps."""
    ties = tl.where((find == _TOP_K) | (equal <= 1), _ALL, ties)
    find = tl.where((find == _TOP_K) & (top_p < 1) & (count > 1), _TOP_P, _NOTHING)
    tl.store(ints + _CUT, cut)
    tl.store(ints + _TIES, ties)
    tl.store(ints + _FIND, find)
    if find != _NOTHING:
        high = ordered_int(greatest) + 1
        span = greatest - float_of(cut)
        tl.store(ints + _LOW, cut)
        tl.store(ints + _HIGH, high)
        tl.store(ints + _COUNT, 0)
        tl.store(ints + _LISTS, (count <= LISTED).to(tl.int32))
        tl.store(floats + _MASS, 0.0)
        tl.store(floats + _TARGET, 0.0)
        tl.store(floats + _SPAN, span.to(tl.float64))
        tl.store(pivots + tl.arange(0, WAYS), _pivots(cut, high, span, WAYS, False))
    return find


@triton.jit
def _choose_listed(
    top_k, top_p, ints, floats, pivots, listed,
    VOCAB: tl.constexpr, WAYS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Find the cut in a list that holds all tokens of the interval. Returns what is still to
    find."""
    place = tl.arange(0, LISTED)
    find = tl.load(ints + _FIND, cache_modifier=".cg")
    count_above = tl.load(ints + _COUNT, cache_modifier=".cg")
    mass_above = tl.load(floats + _MASS, cache_modifier=".cg")
    target = tl.load(floats + _TARGET, cache_modifier=".cg")
    greatest = tl.load(floats + _GREATEST, cache_modifier=".cg").to(tl.float32)
    length = tl.load(listed, cache_modifier=".cg")
    key = tl.load(listed + 1 + place, cache_modifier=".cg")
    there = place < length
    key = tl.sort(tl.where(there, key, _OUTSIDE), descending=True)
    weight = tl.where(there, _weight(float_of(tl.where(there, key, _LOWEST)), greatest), 0.0)
    mass = mass_above + tl.cumsum(weight, 0)
    whole = mass_above + tl.sum(weight, 0)
    target = tl.where(target > 0, target, tl.maximum(top_p * whole, 1e-300))
    by_mass = tl.min(tl.where(mass >= target, place, LISTED), 0)
    by_count = tl.minimum(top_k, VOCAB) - count_above - 1
    last = tl.minimum(tl.where(find == _TOP_K, by_count, by_mass), length - 1)
    cut = _at(key, place, last)
    same = key == cut
    equal = tl.sum(same.to(tl.int32), 0)
    ties = tl.sum((same & (place <= last)).to(tl.int32), 0)
    count = count_above + tl.sum((key >= cut).to(tl.int32), 0)
    # every warp has read the state before one of them writes the next
    tl.debug_barrier()
    tl.store(listed, 0)
    return _found(
        cut, count, ties, equal, greatest, find, top_p, ints, floats, pivots, WAYS, LISTED
    )


@triton.jit
def _narrow(
    logits, temperatures, top_ks, top_ps, counters, ints, floats, pivots, masses, counts, ends,
    listed,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    WAYS: tl.constexpr, LISTED: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make the interval of each row's cut smaller."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    place = part * CHUNK + tl.arange(0, CHUNK)
    ints += row * _INTS
    floats += row * _FLOATS
    pivots += row * WAYS
    masses += row * CHUNKS * WAYS
    counts += row * CHUNKS * WAYS
    ends += row * CHUNKS * 2
    listed += row * (LISTED + 1)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row).to(tl.float64)
    filtered = (temperature >= _MIN_TEMPERATURE) & ((top_k > 0) | (top_p < 1))
    end = tl.where(filtered, VOCAB, 0)
    x = tl.load(logits + row * VOCAB + place, mask=place < end, other=-float("inf"))
    if not FIRST:
        greatest = tl.load(floats + _GREATEST, cache_modifier=".cg").to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if FIRST:
        greatest = tl.load(floats + _GREATEST, cache_modifier=".cg").to(tl.float32)
    # requested together, although most rows that have found their cut need only the first
    find = tl.load(ints + _FIND, cache_modifier=".cg")
    lists = tl.load(ints + _LISTS, cache_modifier=".cg")
    low = tl.load(ints + _LOW, cache_modifier=".cg")
    high = tl.load(ints + _HIGH, cache_modifier=".cg")
    pivot = tl.load(pivots + tl.arange(0, WAYS), cache_modifier=".cg")
    if find != _NOTHING:
        _compare(
            x, place < VOCAB, temperature, greatest, find, lists, low, high, pivot,
            masses + part * WAYS, counts + part * WAYS, ends + part * 2, listed, WAYS, LISTED,
        )  # fmt: skip
        if is_last_program(counters, row):
            if lists != 0:
                _choose_listed(top_k, top_p, ints, floats, pivots, listed, VOCAB, WAYS, LISTED)
            else:
                _choose(
                    top_k, top_p, ints, floats, pivots, masses, counts, ends,
                    VOCAB, CHUNKS, PADDED, WAYS, LISTED, False,
                )  # fmt: skip


@triton.jit
def _finish(
    logits, temperatures, top_ks, top_ps, counters, ints, floats, pivots, masses, counts, ends,
    listed,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    WAYS: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last `_narrow`. If a row's cut is still not known, its last program goes on alone, chunk
    by chunk, until it is."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ints += row * _INTS
    floats += row * _FLOATS
    pivots += row * WAYS
    masses += row * CHUNKS * WAYS
    counts += row * CHUNKS * WAYS
    ends += row * CHUNKS * 2
    listed += row * (LISTED + 1)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row).to(tl.int32)
    top_p = tl.load(top_ps + row).to(tl.float64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    greatest = tl.load(floats + _GREATEST, cache_modifier=".cg").to(tl.float32)
    find = tl.load(ints + _FIND, cache_modifier=".cg")
    first = part
    end = tl.where(find == _NOTHING, part, part + 1)
    passes = 0
    while first < end:
        lists = tl.load(ints + _LISTS, cache_modifier=".cg")
        low = tl.load(ints + _LOW, cache_modifier=".cg")
        high = tl.load(ints + _HIGH, cache_modifier=".cg")
        pivot = tl.load(pivots + tl.arange(0, WAYS), cache_modifier=".cg")
        for chunk in range(first, end):
            place = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + row * VOCAB + place, mask=place < VOCAB, other=-float("inf"))
            _compare(
                x, place < VOCAB, temperature, greatest, find, lists, low, high, pivot,
                masses + chunk * WAYS, counts + chunk * WAYS, ends + chunk * 2, listed,
                WAYS, LISTED,
            )  # fmt: skip
        tl.debug_barrier()
        last = passes > 0
        if passes == 0:
            last = is_last_program(counters, row)
        end = first
        if last:
            if lists != 0:
                find = _choose_listed(
                    top_k, top_p, ints, floats, pivots, listed, VOCAB, WAYS, LISTED
                )
            else:
                find = _choose(
                    top_k, top_p, ints, floats, pivots, masses, counts, ends,
                    VOCAB, CHUNKS, PADDED, WAYS, LISTED, True,
                )  # fmt: skip
            tl.store(ints + _PASSES, passes)
            tl.debug_barrier()
            if find != _NOTHING:
                first = 0
                end = CHUNKS
        passes += 1


@triton.jit
def _draw(
    logits, temperatures, min_ps, noise, out, counters, ints, floats, masses, counts,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = the first id whose cumulative weight exceeds noise[r] * total, where r draws. masses
    and counts: [R, CHUNKS] here."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    offset = tl.arange(0, CHUNK)
    place = part * CHUNK + offset
    ints += row * _INTS
    floats += row * _FLOATS
    masses += row * CHUNKS
    counts += row * CHUNKS
    temperature = tl.load(temperatures + row)
    min_p = tl.load(min_ps + row).to(tl.float64)
    share = tl.load(noise + row)
    end = tl.where(temperature >= _MIN_TEMPERATURE, VOCAB, 0)
    x = tl.load(logits + row * VOCAB + place, mask=place < end, other=-float("inf"))
    if not FIRST:
        greatest = tl.load(floats + _GREATEST, cache_modifier=".cg").to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if FIRST:
        greatest = tl.load(floats + _GREATEST, cache_modifier=".cg").to(tl.float32)
    draws = tl.load(ints + _DRAWS, cache_modifier=".cg")
    cut = tl.load(ints + _CUT, cache_modifier=".cg")
    ties = tl.load(ints + _TIES, cache_modifier=".cg")
    if draws != 0:
        scaled = tl.div_rn(x, temperature)
        key = tl.where(place < VOCAB, ordered_int(scaled), _OUTSIDE)
        weight = _weight(scaled, greatest)
        above = (key > cut) & (weight >= min_p)
        tl.store(masses + part, tl.sum(tl.where(above, weight, 0.0), 0))
        tl.store(counts + part, tl.sum((key == cut).to(tl.int32), 0))
        if is_last_program(counters, row):
            chunk = tl.arange(0, PADDED)
            there = chunk < CHUNKS
            mass = tl.load(masses + chunk, mask=there, other=0.0, cache_modifier=".cg")
            equal = tl.load(counts + chunk, mask=there, other=0, cache_modifier=".cg")
            # ties are kept from the highest id on
            behind = tl.sum(equal, 0) - tl.cumsum(equal, 0)
            kept = tl.minimum(tl.maximum(ties - behind, 0), equal)
            each = _weight(float_of(cut), greatest)
            mass += kept * tl.where(each >= min_p, each, 0.0)
            sums = tl.cumsum(mass, 0)
            target = share * tl.sum(mass, 0)
            # sums are rounded: if none exceeds the target, the last with any mass is meant
            last = tl.max(tl.where(mass > 0, chunk, 0), 0)
            chosen = tl.minimum(tl.min(tl.where(sums > target, chunk, PADDED), 0), last)
            before = tl.sum(tl.where(chunk == chosen, sums - mass, 0.0), 0)
            kept_here = _at(kept, chunk, chosen)
            equal_here = _at(equal, chunk, chosen)

            place = chosen * CHUNK + offset
            x = tl.load(logits + row * VOCAB + place, mask=place < VOCAB, other=-float("inf"))
            scaled = tl.div_rn(x, temperature)
            key = tl.where(place < VOCAB, ordered_int(scaled), _OUTSIDE)
            weight = _weight(scaled, greatest)
            tie = key == cut
            behind = equal_here - tl.cumsum(tie.to(tl.int32), 0)
            keep = ((key > cut) | (tie & (behind < kept_here))) & (weight >= min_p) & (weight > 0)
            sums = before + tl.cumsum(tl.where(keep, weight, 0.0), 0)
            last = tl.max(tl.where(keep, offset, 0), 0)
            token = tl.min(tl.where(keep & (sums > target), offset, CHUNK), 0)
            token = chosen * CHUNK + tl.minimum(token, last)
            tl.store(out + row, token.to(tl.int64))


# what a batch needs at most: the greatest logit, draws without top-k and top-p, or all of it
SampleNeed = Literal["greedy", "plain", "filtered"]


@dataclass(frozen=True, slots=True)
class SampleSize:
    """`chunk` decides the order of sums, so it must not depend on the batch."""

    # tokens of a program, and its warps
    chunk: int = 1024
    warps: int = 4
    # pivots of a `_narrow`, and how many of these there are, `_finish` included
    ways: int = 16
    levels: int = 5
    # an interval with no more tokens is listed and sorted; a power of 2
    listed: int = 256


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Memory that the kernels use, for up to R rows. `counters` and the first of `listed` are 0
    before and after."""

    counters: Tensor
    # [R, chunks]
    bests: Tensor
    leasts: Tensor
    places: Tensor
    # [R, ...]
    ints: Tensor
    floats: Tensor
    pivots: Tensor
    # [R, chunks, ways]
    masses: Tensor
    counts: Tensor
    # [R, chunks, 2]
    ends: Tensor
    # [R, 1 + size.listed]: the length, then the tokens' integers
    listed: Tensor
    size: SampleSize

    @staticmethod
    def empty(
        rows: int, vocab: int, device: torch.device, size: SampleSize | None = None
    ) -> SampleScratch:
        size = size or SampleSize()
        chunks = triton.cdiv(vocab, size.chunk)

        def room(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=device)

        return SampleScratch(
            torch.zeros(rows, dtype=torch.int32, device=device),
            room(torch.float32, chunks),
            room(torch.float32, chunks),
            room(torch.int32, chunks),
            room(torch.int32, _INTS.value),
            room(torch.float64, _FLOATS.value),
            room(torch.int32, size.ways),
            room(torch.float64, chunks, size.ways),
            room(torch.int32, chunks, size.ways),
            room(torch.int32, chunks, 2),
            torch.zeros((rows, 1 + size.listed), dtype=torch.int32, device=device),
            size,
        )


def sample_rows(
    logits: Tensor, parameters: DrawParameters, noise: Tensor, out: Tensor, scratch: SampleScratch,
    need: SampleNeed = "filtered", dependent: bool = False,
) -> None:  # fmt: skip
    """out[r] = a token drawn from logits[r], with noise[r] in [0, 1).

    logits: fp32 [R, V], contiguous; noise: fp64 [R]; out: int64 [R]. `need` is what the host knows
    of all rows: it decides how many kernels run (1, 2, or 2 and the levels), never the result.
    """
    rows, vocab = logits.shape
    size = scratch.size
    chunks = triton.cdiv(vocab, size.chunk)
    grid = (chunks, rows)
    s, p = scratch, parameters
    common: dict[str, Any] = {
        "VOCAB": vocab,
        "CHUNK": size.chunk,
        "CHUNKS": chunks,
        "PADDED": triton.next_power_of_2(chunks),
        "PDL": dependent,
        "num_warps": size.warps,
        # the interpreter knows no launch options
        **({"launch_pdl": True} if dependent else {}),
    }
    _best[grid](
        logits, p.temperature, p.top_k, p.top_p, out, s.counters, s.bests, s.leasts, s.places,
        s.ints, s.floats, s.pivots, WAYS=size.ways, **common,
    )  # fmt: skip
    if need == "greedy":
        return
    if need == "filtered":
        ways = {"WAYS": size.ways, "LISTED": size.listed}
        arguments = (
            logits, p.temperature, p.top_k, p.top_p, s.counters, s.ints, s.floats, s.pivots,
            s.masses, s.counts, s.ends, s.listed,
        )  # fmt: skip
        for level in range(size.levels - 1):
            _narrow[grid](*arguments, FIRST=level == 0, **ways, **common)
        _finish[grid](*arguments, **ways, **common)
    _draw[grid](
        logits, p.temperature, p.min_p, noise, out, s.counters, s.ints, s.floats, s.masses,
        s.counts, FIRST=need == "plain", **common,
    )  # fmt: skip
