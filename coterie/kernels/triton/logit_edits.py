"""Triton kernels that change logits before a draw: bias, bans, penalties, masks of a grammar.

The lists of ids are on the device and grow there (`note_tokens`), so that a step can be launched
before the host has read the tokens of the one before it. `reference.sample` has the plain twins.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from coterie.kernels.draws import LogitEdits

# tokens of a program, entries of a list that it looks at together, and its warps
_CHUNK, _ENTRIES, _WARPS = 1024, 128, 4


@triton.jit
def _edit(
    logits, ids, bias, counts, lengths, repetitions, frequencies, presences, mask, masked, out,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr, IN_PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = logits[r] with mask, then the listed ids of this chunk. Grid: (chunks, rows)."""
    first = tl.program_id(0) * CHUNK
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    masks = tl.load(masked + row)
    if (not IN_PLACE) | (masks != 0):
        place = first + tl.arange(0, CHUNK)
        x = tl.load(logits + row * VOCAB + place, mask=place < VOCAB, other=0)
        if masks != 0:
            word = tl.load(mask + row * WORDS + place // 32, mask=place < VOCAB, other=0)
            x = tl.where(((word >> (place % 32)) & 1) != 0, x, -float("inf"))
        tl.store(out + row * VOCAB + place, x, mask=place < VOCAB)
    # what is masked stays minus infinity, whatever is added to it
    tl.debug_barrier()
    length = tl.load(lengths + row)
    scale = tl.load(repetitions + row)
    frequency = tl.load(frequencies + row)
    presence = tl.load(presences + row)
    for start in range(0, length, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        token = tl.load(ids + row * WIDTH + entry, mask=entry < length, other=-1)
        here = (token >= first) & (token < first + CHUNK)
        target = out + row * VOCAB + token
        value = tl.load(target, mask=here, other=0)
        value += tl.load(bias + row * WIDTH + entry, mask=here, other=0)
        count = tl.load(counts + row * WIDTH + entry, mask=here, other=-1)
        scaled = tl.where(value < 0, value * scale, tl.div_rn(value, tl.where(here, scale, 1.0)))
        value = tl.where(count >= 0, scaled, value)
        taken = (frequency * tl.maximum(count, 0).to(tl.float32)).to(tl.float64)
        taken += tl.where(count > 0, presence, 0.0)
        tl.store(target, (value.to(tl.float64) - taken).to(tl.float32), mask=here)


@triton.jit
def _note(
    tokens, ids, bias, counts, lengths, repetitions, frequencies, presences,
    WIDTH: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count one more output token per row with penalties. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    neutral = (tl.load(repetitions + row) == 1) & (tl.load(frequencies + row) == 0)
    if not (neutral & (tl.load(presences + row) == 0)):
        token = tl.load(tokens + row).to(tl.int32)
        length = tl.load(lengths + row)
        found = tl.full([], -1, tl.int32)
        for start in range(0, length, ENTRIES):
            entry = start + tl.arange(0, ENTRIES)
            known = tl.load(ids + row * WIDTH + entry, mask=entry < length, other=-1)
            found = tl.maximum(found, tl.max(tl.where(known == token, entry, -1), 0))
        if found >= 0:
            count = tl.load(counts + row * WIDTH + found)
            # all warps have read it
            tl.debug_barrier()
            tl.store(counts + row * WIDTH + found, tl.maximum(count, 0) + 1)
        elif length < WIDTH:
            tl.debug_barrier()
            tl.store(ids + row * WIDTH + length, token)
            tl.store(bias + row * WIDTH + length, 0.0)
            tl.store(counts + row * WIDTH + length, 1)
            tl.store(lengths + row, length + 1)


def _options(dependent: bool, warps: int) -> dict[str, Any]:
    # the interpreter knows no launch options
    more = {"launch_pdl": True} if dependent else {}
    return {"ENTRIES": _ENTRIES, "PDL": dependent, "num_warps": warps, **more}


def edit_rows(logits: Tensor, edits: LogitEdits, out: Tensor, dependent: bool = False) -> None:
    """out fp32 [R, V] = logits with the edits; `out` may be `logits` itself, which is cheaper."""
    rows, vocab = logits.shape
    _edit[(triton.cdiv(vocab, _CHUNK), rows)](
        logits, edits.ids, edits.bias, edits.counts, edits.lengths, edits.repetition,
        edits.frequency, edits.presence, edits.mask, edits.masked, out,
        VOCAB=vocab, WIDTH=edits.ids.shape[1], WORDS=edits.mask.shape[1], CHUNK=_CHUNK,
        IN_PLACE=out.data_ptr() == logits.data_ptr(), **_options(dependent, _WARPS),
    )  # fmt: skip


def note_tokens(tokens: Tensor, edits: LogitEdits, dependent: bool = False) -> None:
    """Count one more output token [R] of each row that has penalties. A list that is full takes no
    new ids: make it as wide as prompt and output can be."""
    _note[(len(tokens),)](
        tokens, edits.ids, edits.bias, edits.counts, edits.lengths, edits.repetition,
        edits.frequency, edits.presence,
        WIDTH=edits.ids.shape[1], **_options(dependent, 1),
    )  # fmt: skip
