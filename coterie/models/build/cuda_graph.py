"""Decode steps captured as CUDA graphs: in small batches, launching kernels costs more than running
them.

There is one graph per padded number of sequences and KV cache, captured on first use (or by
`prepare`), and a second one for rows with adapters, so that steps without any pay nothing for them.
Padded rows have slot -1, no context and no adapter: the Triton kernels store nothing for them. The
eager path in `base` computes the same; it runs steps with prefill rows, too many sequences, or
adapters that the kernels do not support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from coterie.kernels.batch import KINDS, AttentionBatch, PatchRows, Places, graph_family, places_of

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# token ids, batch, caches, rows -> logits
Compute = Callable[[Tensor, AttentionBatch, Sequence[Tensor], Tensor], Tensor]


class DecodeInputs:
    """Inputs of a decode step at fixed addresses: `size` rows, of which the first n are in use."""

    def __init__(self, size: int, table_width: int, block_size: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        # rows whose logits are needed; values left from another step are valid rows too
        self.rows = torch.arange(size, device=device)
        self.batch = AttentionBatch(
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slots=torch.full((size,), -1, dtype=torch.int64, device=device),
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(size, dtype=torch.int32, device=device),
            block_tables=torch.zeros((size, table_width), dtype=torch.int32, device=device),
            block_size=block_size,
        )

    def adapt(self, layers: int, kind: str) -> None:
        """Allow adapters on rows, up to one of KINDS."""
        number = KINDS.index(kind)
        rows = PatchRows(len(self.token_ids), layers, self.token_ids.device, number)
        self.batch = replace(self.batch, patch_rows=rows)

    def fill(
        self, token_ids: Tensor, batch: AttentionBatch, rows: Tensor, places: Places = ()
    ) -> None:
        """Copy a step and its rows' adapters. Rows left from an earlier, larger step become
        padding."""
        live, width = len(token_ids), batch.block_tables.shape[1]
        fixed = self.batch
        self.token_ids[:live].copy_(token_ids)
        self.rows[: len(rows)].copy_(rows)
        fixed.positions[:live].copy_(batch.positions)
        fixed.slots[:live].copy_(batch.slots)
        fixed.context_lens[:live].copy_(batch.context_lens)
        fixed.block_tables[:live, :width].copy_(batch.block_tables)
        if live < len(self.token_ids):
            fixed.slots[live:] = -1
            fixed.context_lens[live:] = 0
        if fixed.patch_rows is not None:
            fixed.patch_rows.fill(places)


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: DecodeInputs
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DecodeGraphs:
    def __init__(self, compute: Compute, max_positions: int, device: torch.device) -> None:
        self._compute, self._max_positions, self._device = compute, max_positions, device
        # by a lane's first cache, and deleted with it: a graph has the addresses of all its caches
        self._captured = WeakIdKeyDictionary()
        # made by torch; graphs that never run at the same time share their memory
        self._pool: Any = None
        # False once a captured step did not read its rows' adapters: this model's kernels support
        # only segments
        self.adapts = True

    def prepare(
        self, kv: Sequence[Tensor], block_size: int, max_sequences: int, adapters: bool = False
    ) -> None:
        """Capture every size up to `max_sequences`, so that no request waits for it; with
        `adapters` also the graphs for rows that have some."""
        for size in reversed([s for s in SIZES if s < 2 * max_sequences]):
            for kind in ("plain", *KINDS) if adapters else ("plain",):
                if kind == "plain" or self.adapts:
                    self._find(size, kv, block_size, kind)

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> Tensor | None:
        """Logits of a decode step, valid until the next one; None when it must run eagerly."""
        live, width = batch.block_tables.shape
        decode = len(token_ids) == live and len(rows) <= live
        covered = width * batch.block_size <= self._width(batch.block_size)
        if not (decode and covered and live <= SIZES[-1]) or _may_be_soft(batch):
            return None
        places = places_of(batch.patches, self._device)
        kind = graph_family(places, len(kv))
        if not kind or (kind != "plain" and not self.adapts):
            return None
        size = next(size for size in SIZES if size >= live)
        captured = self._find(size, kv, batch.block_size, kind)
        if captured is None:
            return None
        captured.inputs.fill(token_ids, batch, rows, places)
        captured.graph.replay()
        return captured.logits[: len(rows)]

    def _any_captured(self) -> bool:
        """A pool is freed with its last graph."""
        graphs = self._captured.values()  # type: ignore[no-untyped-call]
        return any(found for by_size in graphs for found in by_size.values())

    def _width(self, block_size: int) -> int:
        """Positions that a block table covers, in whole blocks."""
        return -(-self._max_positions // block_size) * block_size

    def _find(
        self, size: int, kv: Sequence[Tensor], block_size: int, kind: str
    ) -> _Captured | None:
        graphs: dict[tuple[int, int, str], _Captured | None]
        graphs = self._captured.setdefault(kv[0], {})  # type: ignore[no-untyped-call]
        key = (size, block_size, kind)
        if key not in graphs:
            graphs[key] = self._capture(size, kv, block_size, kind)
        return graphs[key]

    def _capture(
        self, size: int, kv: Sequence[Tensor], block_size: int, kind: str
    ) -> _Captured | None:
        """None where adapters would be ignored."""
        width = self._width(block_size) // block_size
        inputs = DecodeInputs(size, width, block_size, self._device)
        if kind != "plain":
            inputs.adapt(len(kv), kind)

        def run() -> Tensor:
            return self._compute(inputs.token_ids, inputs.batch, kv, inputs.rows)

        # compile kernels and make library handles before the capture; all rows are padding
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        if inputs.batch.patch_rows is not None and not inputs.batch.patch_rows.read:
            self.adapts = False
            return None
        graph = torch.cuda.CUDAGraph()
        pool = self._pool if self._any_captured() else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = run()
        self._pool = graph.pool()
        return _Captured(inputs, graph, logits)


def _may_be_soft(batch: AttentionBatch) -> bool:
    """Whether a prompt row may be a soft token, for which captured steps have no embedding."""
    prompts = batch.phase != "decode"
    return prompts and any(part.stack.soft is not None for part in batch.patches)
