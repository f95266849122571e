"""The parts of a dense decoder stack as values, shared by the native and the torch path.

A stack is a `DecoderShape` and a list of `DecoderLayer`; `cpu.NativeDecoder` and
`reference.decoder` are the two ways to run one.
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
    """One block: norm, qkv (+ bias, + q/k norm), rope, attention, o, norm, gate_up, down.

    Without post_norm, gate_up and down only the attention runs; the caller runs the rest.
    """

    input_norm: Tensor  # [hidden]
    qkv: Linear  # rows: q heads, then k heads, then v heads
    # before rope; [head_dim]: over each head (Qwen3), longer: over all heads at once (OLMoE)
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None  # [q_size + 2 * kv_size]
    o: Linear
    post_norm: Tensor | None = None  # [hidden]
    gate_up: Linear | None = None  # rows: gate, then up
    down: Linear | None = None

    def norms_whole(self, shape: DecoderShape) -> bool:
        """Whether q and k are normalised over all their heads at once."""
        return self.q_norm is not None and len(self.q_norm) != shape.head_dim
