"""Triton kernels that use the link while it is idle: between the experts of one layer and those of
the next, a device attends and routes, and reads nothing from the host's memory.

`expert_gemv.route` also multiplies the first row of a layer's input with the gate of the next: the
best expert there that is not on the device is that layer's guess. `prefetch` runs beside the
kernels between the two layers and copies tiles of the guess's gate and up into a buffer, until the
gate begins. `pair_gate_up` reads the tiles that are complete from the buffer, and all others where
they lie; if the guess was wrong, nobody reads the buffer. What is computed does not depend on it.

The CPU gets the next best ones as a hint: it then reads parts of them into its caches. Without a
buffer nothing is copied, and the hint has the best one too.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord

# channels of a tile: no program of `pair_gate_up` has more
TILE = tl.constexpr(16)
# words of a layer: the number of its guess, the guess (-1: none), the number of the guess behind
# which its gate has begun to choose. The tiles follow: the number of the guess for which each was
# copied last
TURN, GUESS, CHOSEN = (tl.constexpr(n) for n in range(3))
HEAD = tl.constexpr(3)
# sums over the layers that another with experts follows: guesses, those of which something was
# used, tiles copied for these, and for the others
SUMS = 4
# programs that copy, and their warps: enough bytes on their way to fill the link
_PROGRAMS, _WARPS = 8, 16
# words that a program copies at once; more would let the CPU's answer wait in the link
_WORDS = 2048

# the interpreter has no assembly
_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")


@triton.jit
def _read_word(place):
    """A word that another kernel may be writing; what it wrote before can then be read."""
    if _ASSEMBLY:
        found = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];",
            "=r,l",
            [place.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.load(place)
    return found


@triton.jit
def is_copied(state, expert, first):
    """Whether the tile with channel `first` of this expert is in the buffer."""
    number = _read_word(state + HEAD + first // TILE)
    return (expert == tl.load(state + GUESS)) & (number == tl.load(state + TURN))


@triton.jit
def _goes_on(state, turn):
    """Whether the layer's gate has not begun. An atomic, because all threads must get the same
    answer: one that ends alone would leave its part of a tile out."""
    return tl.atomic_or(state + CHOSEN, 0, sem="acquire") != turn


@triton.jit
def _count(
    state, ids, slots, sums, told,
    CHOICES: tl.constexpr, MANY: tl.constexpr, TILES: tl.constexpr, ALL: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """What the guess of a layer that has chosen `ids` was good for; unless the first row is
    padded."""
    at = tl.arange(0, MANY)
    chosen = tl.load(ids + at, mask=at < CHOICES, other=-2)
    made = (tl.load(state + GUESS) >= 0) & (tl.load(slots) >= 0)
    tiles = tl.arange(0, ALL)
    copied = tl.load(state + HEAD + tiles, mask=tiles < TILES, other=0)
    ready = tl.sum(((copied == tl.load(state + TURN)) & (tiles < TILES)).to(tl.int32), 0)
    right = tl.max((chosen == tl.load(state + GUESS)).to(tl.int32), 0) & (ready > 0)
    word = tl.arange(0, SUMS)
    more = tl.where(word == 0, 1, tl.where(word == 1, right, 0)).to(tl.int64)
    more += tl.where(word == 3 - right, ready, 0)
    more = tl.load(sums + word) + tl.where(made, more, 0)
    tl.store(sums + word, more)
    tl.store(told + word, more)


@triton.jit
def _prefetch(
    pool, buffer, places, state, before, ids, slots, sums, told,
    UNIT: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALES: tl.constexpr, PADDED: tl.constexpr,
    CHOICES: tl.constexpr, MANY: tl.constexpr, ALL: tl.constexpr, SUMS: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """ROWS: words of a tile's rows of gate (or up), of which WORDS are copied at once; SCALES: of
    their scales. With COUNTS it then counts the guess of the layer before."""
    turn = tl.load(state + TURN)
    guess = tl.load(state + GUESS)
    number = tl.program_id(0)
    goes_on = (guess >= 0) & _goes_on(state, turn)
    source = pool + tl.load(places + tl.maximum(guess, 0)) * UNIT
    while goes_on & (number < TILES):
        # the last channels first: the CPU takes the first ones
        tile = TILES - 1 - number
        # all is requested before anything is stored
        if SCALES:
            column = tl.arange(0, PADDED)
            known = column < SCALES
            column += SCALES_AT + tile * SCALES
            gate_scales = tl.load(source + column, mask=known)
            up_scales = tl.load(source + column + TILES * SCALES, mask=known)
        for first in range(0, ROWS, WORDS):
            at = first + tl.arange(0, WORDS)
            inside = at < ROWS
            at += tile * ROWS
            gate = tl.load(source + at, mask=inside)
            up = tl.load(source + at + TILES * ROWS, mask=inside)
            tl.store(buffer + at, gate, mask=inside)
            tl.store(buffer + at + TILES * ROWS, up, mask=inside)
        if SCALES:
            tl.store(buffer + column, gate_scales, mask=known)
            tl.store(buffer + column + TILES * SCALES, up_scales, mask=known)
        tl.debug_barrier()
        tl.atomic_xchg(state + HEAD + tile, turn, sem="release")
        number += tl.num_programs(0)
        goes_on = _goes_on(state, turn)
    if COUNTS:  # noqa: SIM102 (only this one is known to the compiler)
        if tl.program_id(0) == 0:
            _count(before, ids, slots, sums, told, CHOICES, MANY, TILES, ALL, SUMS)


@dataclass(frozen=True, slots=True)
class LayerGuess:
    """What is prefetched for one layer."""

    # int32 [HEAD + tiles]
    state: Tensor
    # of the buffer, in units from the pool's beginning; None: nothing is copied
    place: int | None
    # where the CPU looks for its hints, and the layer's number there
    hint: Tensor | None
    row: int


@dataclass(frozen=True, slots=True)
class LinkPrefetch:
    """The buffer, and the words of all layers."""

    pool: Tensor
    # of one record; None: the CPU gets hints, and nothing is copied
    buffer: Tensor | None
    record: DeviceRecord
    # int32 [layers, HEAD + tiles]
    state: Tensor
    # int64 [SUMS], on the device and in memory that the host sees
    sums: Tensor
    told: Tensor
    # int32 [HINT_WORDS], if there is a CPU that takes a share
    hint: Tensor | None

    @classmethod
    def new(
        cls, pool: Tensor, buffer: Tensor | None, record: DeviceRecord, layers: int, told: Tensor,
        hint: Tensor | None = None,
    ) -> LinkPrefetch:  # fmt: skip
        """`buffer`: uint8, of a record's size, which only this uses."""
        assert record.intermediate % TILE.value == 0
        assert buffer is None or len(buffer) >= record.nbytes
        words = HEAD.value + record.intermediate // TILE.value
        state = torch.zeros((layers, words), dtype=torch.int32, device=pool.device)
        state[:, GUESS.value] = -1
        sums = torch.zeros(SUMS, dtype=torch.int64, device=pool.device)
        return cls(pool, buffer, record, state, sums, told, hint)

    @property
    def tile_bytes(self) -> int:
        record = self.record
        scales = record.down_scales_at - record.gate_up_scales_at
        tiles: int = record.intermediate // TILE.value
        return (record.gate_up_bytes + scales) // tiles

    def layer(self, row: int) -> LayerGuess:
        if self.buffer is None:
            return LayerGuess(self.state[row], None, self.hint, row)
        offset = self.buffer.data_ptr() - self.pool.data_ptr()
        assert offset % UNIT_BYTES == 0
        return LayerGuess(self.state[row], offset // UNIT_BYTES, self.hint, row)

    def start(self, row: int, places: Tensor, before: tuple[Tensor, Tensor] | None = None) -> None:
        """Copy the guess of layer number `row`, whose experts are at `places` int64 [E]. `before`:
        count the guess of the layer before it, which has chosen these ids, if the first of these
        slots is not -1."""
        record = self.record
        assert self.buffer is not None
        tiles = record.intermediate // TILE.value
        rows = record.gate_up_bytes // 4 // (2 * tiles)
        scales = (record.down_scales_at - record.gate_up_scales_at) // 4 // (2 * tiles)
        ids, slots = (places, places) if before is None else before
        _prefetch[(min(_PROGRAMS, tiles),)](
            self.pool.view(torch.int32), self.buffer.view(torch.int32), places, self.state[row],
            self.state[row - 1], ids, slots, self.sums, self.told,
            UNIT=UNIT_BYTES // 4, TILES=tiles, ROWS=rows,
            WORDS=min(_WORDS, triton.next_power_of_2(rows)),
            SCALES_AT=record.gate_up_scales_at // 4, SCALES=scales,
            PADDED=triton.next_power_of_2(max(1, scales)), CHOICES=ids.numel(),
            MANY=triton.next_power_of_2(ids.numel()), ALL=triton.next_power_of_2(tiles),
            SUMS=SUMS, COUNTS=before is not None, num_warps=_WARPS,
        )  # fmt: skip
