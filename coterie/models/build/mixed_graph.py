"""Captured steps of prompts and decoding rows together: launching their kernels one by one takes
longer than a small model computes them.

A step is padded to a number of rows, sequences and blocks. The last sequence has the rows behind
the others: these have slot -1 and no context, so nothing of them is stored. The step is captured
when such a size comes for the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from coterie.kernels.batch import AttentionBatch
from coterie.models.build.cuda_graph import CONTEXTS, Compute, DecodeGraphs, StepOutput
from coterie.models.build.graph_memory import row_bytes
from coterie.models.spec import ModelSpec

# rows of captured steps, and sequences; never equal, which would mean that every sequence decodes
ROWS = (384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
SEQUENCES = (32, 256)
# Rows times bytes of weights up to which a device computes a step before it is launched: padding
# then costs nothing. Prompts that cuDNN would compute faster are captured up to the second.
MAX_WORK, MAX_FRESH_WORK = 4e12, 1e12
# larger models take longer than their launches
MAX_WEIGHT_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class CapturedMix:
    token_ids: Tensor
    batch: AttentionBatch
    rows: Tensor
    replay: Callable[[], None]
    logits: Tensor

    def fill(self, token_ids: Tensor, batch: AttentionBatch, rows: Tensor) -> None:
        count, fixed = len(token_ids), self.batch
        sequences, width = batch.block_tables.shape
        self.token_ids[:count].copy_(token_ids)
        self.rows[: len(rows)].copy_(rows)
        fixed.positions[:count].copy_(batch.positions)
        fixed.slots[:count].copy_(batch.slots)
        fixed.slots[count:].fill_(-1)
        fixed.query_starts[: sequences + 1].copy_(batch.query_starts)
        fixed.query_starts[sequences + 1 : -1].fill_(count)
        fixed.context_lens[:sequences].copy_(batch.context_lens)
        fixed.context_lens[sequences:].fill_(0)
        fixed.block_tables[:sequences, :width].copy_(batch.block_tables)


class MixedGraphs:
    def __init__(
        self, compute: Compute, graphs: DecodeGraphs, spec: ModelSpec, weight_bytes: int
    ) -> None:
        """Graphs are recorded by `graphs`, whose memory they share. `weight_bytes`: what a step
        reads."""
        self._compute, self._graphs = compute, graphs
        self._spec, self._weight_bytes = spec, weight_bytes
        # by a lane's first cache, and deleted with it; None: seen once
        self._captured = WeakIdKeyDictionary()

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> StepOutput | None:
        """The output, valid until the next captured step; None when it must run eagerly."""
        count, (sequences, width) = len(token_ids), batch.block_tables.shape
        size = next((size for size in ROWS if size >= count), None)
        room = next((room for room in SEQUENCES if room >= max(sequences, len(rows))), None)
        if size is None or room is None or batch.patches or not len(rows):
            return None
        work = count * self._weight_bytes
        others = batch.fresh or batch.continued
        if work > (MAX_FRESH_WORK if others else MAX_WORK) and (others or size != count):
            return None
        most = -(-self._spec.max_positions // batch.block_size)
        contexts = (context // batch.block_size for context in CONTEXTS)
        blocks = min(most, next((some for some in contexts if some >= width), most))
        found: dict[tuple[int, int, int, int], CapturedMix | None]
        found = self._captured.setdefault(kv[0], {})  # type: ignore[no-untyped-call]
        key = (size, room, blocks, batch.block_size)
        if width > blocks or key not in found:
            found.setdefault(key, None)
            return None
        captured = found[key]
        if captured is None:
            memory = self._graphs.memory
            nbytes = size * row_bytes(self._spec, 2) + room * self._spec.vocab * 4
            if not memory.spares(nbytes):
                return None
            with memory.measured():
                captured = found[key] = self._capture(key, kv)
        captured.fill(token_ids, replace(batch, fresh=(), continued=()), rows)
        captured.replay()
        return captured.logits[: len(rows)], None

    def _capture(self, key: tuple[int, int, int, int], kv: Sequence[Tensor]) -> CapturedMix:
        size, room, blocks, block_size = key
        device = kv[0].device

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        token_ids, rows = zeros(torch.int64, size), zeros(torch.int64, room)
        starts = zeros(torch.int32, room + 2)
        starts[-1] = size
        batch = AttentionBatch(
            positions=zeros(torch.int64, size),
            slots=zeros(torch.int64, size) - 1,
            query_starts=starts,
            context_lens=zeros(torch.int32, room + 1),
            block_tables=zeros(torch.int32, room + 1, blocks),
            block_size=block_size,
        )
        replay, (logits, _) = self._graphs.record(lambda: self._compute(token_ids, batch, kv, rows))
        assert logits is not None
        return CapturedMix(token_ids, batch, rows, replay, logits)
