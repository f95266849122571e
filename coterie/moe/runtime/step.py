"""One MoE layer's work for one step: what the router decided, handed to a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertStep:
    layer: int
    # "prefill" when any row of the step is, else "decode"
    phase: str
    hidden: Tensor  # [T, D], what the experts read (after the norm)
    topk_ids: Tensor  # [T, K] int32, on the CPU
    topk_weights: Tensor  # [T, K] fp32, on hidden's device
    # the sequence (index into the step) that each row belongs to; None = one sequence
    owners: Tensor | None = None  # [T] int32, on the CPU
