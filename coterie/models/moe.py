"""Layers with experts: the router, the block around the experts, and the walk over the stack.

Whatever places and computes experts stands behind `Experts`; everything else of a layer (attention,
dense layers, the expert every token passes) is the backbone's. Knows no strategy and no tier.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.experts.step import ExpertStep
from coterie.kernels.batch import AttentionBatch, split_batch

if TYPE_CHECKING:
    from coterie.core.dispatch import ExpertUsage
    from coterie.experts.geometry import Geometry
    from coterie.kernels.linear import Linear
    from coterie.models.moe_spec import Routing

# (hidden [T, D], caches, batch, first, last) -> hidden behind those layers: dense ones whole, ones
# with experts up to their experts
Backbone = Callable[[Tensor, Sequence[Tensor], AttentionBatch, int, int], Tensor]

# rows that walk through a group of layers together
CHUNK_TOKENS = 512


class Experts(Protocol):
    """What a stack asks of `experts.runtime.ExpertRuntime`."""

    geometry: Geometry

    @property
    def wants_hints(self) -> bool:
        """Whether `hint` is of any use now."""

    def run(self, step: ExpertStep) -> Tensor: ...
    def groups(self, phase: str) -> tuple[tuple[int, ...], ...] | None: ...
    def load_group(self, index: int) -> None: ...
    def hint(self, layer: int, predicted: Tensor) -> None: ...
    def end_step(self) -> tuple[ExpertUsage, list[ExpertUsage]]: ...
    def update(self) -> None: ...
    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Router:
    """Which experts a row goes to and how much each counts, in fp32 whatever the model is."""

    def __init__(self, routing: Routing, product: Linear, bias: Tensor | None = None) -> None:
        self._routing, self._product, self._bias = routing, product, bias
        # -2 for experts that are not there, 0 for the others
        self._penalty: Tensor | None = None

    def exclude(self, absent: Sequence[int]) -> None:
        """Never pick `absent`. The others keep the probabilities they had: where none of the absent
        would have been picked, nothing changes."""
        penalty = torch.zeros(self._product.out_features)
        penalty[list(absent)] = -2.0
        self._penalty = penalty

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Ids int32 [T, K] on the CPU, weights fp32 [T, K] on hidden's device."""
        routing, scores = self._routing, self._scores(hidden)
        weights, ids = torch.topk(scores, routing.top_k)
        if routing.equal:
            weights = torch.ones_like(weights)
        elif routing.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if routing.scale != 1.0:
            weights = weights * routing.scale
        return ids.to("cpu", torch.int32), weights

    def _scores(self, hidden: Tensor) -> Tensor:
        logits = self._product(hidden.float())
        if self._bias is not None:
            logits = logits + self._bias
        scores = torch.softmax(logits, dim=-1)
        if self._penalty is not None:
            self._penalty = self._penalty.to(scores.device)
            scores = scores + self._penalty
        if self._routing.groups > 1:
            scores = self._within_groups(scores)
        return scores

    def _within_groups(self, scores: Tensor) -> Tensor:
        """0 outside the groups whose best experts are the best."""
        routing = self._routing
        grouped = scores.view(len(scores), routing.groups, -1)
        chosen = torch.topk(grouped.amax(-1), routing.top_groups).indices
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device)
        outside.scatter_(1, chosen, False)
        limited = grouped.masked_fill(outside[:, :, None], 0.0).view_as(scores)
        return limited if self._penalty is None else torch.where(scores < 0, scores, limited)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    index: int
    router: Router
    # what the experts read, and how their sum joins the residual
    before: Callable[[Tensor], Tensor]
    after: Callable[[Tensor, Tensor], Tensor] = operator.add
    # the expert every token passes
    shared: Callable[[Tensor], Tensor] | None = None


