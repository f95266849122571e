"""For kernels in Triton's interpreter: batches over a shuffled pool, errors, and a newer numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.kernels.batch import AttentionBatch


def random_batch(
    rows: list[int], contexts: list[int], block_size: int, generator: torch.Generator
) -> tuple[AttentionBatch, int]:
    """Block tables over a shuffled pool; every block belongs to one sequence."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts), generator=generator).int()
    tables = torch.zeros((len(contexts), max(counts) + 1), dtype=torch.int32)
    positions, slots, used = [], [], 0
    for index, (count, context, new) in enumerate(zip(counts, contexts, rows, strict=True)):
        tables[index, :count] = order[used : used + count]
        used += count
        where = torch.arange(context - new, context)
        positions.append(where)
        slots.append(tables[index, where // block_size].long() * block_size + where % block_size)
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    lengths = torch.tensor(contexts, dtype=torch.int32)
    batch = AttentionBatch(
        torch.cat(positions), torch.cat(slots), starts, lengths, tables, block_size
    )
    return batch, sum(counts)


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    error = ((got - want).norm() / want.norm()).item()
    return error if error == error else float("inf")


def allow_new_numpy() -> None:
    """triton 3.6's interpreter turns one-element arrays into loop bounds, which numpy 2.4 no longer
    does by itself."""
    from triton.runtime import interpreter

    original: Callable[..., None] = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
