"""The parts of a dense decoder stack as values, shared by the native and the torch path.

A stack is a `DecoderShape` and a list of `DecoderLayer`; `cpu.NativeDecoder` and
`reference.decoder` are the two ways to run one. Knows no checkpoint and no architecture name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class DecoderShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    eps: float
    attention_scale: float

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block: norm, qkv (+ bias, + q/k norm), rope, attention, o, norm, gate_up, down."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # rows: q heads, then k heads, then v heads
    q_norm: Tensor | None  # [head_dim], over each query head before rope (Qwen3)
    k_norm: Tensor | None  # [head_dim]
    qkv_bias: Tensor | None  # [q_size + 2 * kv_size]
    o: Linear
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # rows: gate, then up
    down: Linear
