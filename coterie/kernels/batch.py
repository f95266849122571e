"""What attention must know about one step: where rows sit and where their keys and values live.

Plain tensors on the model's device. Knows nothing of requests, schedulers or block pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.kernels.patch import Segment
    from coterie.kernels.patch_rows import PatchRows


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """T rows of S sequences. Query row i of sequence s (0-based among its n rows) sees the
    positions 0 .. context_lens[s] - n + i.

    A layer's KV cache is one tensor [2, num_blocks, kv_heads, block_size, head_dim].
    """

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block_id * block_size + offset, where this row's K and V go
    query_starts: Tensor  # [S+1] int32: sequence s owns rows query_starts[s]:query_starts[s+1]
    context_lens: Tensor  # [S] int32: tokens in the sequence's KV after this step
    block_tables: Tensor  # [S, max_blocks] int32, unused entries 0
    block_size: int
    # "decode" when no row belongs to a prompt: expert strategies tell the two apart
    phase: str = "prefill"
    # rows with adapters, in order, not overlapping; rows outside run the model as it is
    patches: tuple[Segment, ...] = ()
    # captured steps have their rows' patches here, at a fixed address, and no segments
    patch_rows: PatchRows | None = None


def split_batch(batch: AttentionBatch, chunk_tokens: int) -> list[AttentionBatch]:
    """The same rows in order, at most `chunk_tokens` at a time. A sequence may be cut: its later
    rows see what its earlier ones wrote."""
    starts = batch.query_starts.tolist()
    total = starts[-1]
    if total <= chunk_tokens:
        return [batch]
    return [
        _rows_between(batch, starts, begin, min(begin + chunk_tokens, total))
        for begin in range(0, total, chunk_tokens)
    ]


def _rows_between(batch: AttentionBatch, starts: list[int], begin: int, end: int) -> AttentionBatch:
    pairs = enumerate(pairwise(starts))
    touched = [i for i, (first, last) in pairs if first < end and last > begin]
    low, high = touched[0], touched[-1] + 1
    bounds = batch.query_starts[low : high + 1].clamp(begin, end) - begin
    # rows of the last sequence that are not in this chunk have not been written yet
    behind = (batch.query_starts[low + 1 : high + 1] - end).clamp_min(0)
    return AttentionBatch(
        positions=batch.positions[begin:end],
        slots=batch.slots[begin:end],
        query_starts=bounds,
        context_lens=batch.context_lens[low:high] - behind,
        block_tables=batch.block_tables[low:high],
        block_size=batch.block_size,
        phase=batch.phase,
        patches=_cut(batch.patches, begin, end),
    )


def _cut(patches: tuple[Segment, ...], begin: int, end: int) -> tuple[Segment, ...]:
    return tuple(
        part._replace(first=max(part.first, begin) - begin, last=min(part.last, end) - begin)
        for part in patches
        if part.first < end and part.last > begin
    )
