"""Runs a CausalLM over its own paged cache, without an engine: chunks of any size, then logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.kernels.batch import AttentionBatch
from coterie.kernels.patch import Segment
from coterie.models.base import CausalLM


class Paged:
    """One cache for several sequences. Blocks are handed out so that no sequence is contiguous."""

    def __init__(self, model: CausalLM, sequences: int, max_tokens: int, block_size: int = 16):
        self.model, self.block_size = model, block_size
        width = -(-max_tokens // block_size)
        blocks = torch.arange(sequences * width, dtype=torch.int32)
        self.tables = blocks.view(width, sequences).T.contiguous()
        shape = model.kv_shape(sequences * width, block_size)
        # poisoned: a read of a position nobody wrote shows as NaN
        self.kv = [
            torch.full(shape, float("nan"), dtype=model.kv_dtype, device=model.device)
            for _ in range(model.spec.num_layers)
        ]
        self.lengths = [0] * sequences

    def step(
        self, rows: Sequence[tuple[int, Sequence[int]]], patches: tuple[Segment, ...] = ()
    ) -> list[Tensor]:
        """Append tokens to each named sequence in one batch; logits of every new row, per entry."""
        positions, slots, context = [], [], []
        for sequence, tokens in rows:
            start = self.lengths[sequence]
            self.lengths[sequence] = start + len(tokens)
            where = torch.arange(start, start + len(tokens))
            block = self.tables[sequence, where // self.block_size].long()
            positions.append(where)
            slots.append(block * self.block_size + where % self.block_size)
            context.append(start + len(tokens))
        counts = [len(tokens) for _, tokens in rows]
        device = self.model.device
        batch = AttentionBatch(
            positions=torch.cat(positions).to(device),
            slots=torch.cat(slots).to(device),
            query_starts=torch.tensor([0, *counts]).cumsum(0).int().to(device),
            context_lens=torch.tensor(context, dtype=torch.int32, device=device),
            block_tables=self.tables[[sequence for sequence, _ in rows]].to(device),
            block_size=self.block_size,
            phase="decode" if max(counts) == 1 else "prefill",
            patches=patches,
        )
        ids = torch.tensor([token for _, part in rows for token in part], device=device)
        wanted = torch.arange(len(ids), device=device)
        return list(self.model.forward(ids, batch, self.kv, wanted).clone().split(counts))


def prompt_logits(model: CausalLM, ids: Sequence[int], chunk: int) -> Tensor:
    """Logits at every position, prefilled `chunk` tokens at a time (1 = decode steps)."""
    paged = Paged(model, 1, len(ids))
    parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    return torch.cat([paged.step([(0, part)])[0] for part in parts])
