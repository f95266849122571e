"""The padded inputs of a captured decode step; capturing itself needs a GPU."""

from __future__ import annotations

import torch

from coterie.kernels.batch import AttentionBatch
from coterie.models.cuda_graph import DecodeInputs


def step(lengths: list[int], width: int) -> tuple[torch.Tensor, AttentionBatch, torch.Tensor]:
    count = len(lengths)
    batch = AttentionBatch(
        positions=torch.tensor(lengths) - 1,
        slots=torch.arange(count) * 8 + 3,
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.arange(1, 1 + count * width, dtype=torch.int32).view(count, width),
        block_size=8,
    )
    return torch.arange(10, 10 + count), batch, torch.arange(count).flip(0)


def test_fill_copies_live_rows_and_pads_the_rest() -> None:
    inputs = DecodeInputs(4, 6, 8, torch.device("cpu"))
    addresses = inputs.token_ids.data_ptr(), inputs.batch.block_tables.data_ptr()
    inputs.fill(*step([5, 17, 30], 4))
    assert inputs.token_ids[:3].tolist() == [10, 11, 12]
    assert inputs.rows.tolist() == [2, 1, 0, 3]
    assert inputs.batch.context_lens.tolist() == [5, 17, 30, 0]
    assert inputs.batch.slots.tolist() == [3, 11, 19, -1]
    assert inputs.batch.positions[:3].tolist() == [4, 16, 29]
    assert inputs.batch.block_tables[1].tolist() == [5, 6, 7, 8, 0, 0]
    assert (inputs.token_ids.data_ptr(), inputs.batch.block_tables.data_ptr()) == addresses


def test_a_smaller_step_leaves_no_live_row_behind() -> None:
    inputs = DecodeInputs(4, 6, 8, torch.device("cpu"))
    inputs.fill(*step([5, 17, 30, 2], 4))
    inputs.fill(*step([9], 2))
    assert inputs.batch.context_lens.tolist() == [9, 0, 0, 0]
    assert inputs.batch.slots.tolist() == [3, -1, -1, -1]
    assert inputs.batch.query_starts.tolist() == [0, 1, 2, 3, 4]
