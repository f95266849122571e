"""Which experts a row uses and with which weights: softmax over all, then the best few.

`ExpertGate` is the rule with its product, native where that is compiled. `choose_experts` computes
the same in torch and also supports groups. Both return ids int32 on the CPU and weights fp32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import native
from coterie.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class GateRule:
    """Softmax over all experts, then the `top_k` best."""

    top_k: int
    # the chosen probabilities are divided by their sum
    normalise: bool
    scale: float = 1.0
    # every chosen expert has weight 1, whatever its probability (carved models)
    equal: bool = False
    # experts are chosen from the `top_groups` groups with the best experts
    groups: int = 1
    top_groups: int = 1


def choose_experts(rule: GateRule, logits: Tensor, penalty: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids int32 [T, K] on the CPU, weights fp32 [T, K] where the logits are."""
    ids, weights = choose_in_place(rule, logits, penalty)
    return ids.to("cpu", torch.int32), weights


def choose_in_place(
    rule: GateRule, logits: Tensor, penalty: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ids int64 and weights fp32 [T, K], both where the logits are; waits for nothing."""
    scores = torch.softmax(logits, dim=-1)
    if penalty is not None:
        scores = scores + penalty
    if rule.groups > 1:
        scores = _within_groups(rule, scores, penalty is not None)
    weights, ids = torch.topk(scores, rule.top_k)
    if rule.equal:
        weights = torch.ones_like(weights)
    elif rule.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if rule.scale != 1.0:
        weights = weights * rule.scale
    return ids, weights


def _within_groups(rule: GateRule, scores: Tensor, penalised: bool) -> Tensor:
    """The scores, with 0 outside the best groups (ranked by their best expert)."""
    grouped = scores.view(len(scores), rule.groups, -1)
    chosen = torch.topk(grouped.amax(-1), rule.top_groups).indices
    outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device)
    outside.scatter_(1, chosen, False)
    limited = grouped.masked_fill(outside[:, :, None], 0.0).view_as(scores)
    return torch.where(scores < 0, scores, limited) if penalised else limited


class ExpertGate:
    """The gate of a MoE layer: its product, its rule, and the experts that it must not choose."""

    def __init__(self, rule: GateRule, product: Linear, bias: Tensor | None = None) -> None:
        self.rule, self.product, self._bias = rule, product, bias
        # -2 for absent experts, 0 for the others
        self._penalty: Tensor | None = None
        # the native form; None: torch
        self.route: abi.Route | None = None
        library, matrix = native(), getattr(product, "matrix", None)
        if library is not None and isinstance(matrix, abi.Matrix) and rule.groups == 1:
            self._call = library.call.ct_route
            self.route = self._native(matrix)

    def exclude(self, absent: Sequence[int]) -> None:
        """Never choose `absent`; the probabilities of the others do not change."""
        penalty = torch.zeros(self.product.out_features)
        penalty[list(absent)] = -2.0
        self._penalty = penalty
        if self.route is not None:
            self.route.penalty = penalty.data_ptr()

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.route is None:
            return self._in_torch(hidden)
        rows = hidden.float().contiguous()
        ids = torch.empty(len(rows), self.rule.top_k, dtype=torch.int32)
        weights = torch.empty(len(rows), self.rule.top_k)
        self._call(
            ctypes.byref(self.route),
            rows.data_ptr(),
            len(rows),
            ids.data_ptr(),
            weights.data_ptr(),
            torch.get_num_threads(),
        )
        return ids, weights

    def _in_torch(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return choose_experts(self.rule, *self.logits(hidden))

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """fp32 [T, E], and the penalty [E] of absent experts, both on the device of `hidden`."""
        logits = self.product(hidden.float())
        if self._bias is not None:
            logits = logits + self._bias
        return logits, self.penalty(logits.device)

    def penalty(self, device: torch.device) -> Tensor | None:
        """-2 for absent experts and 0 for the others; None if all are there."""
        if self._penalty is not None:
            self._penalty = self._penalty.to(device)
        return self._penalty

    @property
    def is_plain(self) -> bool:
        """Whether the logits are the product alone, and all experts are one group."""
        return self._bias is None and self.rule.groups == 1

    def _native(self, matrix: abi.Matrix) -> abi.Route:
        rule = self.rule
        if self._bias is not None:
            self._bias = self._bias.float().contiguous()
        bias = None if self._bias is None else self._bias.data_ptr()
        return abi.Route(
            ctypes.pointer(matrix), bias, None, rule.top_k, rule.normalise, rule.equal, rule.scale
        )
