"""A stack whose experts all lie in memory: every layer of a step in one native call.

The walk in moe.py computes the same bits; this one asks nobody anything on the way. Knows no tier.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels.cpu import abi
from coterie.kernels.batch import AttentionBatch, split_batch
from coterie.kernels.cpu.expert_mlp import expert_shape

if TYPE_CHECKING:
    from coterie.kernels.cpu.layers import NativeDecoder
    from coterie.models.build.moe import Experts, MoeLayer
    from coterie.moe.runtime.resident import Resident


class Express:
    def __init__(self, decoder: NativeDecoder, layers: Sequence[MoeLayer], num_layers: int) -> None:
        self._decoder, self._layers, self._num_layers = decoder, layers, num_layers
        self._norms = [_floats(layer.norm) for layer in layers]
        self._top_k = layers[0].router.routing.top_k
        # what the decoder's layers point at now
        self._attached: Resident | None = None
        self._parts: list[abi.MoePart] = []

    @staticmethod
    def fits(layers: Sequence[MoeLayer]) -> bool:
        """Whether the native layer knows everything that these do."""
        return all(
            layer.norm is not None
            and layer.shared is None
            and layer.after is operator.add
            and layer.router.route is not None
            for layer in layers
        )

    def run(
        self,
        hidden: Tensor,
        kv: Sequence[Tensor],
        batches: Sequence[AttentionBatch],
        found: Resident,
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, D] behind the stack, and what the routers chose: int32 [layers, T, K]."""
        self._attach(found)
        parts = torch.split(hidden, [len(batch.positions) for batch in batches])
        outs, chosen = [], []
        try:
            for part, batch in zip(parts, batches, strict=True):
                routed = torch.empty(self._num_layers, len(part), self._top_k, dtype=torch.int32)
                outs.append(self._decoder.forward(part, kv, batch, overwrite=True, routed=routed))
                chosen.append(routed[[layer.index for layer in self._layers]])
        finally:
            self._detach()
        if len(outs) == 1:
            return outs[0], chosen[0]
        return torch.cat(outs), torch.cat(chosen, 1)

    def _attach(self, found: Resident) -> None:
        if self._attached is not found:
            self._parts = [
                abi.MoePart(
                    norm.data_ptr(),
                    layer.router.route,
                    expert_shape(found.layouts[layer.index]),
                    found.tables[layer.index].pointers,
                )
                for layer, norm in zip(self._layers, self._norms, strict=True)
            ]
            self._attached = found
        for layer, part in zip(self._layers, self._parts, strict=True):
            self._decoder.attach(layer.index, part)

    def _detach(self) -> None:
        for layer in self._layers:
            self._decoder.attach(layer.index, None)


def _floats(norm: Tensor | None) -> Tensor:
    assert norm is not None
    return norm.float().contiguous()


def ride(
    express: Express,
    experts: Experts,
    step: tuple[Tensor, Sequence[Tensor], AttentionBatch],
    owners: Tensor | None,
    chunk_tokens: int,
) -> Tensor | None:
    """The whole stack at once, if nothing stands against it now."""
    hidden, kv, batch = step
    found = experts.resident(batch.phase)
    if found is None:
        return None
    begin = time.perf_counter()
    few = len(batch.positions) <= chunk_tokens
    batches = [batch] if few else split_batch(batch, chunk_tokens)
    out, routed = express.run(hidden, kv, batches, found)
    experts.ran(found, routed, owners, time.perf_counter() - begin)
    return out
