"""Triton kernels that bring a step's missing experts to slots inside the step, over the link once.

`place`, behind the gate, decides as the strategy would: residents are used, in the order of their
numbers; then each missing expert takes a free slot, or the slot of the least recently used expert
that this layer does not need, of all slots (lru) or of the layer's buffer (active_only). It changes
the table of places, and the places that the gate has told the experts' kernels. `fetch` copies the
records from the bank. A miss that gets no slot is read where it lies.

The host decides nothing: from the ids of a step it follows with the same rule. Rows behind `live`
are padding and do not count. Nothing here may start before the kernel in front of it has ended.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels.device_record import UNIT_BYTES

# words of a unit, and of what one program copies at a time
_UNIT_WORDS = tl.constexpr(UNIT_BYTES // 4)
_TILE_WORDS = 4096
# programs that copy one record
_PARTS = 32
# words of `counts`: rows that count, free slots, copies of the last layer, steps so far
LIVE, FREE, COPIES, STEPS = 0, 1, 2, 3
COUNT_WORDS = 4
_LIVE, _FREE, _COPIES = (tl.constexpr(n) for n in range(3))


@dataclass(frozen=True, slots=True)
class VictimState:
    """What the device knows of its slots. Experts are numbers: row of the layer * experts + id."""

    # [layers * experts], in units from the arena's beginning: the table, its tiers (0: in a slot),
    # and where each expert is in the bank
    places: Tensor
    tiers: Tensor
    bank: Tensor
    # [slots]: the expert in it, -1 if it is free; the time of its last use; free ones, the last is
    # taken first
    keys: Tensor
    stamps: Tensor
    free: Tensor
    # [1]: the last time; and [COUNT_WORDS]
    clock: Tensor
    counts: Tensor
    # active_only: the buffer of each layer, and slots of each buffer: its share, and those in use
    buffers: Tensor
    shares: Tensor
    sizes: Tensor
    # [pairs, 2]: what to copy, and to which slot
    copies: Tensor
    # [experts]: of one layer, used or not
    marks: Tensor
    experts: int
    slot_units: int
    record_bytes: int
    by_layer: bool


@triton.jit
def _pick(values, at, n):
    """values[n], of a vector whose places are `at`."""
    return tl.sum(tl.where(at == n, values, 0), 0)


@triton.jit(do_not_specialize=["row", "slots"])
def _place(
    ids, chosen, places, tiers, bank, keys, stamps, free, clock, counts, buffers, shares, sizes,
    copies, marks, row, slots, SLOT_UNITS: tl.constexpr, COUNT: tl.constexpr, TOP_K: tl.constexpr,
    STRIDE: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr,
    PADDED: tl.constexpr, BUFFERS: tl.constexpr, NUM_BUFFERS: tl.constexpr,
):  # fmt: skip
    """One program. BUFFERS: 0 for one pool, else a power of two."""
    pair, e = tl.arange(0, PAIRS), tl.arange(0, WIDE)
    live = tl.load(counts + _LIVE)
    counted = pair < tl.minimum(live, COUNT) * TOP_K
    expert = tl.load(ids + pair, mask=pair < COUNT * TOP_K, other=0)
    here = e < EXPERTS
    tl.store(marks + e, 0, mask=here)
    tl.debug_barrier()
    tl.store(marks + expert, 1, mask=counted)
    tl.debug_barrier()
    used = tl.load(marks + e, mask=here, other=0) != 0
    base = row * EXPERTS
    own = tl.load(places + base + e, mask=here, other=0)
    in_slot = tl.load(tiers + base + e, mask=here, other=1) == 0
    begin = tl.load(clock)
    resident = used & in_slot
    order = tl.cumsum(resident.to(tl.int32), 0)
    tl.store(stamps + own // SLOT_UNITS, begin + order, mask=resident)
    now = begin + tl.sum(resident.to(tl.int64), 0)
    missing = used & (here & (in_slot == 0))
    rank = tl.cumsum(missing.to(tl.int32), 0) - 1
    misses = tl.sum(missing.to(tl.int32), 0)
    tl.debug_barrier()
    at = tl.arange(0, PADDED)
    known = at < slots
    key = tl.load(keys + at, mask=known, other=-1)
    stamp = tl.load(stamps + at, mask=known, other=0)
    lowest: tl.constexpr = 1 << 62
    left = tl.load(counts + _FREE)
    copied = left * 0
    if BUFFERS > 0:
        b = tl.arange(0, BUFFERS)
        size = tl.load(sizes + b, mask=b < NUM_BUFFERS, other=0)
        share = tl.load(shares + b, mask=b < NUM_BUFFERS, other=1 << 30)
        belongs = tl.load(buffers + key // EXPERTS, mask=key >= 0, other=-1)
        mine = tl.load(buffers + row)
    for n in range(misses):
        e_new = tl.sum(tl.where(missing & (rank == n), e, 0), 0)
        takes_free = left > 0
        candidate = known & (key >= 0) & (stamp <= begin)
        if BUFFERS > 0:
            below = _pick(size, b, mine) < _pick(share, b, mine)
            takes_free = takes_free & below
            over = tl.where(b < NUM_BUFFERS, size - share, -(1 << 30))
            most = tl.max(over, 0)
            fullest = tl.min(tl.where(over == most, b, BUFFERS), 0)
            candidate = candidate & (belongs == tl.where(below, fullest, mine))
        oldest = tl.min(tl.where(candidate, stamp, lowest), 0)
        slot = tl.min(tl.where(candidate & (stamp == oldest), at, PADDED), 0)
        if takes_free:
            left -= 1
            slot = tl.load(free + left)
        if slot < PADDED:
            now += 1
            lost = _pick(key, at, slot)
            if lost >= 0:
                tl.store(places + lost, tl.load(bank + lost))
                tl.store(tiers + lost, 1)
            if BUFFERS > 0:
                gone = _pick(belongs, at, slot)
                size += (b == mine).to(tl.int32) - (b == gone).to(tl.int32)
                belongs = tl.where(at == slot, mine, belongs)
            number = base + e_new
            key = tl.where(at == slot, number, key)
            stamp = tl.where(at == slot, now, stamp)
            tl.store(places + number, slot.to(tl.int64) * SLOT_UNITS)
            tl.store(tiers + number, 0)
            tl.store(copies + copied * 2, number)
            tl.store(copies + copied * 2 + 1, slot)
            copied += 1
    changed = known & (stamp > begin)
    tl.store(keys + at, key, mask=changed)
    tl.store(stamps + at, stamp, mask=changed)
    if BUFFERS > 0:
        tl.store(sizes + b, size, mask=b < NUM_BUFFERS)
    tl.store(clock, now)
    tl.store(counts + _FREE, left)
    tl.store(counts + _COPIES, copied)
    tl.debug_barrier()
    place = tl.load(places + base + expert, mask=pair < COUNT * TOP_K, other=0)
    tl.store(chosen + pair // TOP_K * STRIDE + pair % TOP_K, place, mask=pair < COUNT * TOP_K)


@triton.jit
def _fetch(
    arena, bank, copies, counts, SLOT_UNITS: tl.constexpr, WORDS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid: copies, parts of a record. Each part has TILES tiles of TILE words."""
    at = tl.program_id(0)
    if at < tl.load(counts + _COPIES):
        number = tl.load(copies + at * 2)
        slot = tl.load(copies + at * 2 + 1).to(tl.int64)
        source = arena + tl.load(bank + number) * _UNIT_WORDS
        target = arena + slot * SLOT_UNITS * _UNIT_WORDS
        first = tl.program_id(1) * TILES * TILE
        for tile in range(TILES):
            word = first + tile * TILE + tl.arange(0, TILE)
            inside = word < WORDS
            tl.store(target + word, tl.load(source + word, mask=inside, other=0), mask=inside)


