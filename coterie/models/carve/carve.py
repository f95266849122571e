"""Divides a dense gated MLP into a shared part and experts, without training.

The neurons that contribute most on calibration text stay active for every token. The others are
grouped by how they are active together, in groups of equal size, and a linear gate is fitted that
predicts each group's contribution. This module has the arithmetic of one layer, no files or texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.errors import ConfigError

# the default share of always active neurons: with fewer, a carved small model writes nonsense
_SHARED_SHARE = 1 / 3

# groups are found on random projections of the neurons' activations, which keep their angles
_SKETCH = 512
_ROUNDS = 8

# the ridge of the fit, as a share of the mean square of its inputs
_RIDGE = 1e-2

# the largest logit on calibration text: a softmax over larger ones rounds small ones to equal zeros
_TOP_LOGIT = 20.0


@dataclass(frozen=True, slots=True)
class CarvingPlan:
    """How a layer is divided: `experts` groups of `width` neurons, of which `active` run per token;
    `shared` neurons always run."""

    experts: int
    active: int
    shared: int
    width: int
    seed: int = 0

    def share(self, active: int) -> float:
        """The share of a layer's neurons that run when `active` experts do."""
        return (self.shared + active * self.width) / (self.shared + self.experts * self.width)


def plan_carving(
    intermediate: int, experts: int, active: int, shared: int | None = None, seed: int = 0
) -> CarvingPlan:
    """Check the numbers; `shared` None uses about a third of the neurons."""
    if experts < 2 or experts > intermediate:
        raise ConfigError(
            f"{experts} experts cannot be cut from {intermediate} neurons", param="experts"
        )
    if not 1 <= active <= experts:
        raise ConfigError(f"{active} of {experts} experts cannot be active", param="active")
    if shared is None:
        width = _even(int(intermediate * (1 - _SHARED_SHARE)) // experts)
        return CarvingPlan(experts, active, intermediate - experts * width, width, seed)
    left = intermediate - shared
    if shared < 0 or left < experts:
        raise ConfigError(
            f"{shared} shared neurons of {intermediate} leave nothing for {experts} experts",
            param="shared",
        )
    if left % experts:
        low = intermediate - (left // experts + 1) * experts
        near = [str(n) for n in (low, low + experts) if n >= 0]
        raise ConfigError(
            f"{left} neurons do not divide into {experts} experts; --shared {' or '.join(near)} "
            "would",
            param="shared",
        )
    return CarvingPlan(experts, active, shared, left // experts, seed)


def _even(width: int) -> int:
    """A whole number of kernel panels or half panels where that is possible; at least one."""
    for step in (16, 8):
        if width >= step:
            return width // step * step
    return max(width, 1)


@dataclass(frozen=True, slots=True)
class LayerCut:
    """One layer's carving: neuron numbers of the dense MLP, and the gate."""

    shared: Tensor  # [S] int64, ascending
    experts: Tensor  # [E, W] int64, ascending in each row
    gate: Tensor  # [E, D] fp32

    def scores(self, rows: Tensor) -> Tensor:
        return rows.float() @ self.gate.T

    def mask(self, rows: Tensor, active: int) -> Tensor:
        """1 for the neurons [T, I] that run when each row uses its `active` best experts."""
        picked = torch.topk(self.scores(rows), active).indices
        total = len(self.shared) + self.experts.numel()
        mask = torch.zeros(len(rows), total)
        mask[:, self.shared] = 1.0
        return mask.scatter_(1, self.experts[picked].flatten(1), 1.0)


def cut_layer(rows: Tensor, activations: Tensor, down: Tensor, carving: CarvingPlan) -> LayerCut:
    """rows [T, D] are the MLP's input, activations [T, I] the input of `down` [D, I]; all fp32."""
    # the size of each neuron's contribution to the output
    weight = activations.abs() * down.norm(dim=0)
    order = torch.argsort(weight.square().mean(0), descending=True, stable=True)
    shared = order[: carving.shared].sort().values
    rest = order[carving.shared :].sort().values
    weight = weight[:, rest]
    labels = balanced_groups(_sketch(weight, carving.seed), carving.experts, carving.seed)
    members = torch.argsort(labels, stable=True).view(carving.experts, carving.width)
    energy = torch.stack([weight[:, group].square().sum(1) for group in members], dim=1).sqrt()
    return LayerCut(shared, rest[members], _fit(rows, energy))


def _sketch(weight: Tensor, seed: int) -> Tensor:
    """A unit vector [_SKETCH] per neuron: similar for neurons that are active together."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(len(weight), _SKETCH, generator=draw)
    return torch.nn.functional.normalize(weight.T @ mix, dim=1)


def balanced_groups(points: Tensor, groups: int, seed: int) -> Tensor:
    """Labels [N] of k-means on the sphere in which every group has N / groups points."""
    count = len(points)
    draw = torch.Generator().manual_seed(seed)
    centres = points[torch.randperm(count, generator=draw)[:groups]]
    labels = torch.zeros(count, dtype=torch.int64)
    for _ in range(_ROUNDS):
        labels = _assign(points @ centres.T, count // groups)
        sums = torch.zeros_like(centres).index_add_(0, labels, points)
        centres = torch.nn.functional.normalize(sums, dim=1)
    return labels


def _assign(likeness: Tensor, room: int) -> Tensor:
    """Assign every point to a group of at most `room` points, as a stable matching: points propose
    to the most similar group, and full groups reject the least similar point."""
    likeness = likeness.clone()
    points = torch.arange(len(likeness))
    while True:
        best, wish = likeness.max(dim=1)
        # by group, then by similarity, then by number
        order = torch.argsort(best, descending=True, stable=True)
        order = order[torch.argsort(wish[order], stable=True)]
        wishes = wish[order]
        starts = torch.searchsorted(wishes, wishes)
        refused = order[points - starts >= room]
        if not len(refused):
            return wish
        likeness[refused, wish[refused]] = float("-inf")


def _fit(rows: Tensor, energy: Tensor) -> Tensor:
    """The linear map [E, D] from rows to energies with the least squared error."""
    square = rows.T @ rows
    ridge = _RIDGE * square.diagonal().mean().clamp_min(1e-12)
    square.diagonal().add_(ridge)
    gate: Tensor = torch.linalg.solve(square, rows.T @ energy).T
    largest = (rows @ gate.T).abs().max().clamp_min(1e-12)
    return (gate * (_TOP_LOGIT / largest)).contiguous()