class MoeStack:
    """A decoder stack some of whose layers end in experts."""

    def __init__(
        self, backbone: Backbone, layers: Sequence[MoeLayer], num_layers: int, experts: Experts
    ) -> None:
        self._backbone, self._layers, self._num_layers = backbone, layers, num_layers
        self._places = {layer.index: place for place, layer in enumerate(layers)}
        self.experts = experts
        self.chunk_tokens = CHUNK_TOKENS
        # spent in routers since the last `take_usage`
        self._routing_s = 0.0
        for layer in layers:
            _mask(layer, experts.geometry)

    def __call__(self, hidden: Tensor, kv: Sequence[Tensor], batch: AttentionBatch) -> Tensor:
        groups = self.experts.groups(batch.phase) if batch.phase == "prefill" else None
        owners = _owners(batch)
        if groups is None:
            return self._walk(hidden, kv, batch, owners, range(len(self._layers)))
        chunks = split_batch(batch, self.chunk_tokens)
        sizes = [len(chunk.positions) for chunk in chunks]
        parts = list(torch.split(hidden, sizes))
        owned = [None] * len(chunks) if owners is None else torch.split(owners, sizes)
        for number, group in enumerate(groups):
            self.experts.load_group(number)
            places = [self._places[layer] for layer in group]
            for index, chunk in enumerate(chunks):
                parts[index] = self._walk(parts[index], kv, chunk, owned[index], places)
        return torch.cat(parts)

    def _walk(
        self,
        hidden: Tensor,
        kv: Sequence[Tensor],
        batch: AttentionBatch,
        owners: Tensor | None,
        places: Sequence[int],
    ) -> Tensor:
        """The MoE layers at `places`, each with the dense ones before it; the last one of all also
        with those behind it."""
        for place in places:
            layer = self._layers[place]
            first = self._layers[place - 1].index + 1 if place else 0
            hidden = self._backbone(hidden, kv, batch, first, layer.index + 1)
            hidden = self._feed(place, hidden, batch.phase, owners)
        end = self._layers[-1].index + 1
        if end < self._num_layers and places[-1] == len(self._layers) - 1:
            hidden = self._backbone(hidden, kv, batch, end, self._num_layers)
        return hidden

    def _feed(self, place: int, hidden: Tensor, phase: str, owners: Tensor | None) -> Tensor:
        layer = self._layers[place]
        rows = layer.before(hidden)
        started = time.perf_counter()
        ids, weights = layer.router(rows)
        self._routing_s += time.perf_counter() - started
        if self.experts.wants_hints and phase == "decode" and place + 1 < len(self._layers):
            following = self._layers[place + 1]
            self.experts.hint(following.index, following.router(rows)[0])
        out = self.experts.run(ExpertStep(layer.index, phase, rows, ids, weights, owners))
        if layer.shared is not None:
            out = out + layer.shared(rows)
        return layer.after(hidden, out)

    def take_usage(self) -> tuple[ExpertUsage, list[ExpertUsage]]:
        """What the steps since the last call cost: in all, and by sequence."""
        total, by_sequence = self.experts.end_step()
        spent, self._routing_s = self._routing_s, 0.0
        return replace(total, routing_s=total.routing_s + spent), by_sequence


def _mask(layer: MoeLayer, geometry: Geometry) -> None:
    """Keep a router to the experts that its store has."""
    present = geometry.present(layer.index)
    if len(present) < geometry.top_k:
        raise WeightsError(
            f"layer {layer.index} has {len(present)} experts left, but every token needs "
            f"{geometry.top_k}. Prune less."
        )
    absent = set(range(geometry.num_experts)).difference(present)
    if absent:
        layer.router.exclude(sorted(absent))


def _owners(batch: AttentionBatch) -> Tensor | None:
    """The sequence of each row, on the CPU; None when there is only one."""
    count = len(batch.context_lens)
    if count == 1:
        return None
    sequences = torch.arange(count, dtype=torch.int32)
    if count == len(batch.positions):
        return sequences
    return sequences.repeat_interleave(batch.query_starts.cpu().diff().long())
