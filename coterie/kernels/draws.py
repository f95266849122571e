"""What a device needs to know of each row to draw its token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """How each of R rows draws, all [R]. Neutral values switch a filter off."""

    # fp32; below 1e-5 the greatest logit is taken
    temperature: Tensor
    # int32 or int64; 0 = off
    top_k: Tensor
    # fp64; 1 = off
    top_p: Tensor
    # fp64; 0 = off
    min_p: Tensor

    def be_greedy(self) -> None:
        """Let all rows take the greatest logit."""
        self.temperature.zero_()
        self.top_k.zero_()
        self.top_p.fill_(1)
        self.min_p.zero_()

    @staticmethod
    def greedy(rows: int, device: torch.device) -> DrawParameters:
        return DrawParameters(
            torch.zeros(rows, dtype=torch.float32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.float64, device=device),
            torch.zeros(rows, dtype=torch.float64, device=device),
        )


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes the logits of each of R rows before a draw: a list of different ids with bias
    and penalties, and a mask."""

    # [R, W]: int32 ids; fp32 bias, minus infinity = banned; int32 number of times in the output,
    # -1 = not in the prompt either
    ids: Tensor
    bias: Tensor
    counts: Tensor
    # int32 [R]: how many of the W are used
    lengths: Tensor
    # fp32 [R], 1 = off; fp32 [R] and fp64 [R], 0 = off
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    # int32 [R, V / 32 rounded up]: bit t % 32 of word t / 32 allows token t; int32 [R]: 0 = unused
    mask: Tensor
    masked: Tensor

    @staticmethod
    def empty(rows: int, width: int, vocab: int, device: torch.device) -> LogitEdits:
        """Rows that nothing changes."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=device)

        return LogitEdits(
            zeros(torch.int32, width),
            zeros(torch.float32, width),
            zeros(torch.int32, width),
            zeros(torch.int32),
            zeros(torch.float32) + 1,
            zeros(torch.float32),
            zeros(torch.float64),
            zeros(torch.int32, -(-vocab // 32)),
            zeros(torch.int32),
        )
