"""Runs a decoder stack with MoE layers: attention, gate, experts, residual, layer by layer.

`MoeExperts` places and computes the experts; everything else of a layer (attention, dense layers,
the shared expert) belongs to the backbone.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.core.lane import BLOCK_SIZE
from coterie.kernels.batch import AttentionBatch, split_batch
from coterie.kernels.cpu import abi
from coterie.kernels.cpu.expert_mlp import expert_shape
from coterie.moe.runtime.device_pool import IN_ARENA
from coterie.moe.runtime.resident import StepDemands, count_demands
from coterie.moe.runtime.step import ExpertStep
from coterie.moe.store.base import ExpertGeometry

if TYPE_CHECKING:
    from coterie.core.moe import MoeSettings, MoeUsage
    from coterie.kernels.cpu.layers import NativeDecoder
    from coterie.kernels.expert_gate import ExpertGate
    from coterie.kernels.patch import Segment
    from coterie.models.spec import MoeSpec
    from coterie.moe.runtime.device_pool import DevicePool, ResidentExperts
    from coterie.moe.runtime.memory_trade import MemoryTrade
    from coterie.moe.runtime.slabs import KvBlocks
    from coterie.moe.store.base import ExpertGeometry, ExpertStore
    from coterie.weights.checkpoint import Checkpoint

# (hidden [T, D], caches, batch, first, last) -> hidden after those layers; a layer with experts
# runs up to its experts
Backbone = Callable[[Tensor, Sequence[Tensor], AttentionBatch, int, int], Tensor]

# (hidden, caches, batch, all experts) -> hidden after all layers, and the gates' choices int32
# [layers, T, K]; waits for nothing
DeviceRun = Callable[
    [Tensor, Sequence[Tensor], AttentionBatch, "DevicePool"], tuple[Tensor, Tensor]
]

# rows that run through a group of layers together
CHUNK_TOKENS = 512


class MoeExperts(Protocol):
    """What a stack needs from `moe.runtime.runtime.ExpertRuntime`."""

    geometry: ExpertGeometry
    # with elastic memory: what KV takes of the slots
    trade: MemoryTrade | None

    @property
    def wants_hints(self) -> bool:
        """Whether a call of `hint` is useful now."""

    def resident(self, phase: str) -> ResidentExperts | None: ...
    def device_pool(self) -> DevicePool | None: ...
    def loading_pool(self) -> DevicePool | None: ...
    def prompt_pool(self, rows: int) -> DevicePool | None: ...
    def launched(self, copies: bool) -> None: ...
    def record_device_step(
        self, found: ResidentExperts, demands: StepDemands, s: float
    ) -> None: ...
    def record_resident_step(
        self, found: ResidentExperts, routed: Tensor, owners: Tensor | None, seconds: float
    ) -> None: ...
    def run(self, step: ExpertStep) -> Tensor: ...
    def groups(self, phase: str) -> tuple[tuple[int, ...], ...] | None: ...
    def load_group(self, index: int) -> None: ...
    def hint(self, layer: int, predicted: Tensor) -> None: ...
    def end_step(self) -> tuple[MoeUsage, list[MoeUsage]]: ...
    def update(self) -> tuple[int, int]: ...

    @property
    def moves_beside_steps(self) -> bool:
        """Whether `update` may be called while a step is in flight."""

    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MoeLayer:
    index: int
    gate: ExpertGate
    # makes the experts' input, and adds their sum to the residual
    before: Callable[[Tensor], Tensor]
    after: Callable[[Tensor, Tensor], Tensor] = operator.add
    # the shared expert, which every token uses
    shared: Callable[[Tensor, tuple[Segment, ...]], Tensor] | None = None
    # the weight of `before`, if that is an RMS norm
    norm: Tensor | None = None


class MoeStack:
    """A decoder stack with experts in some of its layers."""

    def __init__(
        self,
        backbone: Backbone,
        layers: Sequence[MoeLayer],
        num_layers: int,
        experts: MoeExperts,
        fused: FusedMoeStack | None = None,
        on_device: DeviceRun | None = None,
    ) -> None:
        self._fused, self._on_device = fused, on_device
        # the last step, if it was enqueued on the device and nobody has asked for its costs
        self._launched: DeviceStep | None = None
        # when the costs of such a step were last collected
        self._collected_s = 0.0
        self._backbone, self._layers, self._num_layers = backbone, layers, num_layers
        self._places = {layer.index: place for place, layer in enumerate(layers)}
        self.experts = experts
        self.chunk_tokens = CHUNK_TOKENS
        # seconds in gates since the last `take_usage`
        self._routing_s = 0.0
        for layer in layers:
            _mask(layer, experts.geometry)

    def __call__(
        self,
        hidden: Tensor,
        kv: Sequence[Tensor],
        batch: AttentionBatch,
        pool: DevicePool | None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden after the stack; and, of a step whose experts the device finds in `pool`, the
        gates' choices int32 [layers, T, K]."""
        if self._on_device is not None and pool is not None:
            hidden, routed = self._on_device(hidden, kv, batch, pool)
            self.ran_on_device(routed, batch, pool)
            return hidden, routed
        owners = _owners(batch)
        if self._fused is not None:
            step = hidden, kv, batch
            whole = run_fused(self._fused, self.experts, step, owners, self.chunk_tokens)
            if whole is not None:
                return whole, None
        groups = self.experts.groups(batch.phase) if batch.phase == "prefill" else None
        if groups is None:
            whole_stack = range(len(self._layers))
            return self._run_layers(hidden, kv, batch, owners, whole_stack), None
        chunks = split_batch(batch, self.chunk_tokens)
        sizes = [len(chunk.positions) for chunk in chunks]
        parts = list(torch.split(hidden, sizes))
        owned = [None] * len(chunks) if owners is None else torch.split(owners, sizes)
        for number, group in enumerate(groups):
            self.experts.load_group(number)
            places = [self._places[layer] for layer in group]
            for index, chunk in enumerate(chunks):
                parts[index] = self._run_layers(parts[index], kv, chunk, owned[index], places)
        return torch.cat(parts), None

    def _run_layers(
        self,
        hidden: Tensor,
        kv: Sequence[Tensor],
        batch: AttentionBatch,
        owners: Tensor | None,
        places: Sequence[int],
    ) -> Tensor:
        """Run the MoE layers at `places`, each with the dense layers before it. After the last MoE
        layer of the model, also run the dense layers behind it."""
        experts, phase = self.experts, batch.phase
        for place in places:
            layer = self._layers[place]
            first = self._layers[place - 1].index + 1 if place else 0
            hidden = self._backbone(hidden, kv, batch, first, layer.index + 1)
            rows = layer.before(hidden)
            started = time.perf_counter()
            ids, weights = layer.gate(rows)
            self._routing_s += time.perf_counter() - started
            if experts.wants_hints and phase == "decode" and place + 1 < len(self._layers):
                following = self._layers[place + 1]
                experts.hint(following.index, following.gate(rows)[0])
            out = experts.run(ExpertStep(layer.index, phase, rows, ids, weights, owners))
            if layer.shared is not None:
                out = out + layer.shared(rows, batch.patches)
            hidden = layer.after(hidden, out)
        end = self._layers[-1].index + 1
        if end < self._num_layers and places[-1] == len(self._layers) - 1:
            hidden = self._backbone(hidden, kv, batch, end, self._num_layers)
        return hidden

    @property
    def pool(self) -> DevicePool | None:
        """All experts on the device; None while a step must run layer by layer."""
        return self.experts.device_pool() if self._on_device is not None else None

    @property
    def is_loading(self) -> bool:
        """Whether layers have to wait for experts that are read from disk for the first time."""
        return self._on_device is not None and self.experts.loading_pool() is not None

    def step_pool(self, batch: AttentionBatch) -> DevicePool | None:
        """For a step whose experts are not where they usually are: while they are loaded, or with
        a prompt that has what is missing copied ahead of it. Call this once."""
        if self._on_device is None:
            return None
        loading, rows = self.experts.loading_pool(), len(batch.positions)
        if loading is not None or batch.phase == "decode" or rows == len(batch.context_lens):
            return loading
        return self.experts.prompt_pool(rows)

    def ran_on_device(self, routed: Tensor, batch: AttentionBatch, pool: DevicePool) -> None:
        """A step was enqueued whose gates write their choices to `routed` [layers, T, K]. While a
        step is captured nothing is counted: the caller counts every replay."""
        if routed.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if pool.share is not None:
            pool.share.wake()
        self._launched = DeviceStep(routed, batch, pool)
        self.experts.launched(copies=pool.stream is not None)

    def launched_usage(self) -> Callable[[], tuple[MoeUsage, list[MoeUsage]]] | None:
        """Where the last step only was enqueued: what waits for it and returns its costs."""
        if self._launched is None:
            return None
        step, self._launched = self._launched, None
        return partial(self._collect_usage, step)

    def _collect_usage(self, step: DeviceStep) -> tuple[MoeUsage, list[MoeUsage]]:
        # a step that was launched ahead waits for the one before it
        demands, seconds = step.collect(self._collected_s)
        self._collected_s = time.perf_counter()
        self.experts.record_device_step(step.pool.experts, demands, seconds)
        return self.take_usage()

    def take_usage(self) -> tuple[MoeUsage, list[MoeUsage]]:
        """The costs of the steps since the last call: in total, and by sequence."""
        total, by_sequence = self.experts.end_step()
        spent, self._routing_s = self._routing_s, 0.0
        return replace(total, routing_s=total.routing_s + spent), by_sequence


