"""MoE layers on a CUDA device while all experts are there: nothing is decided on the host.

Everything of a step is enqueued without waiting, so that it can be captured. `DeviceMoeStack` runs
any model layer by layer; `device_decoder` runs most models with fewer kernels. Import this module
only where triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels.device_record import UNIT_BYTES
from coterie.kernels.expert_gate import ExpertGate, choose_in_place
from coterie.kernels.linear import ReferenceLinear
from coterie.kernels.triton import expert_gemv as kernels
from coterie.kernels.triton.cpu_share import await_cpu, ring
from coterie.kernels.triton.expert_groups import ExpertScratch, run_experts_many
from coterie.kernels.triton.expert_tiles import RowNorm
from coterie.kernels.triton.layers import add_norm
from coterie.kernels.triton.sizes import launches_early, pair_sizes
from coterie.moe.runtime.cpu_share import LIMIT_NS

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.device_record import DeviceRecord
    from coterie.kernels.triton.link_prefetch import LayerGuess
    from coterie.models.build.layers import GatedMlp
    from coterie.models.build.moe import Backbone, MoeLayer
    from coterie.moe.runtime.cpu_share import CpuShare
    from coterie.moe.runtime.device_pool import DevicePool

# by precision: up to this many rows each (row, expert) pair has its own products
PAIR_ROWS = {"fp32": 4, "bf16": 4, "int8": 8, "int4": 16}
# the same where experts are read over the link, which carries one that two rows share for each
LINK_PAIR_ROWS = 2


class DeviceMoeStack:
    def __init__(self, backbone: Backbone, layers: Sequence[MoeLayer], num_layers: int) -> None:
        self._backbone, self._layers, self._num_layers = backbone, layers, num_layers

    def run(
        self, hidden: Tensor, kv: Sequence[Tensor], batch: AttentionBatch, pool: DevicePool
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, D] after the stack, and the gates' choices: int32 [layers, T, K]."""
        routed = new_choices(self._layers, len(hidden), hidden.device)
        scratch = new_scratch(routed[0], pool, hidden)
        first = 0
        for row, layer in enumerate(self._layers):
            hidden = self._backbone(hidden, kv, batch, first, layer.index + 1)
            rows = layer.before(hidden)
            own, chosen = layer_pool(pool, row, layer.index), routed_rows(routed[row])
            _choose(rows, layer.gate, own.places, chosen)
            placed = place_missing(pool, row, chosen)
            out = torch.zeros_like(rows)
            share = layer_share(pool, row, len(rows))
            with pool.layer(row, chosen.ids):
                add_experts(
                    rows, chosen, own, out, scratch, pool.slot_bytes, share=share, placed=placed
                )
            if layer.shared is not None:
                out = out + layer.shared(rows, batch.patches)
            hidden = layer.after(hidden, out)
            first = layer.index + 1
        if first < self._num_layers:
            hidden = self._backbone(hidden, kv, batch, first, self._num_layers)
        return hidden, routed


def new_choices(layers: Sequence[MoeLayer], rows: int, device: torch.device) -> Tensor:
    """Room for the gates' choices: int32 [layers, rows, K]."""
    shape = (len(layers), rows, layers[0].gate.rule.top_k)
    return torch.empty(shape, dtype=torch.int32, device=device)


def layer_pool(pool: DevicePool, row: int, layer: int) -> kernels.ExpertPool:
    return kernels.ExpertPool(pool.arena, pool.places[row], pool.records[layer])


class LayerShare:
    """One layer of a step whose experts the CPU computes in part."""

    def __init__(self, share: CpuShare, row: int, tiers: Tensor) -> None:
        self._share, self._row, self._tiers = share, row, tiers

    def ring(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        norm: tuple[Tensor, Tensor] | None = None,
        dependent: bool = False,
        guess: LayerGuess | None = None,
    ) -> Tensor:
        """What the CPU takes of each pair. Arguments: see `cpu_share.ring`."""
        taken, inner = self._share.room(tuple(weights.shape)), self._share.record.intermediate
        state = self._share.state
        own = self._tiers, self._row, inner, state, taken
        ring(x, ids, weights, *own, norm, dependent, guess=guess)
        return taken

    def ring_whole(self, x: Tensor, routed: kernels.RoutedRows) -> kernels.RoutedRows:
        """The choices that are left to the device when the CPU has taken whole experts."""
        left = torch.empty_like(routed.ids)
        inner, state = self._share.record.intermediate, self._share.state
        own = self._tiers, self._row, inner, state, left
        ring(x, routed.ids, routed.weights, *own, whole=True)
        return replace(routed, ids=left)

    def add(self, hidden: Tensor, dependent: bool = False) -> None:
        """hidden += the CPU's part."""
        await_cpu(hidden, self._share.state, LIMIT_NS, dependent)


def layer_share(pool: DevicePool, row: int, rows: int) -> LayerShare | None:
    """For layer number `row` of a step with so many rows; None: the CPU gets nothing."""
    share = pool.share
    if share is None or rows > share.max_rows:
        return None
    return LayerShare(share, row, pool.tiers[row])


