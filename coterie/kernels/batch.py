"""What attention must know about one step: where rows sit and where their keys and values live.

Plain tensors on the model's device. Knows nothing of requests, schedulers or block pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