# above this many rows the device counts them
_COUNTED_ON_HOST = 64


class DeviceStep:
    """The choices of a step's gates on their way to the host."""

    def __init__(self, routed: Tensor, batch: AttentionBatch, pool: DevicePool) -> None:
        self.pool, self._phase = pool, batch.phase
        self._started = time.perf_counter()
        self._sequences, rows = len(batch.context_lens), len(batch.positions)
        self._own = rows == self._sequences
        # a captured step may have padded rows behind its own
        routed = routed[:, :rows]
        is_placed = pool.victims is not None and pool.victims.takes(batch)
        # few rows of several sequences, of which one has a prompt: the device counts too. Where it
        # brings experts to slots, only the host knows which of them it found there.
        several = not (self._own or self._sequences == 1)
        self._is_counted = not is_placed and (rows > _COUNTED_ON_HOST or several)
        sent = self._count(routed, batch) if self._is_counted else routed.reshape(-1)
        self._shape = routed.shape
        self._arrived = torch.empty(sent.shape, dtype=torch.int32, pin_memory=sent.is_cuda)
        self._arrived.copy_(sent, non_blocking=True)
        self._placed: Tensor | None = None
        if pool.victims is not None and is_placed:
            self._placed = pool.victims.step_launched()
        self._copied = torch.cuda.current_stream(sent.device).record_event()

    def _count(self, routed: Tensor, batch: AttentionBatch) -> Tensor:
        """Rows per layer and expert; then, unless that is known, the experts that each sequence
        uses in each layer, and those of them that are in slots."""
        experts, device = self.pool.places.shape[1], routed.device
        layers, rows, top_k = routed.shape
        flat = routed.reshape(layers, -1).long()
        ones = torch.ones_like(flat, dtype=torch.int32)
        counts = torch.zeros((layers, experts), dtype=torch.int32, device=device)
        counts.scatter_add_(1, flat, ones)
        if self._sequences == 1 or (self._own and self.pool.bank is None):
            return counts.view(-1)
        numbers = torch.arange(rows, device=device)
        owners = torch.searchsorted(batch.query_starts[1:].long(), numbers, right=True)
        place = owners.repeat_interleave(top_k)[None, :] * experts + flat
        used = torch.zeros((layers, self._sequences * experts), dtype=torch.int32, device=device)
        used.scatter_(1, place, 1)
        each = used.view(layers, self._sequences, experts)
        here = each * (self.pool.tiers == IN_ARENA).int()[:, None, :]
        both = torch.stack((each.sum(2, dtype=torch.int32), here.sum(2, dtype=torch.int32)))
        return torch.cat((counts.view(-1), both.view(-1)))

    def collect(self, since_s: float = 0.0) -> tuple[StepDemands, float]:
        """Waits for the step. Returns what it used, and the seconds since it was enqueued, or
        since `since_s` if that is later."""
        self._copied.synchronize()
        if self.pool.share is not None:
            self.pool.share.check()
        seconds = time.perf_counter() - max(self._started, since_s)
        layers, _, top_k = self._shape
        experts = self.pool.places.shape[1]
        arrived = self._arrived.numpy()
        if self._is_counted:
            rows = arrived[: layers * experts].reshape(layers, experts).astype(np.int64)
        else:
            rows = count_demands(arrived.reshape(self._shape), experts)
        placed = None if self._placed is None else int(self._placed[-1])
        if self._sequences == 1:
            return StepDemands(rows, None, self._phase, placed), seconds
        both = np.full((self._sequences, layers, 2), top_k)
        choices = None if placed is None else arrived.reshape(self._shape)
        if self.pool.bank is not None or not self._own:
            if self._is_counted:
                both = arrived[layers * experts :].reshape(2, layers, -1).T.astype(np.int64)
            else:
                # each row is a sequence
                ids, layer = arrived.reshape(self._shape), np.arange(layers)[:, None, None]
                both[..., 1] = self.pool.experts.on_device[layer, ids].sum(axis=2).T
        return StepDemands(rows, both, self._phase, placed, choices), seconds