def place_missing(pool: DevicePool, row: int, chosen: kernels.RoutedRows) -> bool:
    """Bring what layer number `row` misses to slots, in steps that do so. Returns whether this is
    such a step: no kernel behind it may then start before the last has ended."""
    if pool.victims is None:
        return False
    pool.victims.place(pool.arena, chosen, row)
    return True


def routed_rows(ids: Tensor) -> kernels.RoutedRows:
    """Room for the choices of a gate, whose ids go to `ids` [T, K]."""
    device = ids.device
    return kernels.RoutedRows(
        ids,
        torch.empty(ids.shape, dtype=torch.int64, device=device),
        torch.empty(ids.shape, dtype=torch.float32, device=device),
        torch.empty(len(ids), dtype=torch.float32, device=device),
    )


def pair_rows(pool: DevicePool) -> int:
    """Up to this many rows each (row, expert) pair has its own products."""
    most = min(PAIR_ROWS[record.kind] for record in pool.records.values())
    return most if pool.bank is None else min(most, LINK_PAIR_ROWS)


def cut_shared(shared: GatedMlp, record: DeviceRecord) -> Tensor | None:
    """A shared expert as experts of the routed ones' width, whose sum it is: their records
    [experts, elements]. None if its width or its type is another."""
    gate_up, down = shared.gate_up, shared.down
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if not isinstance(gate_up, ReferenceLinear) or not isinstance(down, ReferenceLinear):
        return None
    wanted, inner = kinds.get(record.kind), record.intermediate
    same = gate_up.weight.dtype == down.weight.dtype == wanted
    if not same or down.in_features % inner:
        return None
    count = down.in_features // inner
    rows = gate_up.weight.view(2, count, inner, -1).transpose(0, 1)
    columns = down.weight.view(-1, count, inner).transpose(0, 1)
    return torch.cat((rows.reshape(count, -1), columns.reshape(count, -1)), dim=1)


def with_shared(own: kernels.ExpertPool, top_k: int, cut: Tensor) -> kernels.RoutedRows:
    """Room for the choices of a gate for one row, with the parts of a shared expert behind them:
    these are chosen always, with weight 1."""
    found = kernels.RoutedRows.empty(1, top_k + len(cut), cut.device)
    # places may lead out of the pool
    first = cut.data_ptr() - own.base.data_ptr()
    assert first % UNIT_BYTES == 0 and cut[0].nbytes % UNIT_BYTES == 0
    step = cut[0].nbytes // UNIT_BYTES
    found.places[0, top_k:] = first // UNIT_BYTES + step * torch.arange(len(cut))
    found.weights[0, top_k:] = 1.0
    return found


def new_scratch(ids: Tensor, pool: DevicePool, hidden: Tensor) -> ExpertScratch | None:
    """What all layers of a step share, where its rows are too many for products by pair."""
    rows, top_k = ids.shape
    largest = max(pool.records.values(), key=lambda record: record.intermediate)
    if rows <= pair_rows(pool):
        return None
    experts = pool.places.shape[1]
    return ExpertScratch.empty(rows, top_k, experts, largest, hidden.dtype, hidden.device)


def add_experts(
    x: Tensor,
    routed: kernels.RoutedRows,
    pool: kernels.ExpertPool,
    hidden: Tensor,
    scratch: ExpertScratch | None,
    slot_bytes: int | None,
    norm: RowNorm | None = None,
    share: LayerShare | None = None,
    placed: bool = False,
) -> None:
    """hidden += the weighted sum of the experts of each row of x, which is normed; then the norm of
    hidden, if given. With `share` the CPU computes a part; `placed`: see `place_missing`."""
    early = launches_early(x.device) and not placed
    if scratch is not None:
        own = norm if share is None else None
        left = routed if share is None else share.ring_whole(x, routed)
        run_experts_many(x, left, pool, hidden, scratch, slot_bytes, dependent=early, norm=own)
        if share is not None:
            share.add(hidden)
            if norm is not None:
                add_norm(hidden, None, norm.weight, norm.eps, norm.out)
        return
    sizes, inner = pair_sizes(pool.record), pool.record.intermediate
    acts = torch.empty((routed.ids.numel(), inner), dtype=x.dtype, device=x.device)
    taken = None
    if share is not None:
        taken = share.ring(x, routed.ids, routed.weights, dependent=early)
    kernels.pair_gate_up(x, routed, pool, acts, sizes, dependent=early, taken=taken)
    kernels.pair_down(acts, routed, pool, hidden, sizes, dependent=early, taken=taken)
    if share is not None:
        share.add(hidden, early)
    if norm is not None:
        add_norm(hidden, None, norm.weight, norm.eps, norm.out)


def _choose(x: Tensor, gate: ExpertGate, places: Tensor, out: kernels.RoutedRows) -> None:
    logits, penalty = gate.logits(x)
    if gate.rule.groups == 1:
        kernels.choose(logits, gate.rule, penalty, places, out)
        return
    ids, weights = choose_in_place(gate.rule, logits, penalty)
    out.ids.copy_(ids)
    out.weights.copy_(weights)
    out.places.copy_(places[ids])
