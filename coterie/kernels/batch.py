"""What attention needs for one step: the positions of rows, and where their keys and values are.

Plain tensors on the model's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels.patch import PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.kernels.patch import Patch, PatchStack, Segment


# prompts of this many rows that have no earlier tokens need no paged attention
FRESH_ROWS = 128


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """T rows of S sequences. Query row i of sequence s (0-based among its n rows) attends to the
    positions 0 .. context_lens[s] - n + i.

    A layer's KV cache is one tensor [2, num_blocks, kv_heads, block_size, head_dim].
    """

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block_id * block_size + offset, where this row's K and V go
    query_starts: Tensor  # [S+1] int32: sequence s owns rows query_starts[s]:query_starts[s+1]
    context_lens: Tensor  # [S] int32: tokens in the sequence's KV after this step
    block_tables: Tensor  # [S, max_blocks] int32, unused entries 0
    block_size: int
    # "decode" when no row belongs to a prompt; expert strategies may differ by phase
    phase: str = "prefill"
    # rows with adapters, in order, not overlapping; other rows run the model unchanged
    patches: tuple[Segment, ...] = ()
    # captured steps have their rows' patches here, at a fixed address, and no segments
    patch_rows: PatchRows | None = None
    # (first row, last row + 1) of prompts with at least FRESH_ROWS rows and nothing before them
    fresh: tuple[tuple[int, int], ...] = ()
    # of later parts of prompts with at least as many rows: (first row, last row + 1, number of the
    # sequence, tokens before it)
    continued: tuple[tuple[int, int, int, int], ...] = ()


def split_batch(batch: AttentionBatch, chunk_tokens: int) -> list[AttentionBatch]:
    """The same rows in order, at most `chunk_tokens` in each batch. A sequence may be split: its
    later rows read the keys and values that its earlier ones wrote."""
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


# words of a site: addresses of a, b, in_scale, out_scale, shift (0: none), rank, 1 if a and b are
# fp32, bytes of a (low half) and b
WORDS = 8
# families of kernels: only low-rank bf16 of at most FEW ranks; of more ranks; all patches
KINDS = NARROW, DEEP, WIDE = "narrow", "deep", "wide"
FEW = 16
# the largest rank that captured steps support; torch computes larger ones
MAX_RANK = 256
# from this many rows on, separate products for a segment are faster
LONG_ROWS = 512
# the alignment that the kernels' widest loads need
_ALIGN = 16


@dataclass(frozen=True, slots=True, eq=False)
class StackRecord:
    """A stack's sites, by layer and part. Does not keep the stack's memory alive."""

    # [layers * parts, WORDS] int64; None: the kernels do not support some patch
    sites: Tensor | None
    rank: int
    layers: int
    # index in KINDS
    kind: int
    # all its patches belong to layers
    inside: bool


def stack_record(stack: PatchStack, device: torch.device) -> StackRecord:
    """Made once per stack; a stack is on one device."""
    found: StackRecord | None = stack.tables.get("cuda")
    if found is None:
        found = stack.tables["cuda"] = _record(stack, device)
    return found


def _record(stack: PatchStack, device: torch.device) -> StackRecord:
    inner = {site: patch for site, patch in stack.patches.items() if site[1] in PARTS}
    inside = len(inner) == len(stack.patches)
    if not all(_readable(site[1], patch) for site, patch in inner.items()):
        return StackRecord(None, 0, 0, 0, inside)
    layers = 1 + max((layer for layer, _ in inner), default=-1)
    words = [[0] * WORDS for _ in range(layers * len(PARTS))]
    for (layer, part), patch in inner.items():
        words[layer * len(PARTS) + PARTS.index(part)] = _words(patch)
    rank = max((patch.rank for patch in inner.values()), default=0)
    sites = torch.tensor(words, dtype=torch.int64).view(len(words), WORDS)
    wide = any(map(_more, inner.values()))
    kind = KINDS.index(WIDE if wide else DEEP if rank > FEW else NARROW)
    return StackRecord(sites.to(device), rank, layers, kind, inside)


def _readable(part: str, patch: Patch) -> bool:
    """The kernels can scale an input only before `down`; the other products are fused or read
    attention's output directly."""
    vectors = (patch.a, patch.b, patch.in_scale, patch.out_scale, patch.shift)
    aligned = all(part is None or part.data_ptr() % _ALIGN == 0 for part in vectors)
    return aligned and patch.rank <= MAX_RANK and (part == "down" or patch.in_scale is None)


def _wide(patch: Patch) -> bool:
    return patch.a is not None and patch.a.dtype == torch.float32


def _more(patch: Patch) -> bool:
    vectors = (patch.in_scale, patch.out_scale, patch.shift)
    return _wide(patch) or any(vector is not None for vector in vectors)


def _words(patch: Patch) -> list[int]:
    vectors = (patch.a, patch.b, patch.in_scale, patch.out_scale, patch.shift)
    addresses = [0 if v is None else v.data_ptr() for v in vectors]
    nbytes = [0 if v is None else v.nbytes for v in vectors[:2]]
    return [*addresses, patch.rank, int(_wide(patch)), nbytes[0] | nbytes[1] << 32]


# (first row, last row + 1, the record that they read)
Places = tuple[tuple[int, int, StackRecord], ...]


class PatchRows:
    """The patches of `rows` rows at every site of `layers` layers, in a table whose address never
    changes."""

    def __init__(self, rows: int, layers: int, device: torch.device, kind: int) -> None:
        self.device = device
        self.table = torch.zeros(
            (rows, layers * len(PARTS), WORDS), dtype=torch.int64, device=device
        )
        # the most terms of one row and part
        self.rank = MAX_RANK if kind else FEW
        # index in KINDS: at least that of its records
        self.kind = kind
        # set by kernels that read the table; other models run adapters without captured steps
        self.read = False
        self._filled: Places = ()

    def fill(self, places: Places) -> None:
        """Other rows run the model unchanged. Does nothing if the rows are the same as last time.
        The caller must keep the stacks until the step has been computed."""
        if places == self._filled:
            return
        numbers: dict[StackRecord, int] = {}
        index = [0] * len(self.table)
        for first, last, record in places:
            number = numbers.setdefault(record, len(numbers) + 1)
            index[first:last] = [number] * (last - first)
        sites = [self.table.new_zeros((self.table.shape[1], WORDS))]
        sites += [record.sites for record in numbers if record.sites is not None]
        joined = torch.nn.utils.rnn.pad_sequence(sites, batch_first=True)
        chosen = torch.tensor(index, device="cpu")
        if self.device.type == "cuda":
            # a copy from other memory waits for the step in flight
            chosen = chosen.pin_memory().to(self.device, non_blocking=True)
        torch.index_select(joined, 0, chosen, out=self.table)
        self._filled = places


def places_of(segments: Sequence[tuple[int, int, PatchStack]], device: torch.device) -> Places:
    """Without stacks that only have soft tokens: these have no patches."""
    return tuple(
        [(first, last, stack_record(s, device)) for first, last, s in segments if s.patches]
    )


def graph_family(places: Places, layers: int) -> str:
    """Which captured steps can run these rows: "plain", one of KINDS, or "" when none can."""
    kind = -1
    for _, _, record in places:
        if not record.inside or record.sites is None or record.layers > layers:
            return ""
        kind = max(kind, record.kind)
    return KINDS[kind] if places else "plain"