def _mask(layer: MoeLayer, geometry: ExpertGeometry) -> None:
    """Limit a gate to the experts that its store has."""
    present = geometry.present(layer.index)
    if len(present) < geometry.top_k:
        raise WeightsError(
            f"layer {layer.index} has {len(present)} experts left, but every token needs "
            f"{geometry.top_k}. Prune less."
        )
    absent = set(range(geometry.num_experts)).difference(present)
    if absent:
        layer.gate.exclude(sorted(absent))


def _owners(batch: AttentionBatch) -> Tensor | None:
    """The sequence of each row, on the CPU; None when there is only one."""
    count = len(batch.context_lens)
    if count == 1:
        return None
    sequences = torch.arange(count, dtype=torch.int32)
    if count == len(batch.positions):
        return sequences
    return sequences.repeat_interleave(batch.query_starts.cpu().diff().long())


class FusedMoeStack:
    """Runs all layers in one native call, while all experts are in memory."""

    def __init__(self, decoder: NativeDecoder, layers: Sequence[MoeLayer], num_layers: int) -> None:
        self._decoder, self._layers, self._num_layers = decoder, layers, num_layers
        self._norms = [_floats(layer.norm) for layer in layers]
        self._top_k = layers[0].gate.rule.top_k
        # the experts that the decoder's layers point to
        self._attached: ResidentExperts | None = None
        self._parts: list[abi.MoePart] = []

    @staticmethod
    def fits(layers: Sequence[MoeLayer]) -> bool:
        """Whether the native layer supports everything in these layers."""
        return all(
            layer.norm is not None
            and layer.shared is None
            and layer.after is operator.add
            and layer.gate.route is not None
            for layer in layers
        )

    def run(
        self,
        hidden: Tensor,
        kv: Sequence[Tensor],
        batches: Sequence[AttentionBatch],
        found: ResidentExperts,
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, D] after the stack, and the gates' choices: int32 [layers, T, K]."""
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

    def _attach(self, found: ResidentExperts) -> None:
        if self._attached is not found:
            self._parts = [
                abi.MoePart(
                    norm.data_ptr(),
                    layer.gate.route,
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


def run_fused(
    fused: FusedMoeStack,
    experts: MoeExperts,
    step: tuple[Tensor, Sequence[Tensor], AttentionBatch],
    owners: Tensor | None,
    chunk_tokens: int,
) -> Tensor | None:
    """Run the whole stack in one call; None when that is not possible now."""
    hidden, kv, batch = step
    found = experts.resident(batch.phase)
    if found is None:
        return None
    begin = time.perf_counter()
    few = len(batch.positions) <= chunk_tokens
    batches = [batch] if few else split_batch(batch, chunk_tokens)
    out, routed = fused.run(hidden, kv, batches, found)
    experts.record_resident_step(found, routed, owners, time.perf_counter() - begin)
    return out


@dataclass(frozen=True, slots=True)
class MoeRequirements:
    """What is needed to open a model's experts."""

    checkpoint: Checkpoint
    moe: MoeSpec
    hidden: int
    # the user's choice; auto is the precision of the file
    dtype: str
    device: str
    # of one full context, reserved before experts
    kv_bytes: int
    # one token in one plane of one layer; planes of all layers
    kv_plane_bytes: int
    kv_planes: int

    def shared_kv(
        self, settings: MoeSettings, own_bytes: int, block_size: int = BLOCK_SIZE
    ) -> tuple[KvBlocks | None, int]:
        """The KV that shares the device's memory with experts, where it does, and what is reserved
        before experts: `own_bytes`, which no expert gets, and what aligns them."""
        from coterie.moe.runtime.slabs import KvBlocks

        if not settings.elastic_memory:
            return None, own_bytes
        cell = self.kv_plane_bytes * block_size
        own = own_bytes // (cell * self.kv_planes)
        kv = KvBlocks(cell, self.kv_planes, block_size, own)
        return kv, kv.nbytes

    def geometry(self) -> ExpertGeometry:
        return _geometry(self.moe)


MoeFactory = Callable[[MoeRequirements], "MoeExperts"]


def _geometry(moe: MoeSpec) -> ExpertGeometry:
    return ExpertGeometry(moe.layers, moe.num_experts, moe.gate_rule.top_k)


def moe_factory(dispatch: MoeSettings | None, own_kv: int | None = None) -> MoeFactory:
    """The usual factory: a store over the checkpoint, and a runtime with these settings. `own_kv`:
    with elastic memory, the bytes that KV always has, by default one full context."""

    def opened(wanted: MoeRequirements) -> MoeExperts:
        from coterie.core.moe import MoeSettings
        from coterie.moe.runtime.runtime import open_experts

        settings = dispatch or MoeSettings()
        store = store_of(wanted, settings.reads)
        kv, nbytes = wanted.shared_kv(settings, wanted.kv_bytes if own_kv is None else own_kv)
        return open_experts(store, settings, device=wanted.device, kv_bytes=nbytes, kv=kv)

    return opened


def store_of(wanted: MoeRequirements, reads: str) -> ExpertStore:
    return open_moe_store(wanted.checkpoint, wanted.moe, wanted.hidden, wanted.dtype, reads)


def open_moe_store(
    checkpoint: Checkpoint, moe: MoeSpec, hidden: int, dtype: str, reads: str = "auto"
) -> ExpertStore:
    """The store of all MoE layers' experts. Reads none of them."""
    from coterie.moe.store.base import ExpertNames
    from coterie.moe.store.checkpoint import open_store

    return open_store(
        checkpoint,
        _geometry(moe),
        ExpertNames(moe.parts),
        dtype,
        reads,
        hidden=hidden,
        intermediate=moe.intermediate,
        gated=moe.gated,
    )