def begin(state: VictimState, slots: Tensor) -> None:
    """A step begins; of its rows those count whose KV `slots` [T] are not -1."""
    live = (slots >= 0).sum(dtype=torch.int32)
    state.counts[LIVE].copy_(live)
    state.counts[STEPS].add_((live > 0).int())


def place(state: VictimState, ids: Tensor, chosen: Tensor, row: int) -> None:
    """The experts `ids` int32 [T, K] of layer number `row`: changes the state, and the places
    `chosen` int64 [T, K or more]."""
    rows, top_k = ids.shape
    assert ids.is_contiguous() and rows * top_k <= len(state.copies)
    buffers = len(state.shares) if state.by_layer else 0
    slots = len(state.keys)
    _place[(1,)](
        ids, chosen, state.places, state.tiers, state.bank, state.keys, state.stamps, state.free,
        state.clock, state.counts, state.buffers, state.shares, state.sizes, state.copies,
        state.marks, row, slots, SLOT_UNITS=state.slot_units, COUNT=rows, TOP_K=top_k,
        STRIDE=chosen.stride(0), PAIRS=triton.next_power_of_2(rows * top_k),
        EXPERTS=state.experts, WIDE=triton.next_power_of_2(state.experts),
        PADDED=triton.next_power_of_2(slots),
        BUFFERS=triton.next_power_of_2(buffers) if buffers else 0, NUM_BUFFERS=buffers,
        num_warps=8,
    )  # fmt: skip


