"""A model as a planner sees it: sizes, KV and budgets, found without loading any weights.

The one place where a checkpoint, its store and the planner's values meet.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.core.moe import MoeUsage
from coterie.kernels.batch import AttentionBatch
from coterie.models.base import kv_bytes_per_token, load_model, read_spec, stored_dtype
from coterie.models.build.moe import open_moe_store
from coterie.moe.planner import machine as kept
from coterie.moe.planner.machine import BackboneTimes, CostCurve
from coterie.moe.planner.measure import (
    ComputeTarget,
    SyntheticResidents,
    ensure_measured,
    profile_name,
)
from coterie.moe.planner.plan import MemoryDivision, PlanCase, PlannedModel, divisions
from coterie.moe.planner.workload import (
    Workload,
    assumed_workload,
    workload_from_heatmap,
    workload_from_trace,
)
from coterie.moe.runtime.resident import count_demands
from coterie.moe.runtime.setup import PlacementContext, needs_of, sizes_of

if TYPE_CHECKING:
    from pathlib import Path

    from coterie.core.moe import MoeSettings
    from coterie.models.base import CausalLM
    from coterie.models.build.moe import MoeRequirements
    from coterie.models.spec import ModelSpec
    from coterie.moe.planner.machine import BackboneTimes, Machine
    from coterie.moe.planner.measure import Say
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.runtime.resident import ResidentExperts
    from coterie.moe.runtime.step import ExpertStep
    from coterie.moe.store.base import ExpertGeometry, ExpertStore
    from coterie.weights.checkpoint import Checkpoint

# a larger backbone is not loaded for a plan: its pace is estimated from its bytes
CHEAP_BYTES = 1_500_000_000
# how long that takes, roughly: told to whoever waits
LEAST_S, LOAD_BYTES_S = 2.0, 4e8


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """`context` 0 = the model's own."""

    checkpoint: Checkpoint
    spec: ModelSpec
    dtype: str
    device: str
    store: ExpertStore

    @property
    def place(self) -> ComputeTarget:
        return ComputeTarget(self.device, torch.get_num_threads())

    def subject(self, context: int = 0) -> PlannedModel:
        kept_as = stored_dtype(self.checkpoint) if self.dtype == "auto" else self.dtype
        return PlannedModel(
            geometry=self.store.geometry,
            sizes=sizes_of(self.store),
            backbone_bytes=backbone_bytes(self.checkpoint, self.spec, self.store),
            kv_token_bytes=kv_bytes_per_token(self.spec, kept_as),
            context=min(context or self.spec.max_positions, self.spec.max_positions),
        )

    def ways(self, settings: MoeSettings, kv_bytes: int) -> list[MemoryDivision]:
        site = PlacementContext(torch.device(self.device), kv_bytes)
        return divisions(settings, needs_of((), site))

    def machine(self, *, again: bool = False, say: Say | None = None) -> Machine:
        """Measured once, then kept; with the pace of this model's backbone where that is cheap."""
        size = backbone_bytes(self.checkpoint, self.spec, self.store)
        cheap = size <= CHEAP_BYTES
        more_s = (LEAST_S + size / LOAD_BYTES_S) if cheap else 0.0
        told = []

        def tell(text: str) -> None:
            told.append(text)
            if say is not None and len(told) == 1:
                say(text)

        known = ensure_measured(self.store, self.place, again=again, say=tell, more_s=more_s)
        if not cheap or (self.profile_name in known.backbones and not again):
            return known
        tell(f"measuring this model's attention, once, about {more_s:.0f} s")
        known = known.with_backbone(self.profile_name, self._pace(known))
        kept.save(known)
        return known

    def _pace(self, machine: Machine) -> BackboneTimes:
        model = load_backbone(self.checkpoint, self.dtype, self.device)
        try:
            return measure_backbone(model, self.store, machine.profiles[self.profile_name].host)
        finally:
            model.close()

    @property
    def profile_name(self) -> str:
        return profile_name(self.store, self.place)

    def case(self, machine: Machine, load: Workload, context: int = 0) -> PlanCase:
        pace = machine.backbones.get(self.profile_name)
        subject = replace(self.subject(context), backbone=pace)
        return PlanCase(subject, machine, self.profile_name, load)

    def workload(self, trace: Path | None, heatmap: Heatmap | None) -> Workload:
        from coterie.moe.runtime.trace import Trace

        geometry = self.store.geometry
        if trace is not None:
            recorded = Trace.load(trace, geometry, fingerprint=self.store.fingerprint)
            return workload_from_trace(recorded, f"recorded trace {trace.name}", heatmap)
        if heatmap is not None and heatmap.total() > 0:
            return workload_from_heatmap(heatmap, "drawn from the recorded heatmap")
        return assumed_workload(geometry)


