"""Triton kernels with which a step gives the CPU a share of its experts (`kernels.cpu.share`).

`ring`, behind the gate, decides: of the experts that are not on the device the CPU takes the first
channels, as many in all as a table has for so many of them. It writes the rows and the pairs to
memory that the host sees, and then the job's number. The kernels of pairs leave these channels
out. `await_cpu` reads the answer until all of it is this job's, and adds it. Its time is limited by
the device's clock: behind the limit it reports the job as failed, and no job is given any more
until the host allows it again.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.cpu.share import JOB_SPACES, PAIR_WORDS, SUM_WORDS, ShareBell
from coterie.kernels.triton.link_prefetch import GUESS, HEAD, TILE, TURN, LayerGuess
from coterie.weights.kinds import GROUP

# the interpreter has no assembly and no clock
_ON_DEVICE = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
# words of the state: jobs so far, pairs of the last one, whether the CPU failed, programs that have
# arrived
_JOBS, _GIVEN, _OFF, _ARRIVED = (tl.constexpr(n) for n in range(4))
STATE_WORDS = 4
# words of the clock behind its sums: channels that the device reads over the link, and when the job
# was rung
_LINK, _RANG = tl.constexpr(SUM_WORDS), tl.constexpr(SUM_WORDS + 1)
CLOCK_WORDS = SUM_WORDS + 2
# of an answer: columns of a program, and values that a thread loads at once
_COLUMNS, _VALUES = 1024, 2
# between two looks at the answer, for each of its rows: they cross the link and read CPU caches
_PAUSE_NS, _MOST_PAUSE_NS = 250, 4000


@triton.jit
def _fence():
    """What this program wrote so far is seen by the host before what it writes from now on."""
    if _ON_DEVICE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, $1;",
            "=r,r",
            [tl.full([], 0, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def _now():
    """ns of the device's clock, the same for all threads: they go on or end together."""
    time = tl.full([], 0, tl.int64)
    if _ON_DEVICE:
        each = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer; // $1",
            "=l,r",
            [tl.arange(0, 128)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        time = tl.max(each, 0)
    return time


@triton.jit(do_not_specialize=["layer"])
def _ring(
    x, gain, norms, ids, weights, tiers, table, taken, state, clock, prefetched,
    rung, job, pairs, rows, layer,
    COUNT: tl.constexpr, TOP_K: tl.constexpr, STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    INNER: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr,
    WHOLE: tl.constexpr, GUESSED: tl.constexpr, TILES: tl.constexpr, ALL: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. The last program decides and rings. With WHOLE the CPU takes whole experts, and
    `taken` gets the ids that are left, -1 for the others. With GUESSED the CPU takes the
    prefetched expert last, and what is on the device of it is not counted as missing."""
    at = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    off = tl.load(state + _OFF)
    column = tl.arange(0, WIDE)
    inside = column < WIDTH
    value = tl.load(x + at * WIDTH + column, mask=inside, other=0).to(tl.float32)
    if NORM:
        value *= tl.load(gain + column, mask=inside, other=0).to(tl.float32) * tl.load(norms + at)
    tl.store(rows + at * WIDTH + column, value, mask=inside & (off == 0))
    before = 0
    if COUNT > 1:
        _fence()
        before = tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel")
    if before == COUNT - 1:
        tl.store(state + _ARRIVED, 0)
        pair = tl.arange(0, PAIRS)
        live = pair < COUNT * TOP_K
        expert = tl.load(ids + pair, mask=live, other=-1)
        weight = tl.load(weights + pair // TOP_K * STRIDE + pair % TOP_K, mask=live, other=0)
        missing = live & (tl.load(tiers + expert, mask=live, other=0) != 0) & (off == 0)
        same = (expert[:, None] == expert[None, :]) & missing[:, None]
        # the first pair of each missing expert, and the number of these before it
        first = tl.min(tl.where(same, pair[:, None], PAIRS), 0)
        leads = missing & (first == pair)
        order, copied = pair, 0
        if GUESSED:
            guessed = missing & (expert == tl.load(prefetched + GUESS))
            order = pair + tl.where(guessed, PAIRS, 0)
            first += tl.where(guessed, PAIRS, 0)
            tile = tl.arange(0, ALL)
            numbers = tl.load(prefetched + HEAD + tile, mask=tile < TILES, other=0)
            ready = (tile < TILES) & (numbers == tl.load(prefetched + TURN))
            # gate and up are two thirds of a channel
            copied = tl.sum(ready.to(tl.int32), 0) * TILE * 2 // 3
            copied *= tl.max(guessed.to(tl.int32), 0)
        rank = tl.sum((leads[:, None] & (order[:, None] < first[None, :])).to(tl.int32), 0)
        experts = tl.sum(leads.to(tl.int32), 0)
        total = tl.load(table + (experts * INNER - copied) // UNIT)
        if WHOLE:
            total = (total + INNER // 2) // INNER * INNER
        own = tl.minimum(tl.maximum(total - rank * INNER, 0), INNER)
        own = tl.where(missing, own, 0)
        told = tl.where(own > 0, -1, expert) if WHOLE else own
        tl.store(taken + pair // TOP_K * STRIDE + pair % TOP_K, told, mask=live)
        gives = own > 0
        place = tl.sum((gives[:, None] & (pair[:, None] < pair[None, :])).to(tl.int32), 0)
        given = tl.sum(gives.to(tl.int32), 0)
        tl.store(state + _GIVEN, given)
        tl.store(clock + _LINK, (experts * INNER - copied - total).to(tl.int64))
        tl.store(clock + _RANG, _now())
        if given > 0:
            to = pairs + place * 4
            tl.store(to, expert, mask=gives)
            tl.store(to + 1, pair // TOP_K, mask=gives)
            tl.store(to + 2, own, mask=gives)
            tl.store(to + 3, weight.to(tl.int32, bitcast=True), mask=gives)
            tl.store(job, layer)
            tl.store(job + 1, COUNT)
            tl.store(job + 2, given)
            number = tl.load(state + _JOBS) + 1
            # words of an answer that were never written have 0
            number = tl.where(number == 0, 1, number)
            tl.store(state + _JOBS, number)
            _fence()
            tl.store(rung, number)


@triton.jit
def _pause(NS: tl.constexpr):
    if _ON_DEVICE:
        tl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;",
            "=r,r",
            [tl.full([], NS, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _belongs(words, number, inside):
    """Whether all values were written for this job."""
    own = (words >> 32).to(tl.int32) == number
    return tl.min((own | ~inside).to(tl.int32), 0)


@triton.jit(do_not_specialize=["limit"])
def _await_cpu(
    hidden, state, clock, failed, sums, answer, limit,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPACES: tl.constexpr, SPACE: tl.constexpr,
    PAUSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden[t] += the CPU's part. Grid: rows, parts of COLUMNS columns. A thread has one load of
    the host's memory: a second one that must not be left out would wait for the first."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    given = tl.load(state + _GIVEN)
    if given > 0:
        number = tl.load(state + _JOBS)
        # the limit is the same for programs that begin later
        rang = tl.load(clock + _RANG)
        begin = _now()
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        # a value and a number are one word of the host's
        place = answer + (number & (SPACES - 1)).to(tl.int64) * SPACE + at * WIDTH + column
        words = tl.load(place, mask=inside, other=0, volatile=True)
        there = _belongs(words, number, inside)
        # also the first look takes time, while others read over the link
        end = _now() if _ON_DEVICE else begin
        while (there == 0) & (end - rang < limit):
            _pause(PAUSE)
            words = tl.load(place, mask=inside, other=0, volatile=True)
            there = _belongs(words, number, inside)
            # without a clock it counts
            end = _now() if _ON_DEVICE else end + 1
        if there == 1:
            own = hidden + at * WIDTH + column
            value = words.to(tl.int32).to(tl.float32, bitcast=True)
            y = tl.load(own, mask=inside, other=0).to(tl.float32) + value
            tl.store(own, y.to(hidden.dtype.element_ty), mask=inside)
            if (at == 0) & (part == 0):
                # sums of all jobs, for the host
                kind = tl.arange(0, 4)
                spent = tl.where(kind == 1, begin - rang, 1)
                spent = tl.where(kind == 2, end - begin, spent)
                spent = tl.where(kind == 3, tl.load(clock + _LINK), spent)
                total = tl.load(clock + kind) + spent
                tl.store(clock + kind, total)
                tl.store(sums + kind, total)
        else:
            tl.store(state + _OFF, 1)
            tl.store(failed, number)


@dataclass(frozen=True, slots=True)
class ShareState:
    """What the kernels need besides the bell, on the device."""

    bell: ShareBell
    # int32: channels for the CPU, by the number of missing channels, in groups
    table: Tensor
    # int32 [STATE_WORDS]
    state: Tensor
    # int64 [CLOCK_WORDS]
    clock: Tensor

    @classmethod
    def new(cls, bell: ShareBell, channels: int, device: torch.device | str) -> ShareState:
        """`channels`: of all experts of a layer."""
        return cls(
            bell,
            torch.zeros(channels // GROUP + 1, dtype=torch.int32, device=device),
            torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
            torch.zeros(CLOCK_WORDS, dtype=torch.int64, device=device),
        )


def _launch(dependent: bool) -> dict[str, Any]:
    return {"PDL": dependent, **({"launch_pdl": True} if dependent else {})}


def ring(
    x: Tensor, ids: Tensor, weights: Tensor, tiers: Tensor, layer: int, inner: int,
    share: ShareState, taken: Tensor, norm: tuple[Tensor, Tensor] | None = None,
    dependent: bool = False, whole: bool = False, guess: LayerGuess | None = None,
) -> None:  # fmt: skip
    """Give the CPU a part of the experts `ids` int32 [T, K] of x [T, D], with `weights` fp32
    [T, K or more]. `tiers` int8 [E]: 0 for those on the device. taken int32 like `weights`: the
    channels of each pair that the CPU computes, from 0 on. Where x is not normed yet, `norm` has
    the gain and the scales of the rows. With `whole` the CPU takes whole experts, and `taken` gets
    the ids of the pairs that are left, -1 for the others. `guess`: what is prefetched."""
    rows, top_k = ids.shape
    bell = share.bell
    assert rows <= bell.max_rows and rows * top_k <= bell.max_pairs and PAIR_WORDS == 4
    assert taken.shape == weights.shape and inner % GROUP == 0
    gain, scales = (x, x) if norm is None else norm
    width = x.shape[1]
    state = share.state if guess is None else guess.state
    tiles = 1 if guess is None else state.numel() - HEAD.value
    warps = 4 if rows * top_k <= 128 else 8
    _ring[(rows,)](
        x, gain, scales, ids, weights, tiers, share.table, taken, share.state, share.clock, state,
        bell.rung, bell.job, bell.pairs, bell.x, layer,
        COUNT=rows, TOP_K=top_k, STRIDE=weights.shape[1],
        PAIRS=triton.next_power_of_2(rows * top_k), INNER=inner, WIDTH=width,
        WIDE=triton.next_power_of_2(width), NORM=norm is not None, WHOLE=whole,
        GUESSED=guess is not None, TILES=tiles, UNIT=GROUP,
        # a tile for each thread at least: what all threads then know is what one has read
        ALL=max(32 * warps, triton.next_power_of_2(tiles)), **_launch(dependent), num_warps=warps,
    )  # fmt: skip


def await_cpu(hidden: Tensor, share: ShareState, limit_ns: int, dependent: bool = False) -> None:
    """hidden [T, D] += the CPU's answer to the last job, if there was one."""
    bell, (rows, width) = share.bell, hidden.shape
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    assert JOB_SPACES & (JOB_SPACES - 1) == 0
    _await_cpu[(rows, triton.cdiv(width, columns))](
        hidden, share.state, share.clock, bell.failed, bell.sums,
        bell.answer.view(torch.int64).view(-1), limit_ns,
        WIDTH=width, COLUMNS=columns, SPACES=JOB_SPACES,
        SPACE=bell.space_rows * width if rows <= bell.space_rows else 0,
        PAUSE=min(rows * _PAUSE_NS, _MOST_PAUSE_NS),
        **_launch(dependent), num_warps=max(1, columns // (_VALUES * 32)),
    )  # fmt: skip


def taken_torch(
    ids: Tensor, tiers: Tensor, table: Tensor, inner: int, whole: bool = False,
    guess: LayerGuess | None = None,
) -> Tensor:  # fmt: skip
    """The plain twin of what `ring` decides: int32 [T, K]."""
    missing = [expert for expert in ids.flatten().tolist() if tiers[expert]]
    order, copied = list(dict.fromkeys(missing)), 0
    if guess is not None and (expert := int(guess.state[GUESS.value])) in order:
        order.remove(expert)
        order.append(expert)
        ready = guess.state[HEAD.value :] == guess.state[TURN.value]
        copied = int(ready.sum()) * TILE.value * 2 // 3
    total = int(table[(len(order) * inner - copied) // GROUP])
    if whole:
        total = (total + inner // 2) // inner * inner
    own = {e: min(max(total - rank * inner, 0), inner) for rank, e in enumerate(order)}
    found = [own.get(expert, 0) for expert in ids.flatten().tolist()]
    if whole:
        found = [-1 if n else e for n, e in zip(found, ids.flatten().tolist(), strict=True)]
    return torch.tensor(found, dtype=torch.int32).view(ids.shape)