def fetch(state: VictimState, arena: Tensor, pairs: int) -> None:
    """Copy what `place` has placed, of up to so many pairs; arena uint8."""
    words = state.record_bytes // 4
    assert state.record_bytes % 4 == 0
    tiles = triton.cdiv(words, _PARTS * _TILE_WORDS)
    _fetch[(pairs, _PARTS)](
        arena.view(torch.int32), state.bank, state.copies, state.counts,
        SLOT_UNITS=state.slot_units, WORDS=words, TILE=_TILE_WORDS, TILES=tiles, num_warps=8,
    )  # fmt: skip


def place_torch(state: VictimState, ids: Tensor, row: int) -> list[tuple[int, int]]:
    """The plain twin of `place`: changes the state, and returns (expert, slot) of the copies."""
    base, begin = row * state.experts, int(state.clock)
    live = int(state.counts[LIVE])
    used = sorted(set(ids[:live].flatten().tolist()))
    copies: list[tuple[int, int]] = []
    for number in (base + expert for expert in used if not state.tiers[base + expert]):
        state.clock.add_(1)
        state.stamps[state.places[number] // state.slot_units] = state.clock[0]
    for number in (base + expert for expert in used if state.tiers[base + expert]):
        slot = _slot_for(state, row, begin)
        if slot is None:
            continue
        lost = int(state.keys[slot])
        if lost >= 0:
            state.places[lost], state.tiers[lost] = state.bank[lost], 1
            state.sizes[state.buffers[lost // state.experts]] -= 1
        state.sizes[state.buffers[row]] += 1
        state.clock.add_(1)
        state.keys[slot], state.stamps[slot] = number, state.clock[0]
        state.places[number], state.tiers[number] = slot * state.slot_units, 0
        copies.append((number, slot))
    return copies


def _slot_for(state: VictimState, row: int, begin: int) -> int | None:
    wanted, takes_free = None, bool(state.counts[FREE] > 0)
    if state.by_layer:
        own = wanted = int(state.buffers[row])
        if state.sizes[own] < state.shares[own]:
            wanted = int(torch.argmax(state.sizes - state.shares))
        else:
            takes_free = False
    if takes_free:
        state.counts[FREE] -= 1
        return int(state.free[state.counts[FREE]])
    slots = range(len(state.keys))
    could = [at for at in slots if state.keys[at] >= 0 and state.stamps[at] <= begin]
    if wanted is not None:
        owner = state.buffers[state.keys.clamp(min=0).long() // state.experts]
        could = [at for at in could if owner[at] == wanted]
    return min(could, key=lambda at: int(state.stamps[at]), default=None)