def open_plan_inputs(
    checkpoint: Checkpoint, dtype: str, device: str, reads: str = "auto"
) -> PlanInputs:
    """Opens the store, reads no expert."""
    spec = read_spec(checkpoint)
    if spec.moe is None:
        raise ConfigError(f"{checkpoint.path}: {spec.architecture} has no experts to plan for")
    store = open_moe_store(checkpoint, spec.moe, spec.hidden, dtype, reads)
    return PlanInputs(checkpoint, spec, dtype, device, store)


def backbone_bytes(checkpoint: Checkpoint, spec: ModelSpec, store: ExpertStore) -> int:
    """As stored: every tensor but the routed experts and an embedding that is not also the head."""
    experts = store.tensors()
    return sum(
        checkpoint.extent(name).nbytes
        for name in checkpoint.names()
        if name not in experts and (spec.tied or "embed_tokens" not in name)
    )


ROWS = (1, 16, 128)
_BLOCK = 16
# past every cache
_BANK_BYTES = 128 << 20


class NoExperts:
    """In the experts' place: every layer answers zeros at once."""

    wants_hints = False

    def __init__(self, geometry: ExpertGeometry) -> None:
        self.geometry = geometry
        # bytes that experts would read per layer: they push the backbone out of caches
        self.layer_bytes = 0
        # spent on reading those, which is not the backbone's
        self.away_s = 0.0
        self._bank = torch.empty(0)
        self._next = 0
        # as if all experts were in memory, and what the last step asked of them
        self.stock: SyntheticResidents | None = None
        self.routed: Tensor | None = None

    def run(self, step: ExpertStep) -> Tensor:
        if self.layer_bytes and not step.hidden.is_cuda:
            began = time.perf_counter()
            self._read(self.layer_bytes // 4)
            self.away_s += time.perf_counter() - began
        return torch.zeros_like(step.hidden)

    def _read(self, count: int) -> None:
        if not len(self._bank):
            self._bank = torch.ones(max(_BANK_BYTES // 4, count))
        if self._next + count > len(self._bank):
            self._next = 0
        self._bank[self._next : self._next + count].sum()
        self._next += count

    def resident(self, phase: str) -> ResidentExperts | None:
        return self.stock.resident if self.stock is not None else None

    def record_resident_step(
        self, found: ResidentExperts, routed: Tensor, owners: Tensor | None, seconds: float
    ) -> None:
        self.routed = routed

    def groups(self, phase: str) -> tuple[tuple[int, ...], ...] | None:
        return None

    def load_group(self, index: int) -> None:
        """There is nothing to load."""

    def hint(self, layer: int, predicted: Tensor) -> None:
        """There is nothing to prepare."""

    def end_step(self) -> tuple[MoeUsage, list[MoeUsage]]:
        return MoeUsage(), [MoeUsage()]

    def update(self) -> tuple[int, int]:
        """There is nothing to rearrange."""
        return 0, 0

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """There is nothing to give back."""


class SingleSequenceRun:
    """One sequence over its own cache, without an engine."""

    def __init__(self, model: CausalLM, max_tokens: int) -> None:
        self.model, self.length = model, 0
        blocks = -(-max_tokens // _BLOCK)
        self._tables = torch.arange(blocks, dtype=torch.int32)[None].to(model.device)
        self._kv = model.new_kv(blocks, _BLOCK)

    def step(self, tokens: Sequence[int], phase: str) -> float:
        """Seconds of one forward pass over `tokens`, to the last row's logits."""
        device, count = self.model.device, len(tokens)
        where = torch.arange(self.length, self.length + count)
        self.length += count
        batch = AttentionBatch(
            positions=where.to(device),
            slots=where.to(device),
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            context_lens=torch.tensor([self.length], dtype=torch.int32, device=device),
            block_tables=self._tables,
            block_size=_BLOCK,
            phase=phase,
        )
        ids = torch.tensor(tokens, device=device)
        began = time.perf_counter()
        logits = self.model.forward(ids, batch, self._kv, torch.tensor([count - 1], device=device))
        logits.argmax(-1).item()
        return time.perf_counter() - began


def load_backbone(checkpoint: Checkpoint, dtype: str, device: str) -> CausalLM:
    """The model with nothing in its experts' place."""

    def none(wanted: MoeRequirements) -> NoExperts:
        return NoExperts(wanted.geometry())

    return load_model(checkpoint, dtype=dtype, device=device, experts=none)


def measure_backbone(model: CausalLM, store: ExpertStore, expert: CostCurve) -> BackboneTimes:
    """Steps by rows; the context is a few hundred tokens long. `expert`: seconds by its rows."""
    experts = model.experts
    assert isinstance(experts, NoExperts)
    # what a token's experts read per layer
    experts.layer_bytes = store.geometry.top_k * store.slot_bytes
    rows = tuple(count for count in ROWS if count <= model.spec.max_positions // 2)
    walk = CostCurve(rows, tuple(_of_rows(model, count, _walk_s) for count in rows))
    if model.device.type != "cpu":
        return BackboneTimes(walk)
    experts.stock = SyntheticResidents(store)
    ride_s = _of_rows(model, 1, partial(_ride_s, expert))
    if experts.routed is None:
        # never asked: the model has no such road
        return BackboneTimes(walk)
    # what is saved is the walk's own time, which does not grow with rows
    saved_s = walk.seconds[0] - ride_s
    return BackboneTimes(
        walk, CostCurve(walk.rows, tuple(max(ride_s, s - saved_s) for s in walk.seconds))
    )


def _of_rows(
    model: CausalLM, rows: int, step_s: Callable[[SingleSequenceRun, Sequence[int], str], float]
) -> float:
    repeats = {1: 16, 16: 5}.get(rows, 2)
    solo = SingleSequenceRun(model, max_tokens=rows * (repeats + 1) + 64)
    phase = "decode" if rows == 1 else "prefill"
    draw = random.Random(rows)
    times = []
    for _ in range(repeats + 1):
        times.append(step_s(solo, [draw.randrange(model.spec.vocab) for _ in range(rows)], phase))
    # the first warms up; the lower quartile: a neighbour's work is not this model's pace
    return sorted(times[1:])[(repeats - 1) // 4]


def _walk_s(solo: SingleSequenceRun, tokens: Sequence[int], phase: str) -> float:
    experts = solo.model.experts
    assert isinstance(experts, NoExperts)
    before = experts.away_s
    return solo.step(tokens, phase) - (experts.away_s - before)


def _ride_s(expert: CostCurve, solo: SingleSequenceRun, tokens: Sequence[int], phase: str) -> float:
    """What a step takes beside its experts, each of which is priced as a plan does."""
    experts = solo.model.experts
    assert isinstance(experts, NoExperts) and experts.stock is not None
    experts.stock.turn()
    seconds = solo.step(tokens, phase)
    if experts.routed is None:
        return seconds
    rows = count_demands(experts.routed.numpy(), experts.geometry.num_experts)
    return max(0.0, seconds - sum(expert.at(int(count)) for count in rows[rows > 0]))
