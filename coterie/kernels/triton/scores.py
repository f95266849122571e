"""A Triton kernel for logprobs: log softmax at a row's token, and the best alternatives.

Each chunk of the vocabulary gives its sum and its best tokens, in order; the last program of a row
combines them. Everything is exact up to the rounding of fp64 sums, in a fixed order.
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

from coterie.kernels.triton.sample import float_of, is_last_program, ordered_int

# tokens of a program and its warps
_CHUNK, _WARPS = 4096, 8
# alternatives that can be asked for
MAX_TOP = 20

_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _score(
    logits, tokens, own, top_ids, top_values, counters, bests, sums, candidates,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr,
    TOP: tl.constexpr, TOP_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, rows). candidates[r, chunk, TOP]: above the value as an ordered integer, below
    the distance of the id from the highest, so that the greatest has the lowest id among equals."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    place = part * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + row * VOCAB + place, mask=place < VOCAB, other=-float("inf"))
    best = tl.max(x, 0)
    some = tl.where(best > -float("inf"), best, 0.0)
    tl.store(bests + row * CHUNKS + part, best)
    tl.store(sums + row * CHUNKS + part, tl.sum(tl.exp((x - some).to(tl.float64)), 0))
    if TOP > 0:
        key = (ordered_int(x).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
        key = tl.where(place < VOCAB, key, _LEAST)
        for i in range(TOP):
            highest = tl.max(key, 0)
            tl.store(candidates + (row * CHUNKS + part) * TOP + i, highest)
            key = tl.where(key == highest, _LEAST, key)
    if is_last_program(counters, row):
        chunk = tl.arange(0, PADDED)
        there = chunk < CHUNKS
        # fmt: off
        every = tl.load(
            bests + row * CHUNKS + chunk, mask=there, other=-float("inf"), cache_modifier=".cg")
        parts = tl.load(sums + row * CHUNKS + chunk, mask=there, other=0.0, cache_modifier=".cg")
        # fmt: on
        most = tl.max(every, 0)
        whole = tl.sum(parts * tl.exp((every - most).to(tl.float64)), 0)
        total = most.to(tl.float64) + tl.log(whole)
        token = tl.load(tokens + row)
        mine = tl.load(logits + row * VOCAB + token).to(tl.float64) - total
        tl.store(own + row, mine.to(tl.float32))
        if TOP > 0:
            entry = tl.arange(0, PADDED * TOP_PADDED)
            group = entry // TOP_PADDED
            inner = entry % TOP_PADDED
            keys = tl.load(
                candidates + (row * CHUNKS + group) * TOP + inner,
                mask=(group < CHUNKS) & (inner < TOP), other=_LEAST, cache_modifier=".cg",
            )  # fmt: skip
            for i in range(TOP):
                first = tl.max(keys, 0)
                value = float_of((first >> 32).to(tl.int32)).to(tl.float64) - total
                tl.store(top_ids + row * TOP + i, 0x7FFFFFFF - (first & 0x7FFFFFFF))
                tl.store(top_values + row * TOP + i, value.to(tl.float32))
                keys = tl.where(keys == first, _LEAST, keys)


@dataclass(frozen=True, slots=True)
class ScoreScratch:
    """Memory of `score_rows` for up to R rows and MAX_TOP alternatives. The counters are 0 before
    and after."""

    counters: Tensor
    bests: Tensor
    sums: Tensor
    candidates: Tensor

    @staticmethod
    def empty(rows: int, vocab: int, device: torch.device) -> ScoreScratch:
        chunks = triton.cdiv(vocab, _CHUNK)
        return ScoreScratch(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.empty((rows, chunks), dtype=torch.float32, device=device),
            torch.empty((rows, chunks), dtype=torch.float64, device=device),
            torch.empty((rows, chunks, MAX_TOP), dtype=torch.int64, device=device),
        )


def score_rows(
    logits: Tensor, tokens: Tensor, own: Tensor, top_ids: Tensor, top_values: Tensor,
    scratch: ScoreScratch, dependent: bool = False,
) -> None:  # fmt: skip
    """own fp32 [R] = log softmax of logits fp32 [R, V] at tokens [R]; top_ids int64 and top_values
    fp32 [R, N]: the N best of each row, N <= MAX_TOP and <= V; N may be 0."""
    rows, vocab = logits.shape
    top = top_ids.shape[1]
    chunks = triton.cdiv(vocab, _CHUNK)
    options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
    _score[(chunks, rows)](
        logits, tokens, own, top_ids, top_values, scratch.counters, scratch.bests, scratch.sums,
        scratch.candidates,
        VOCAB=vocab, CHUNK=_CHUNK, CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), TOP=top,
        TOP_PADDED=triton.next_power_of_2(max(top, 1)), PDL=dependent, num_warps=_WARPS, **options,
    )  # fmt: skip
