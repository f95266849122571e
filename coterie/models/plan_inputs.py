"""The planner's inputs for one model: sizes, KV and budgets, found without loading any weights.

Only this module knows a checkpoint, its store and the planner's values.
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
from coterie.kernels.backend import best_backend
from coterie.kernels.batch import AttentionBatch
from coterie.models import plan_device
from coterie.models.base import kv_bytes_per_token, load_model, read_spec, stored_dtype
from coterie.models.build.moe import open_moe_store
from coterie.moe.planner import machine as machine_file
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import BackboneTimes
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
from coterie.moe.runtime.budget import graph_room
from coterie.moe.runtime.host_bank import has_device_records
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
    from coterie.moe.runtime.device_pool import ResidentExperts
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.runtime.memory_trade import MemoryTrade
    from coterie.moe.runtime.resident import StepDemands
    from coterie.moe.runtime.step import ExpertStep
    from coterie.moe.store.base import ExpertGeometry, ExpertStore
    from coterie.weights.checkpoint import Checkpoint

# a larger backbone is not loaded for a plan: its speed is estimated from its bytes
CHEAP_BYTES = 1_500_000_000
# roughly the time that loading takes, for the message to the user
LEAST_S, LOAD_BYTES_S = 2.0, 4e8


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """A `context` of 0 is the model's own."""

    checkpoint: Checkpoint
    spec: ModelSpec
    dtype: str
    device: str
    store: ExpertStore

    @property
    def target(self) -> ComputeTarget:
        return ComputeTarget(self.device, torch.get_num_threads())

    def planned_model(self, context: int = 0) -> PlannedModel:
        kept_as = stored_dtype(self.checkpoint) if self.dtype == "auto" else self.dtype
        return PlannedModel(
            geometry=self.store.geometry,
            sizes=sizes_of(self.store),
            backbone_bytes=backbone_bytes(self.checkpoint, self.spec, self.store),
            kv_token_bytes=kv_bytes_per_token(self.spec, kept_as),
            context=min(context or self.spec.max_positions, self.spec.max_positions),
            kind=self.store.layout(self.store.geometry.layers[0]).kinds[0],
        )

    def memory_divisions(
        self, settings: MoeSettings, kv_bytes: int, graph_bytes: int = 0
    ) -> list[MemoryDivision]:
        """`graph_bytes`: reserved for captured graphs where all experts fit beside them."""
        needs = needs_of((), PlacementContext(torch.device(self.device), kv_bytes))
        room = graph_room(settings, sizes_of(self.store), needs, graph_bytes)
        return divisions(settings, replace(needs, graph_bytes=room))

    def machine(self, *, again: bool = False, say: Say | None = None) -> Machine:
        """Measured once, then stored; with the times of this model's backbone where measuring them
        is cheap."""
        if self.reads_in_place:
            return self._device_machine(again, say)
        size = backbone_bytes(self.checkpoint, self.spec, self.store)
        cheap = size <= CHEAP_BYTES
        more_s = (LEAST_S + size / LOAD_BYTES_S) if cheap else 0.0
        said = []

        def say_once(text: str) -> None:
            said.append(text)
            if say is not None and len(said) == 1:
                say(text)

        known = ensure_measured(self.store, self.target, again=again, say=say_once, more_s=more_s)
        if not cheap or (self.profile_name in known.backbones and not again):
            return known
        say_once(f"measuring this model's attention, once, about {more_s:.0f} s")
        known = known.with_backbone(self.profile_name, self._measure_backbone(known))
        machine_file.save(known)
        return known

    @property
    def reads_in_place(self) -> bool:
        """Whether a GPU's kernels can read these experts, on the device or in RAM."""
        return best_backend(self.device) == "triton" and has_device_records(self.store)

    def _device_machine(self, again: bool, say: Say | None) -> Machine:
        """The same for a GPU; the first layers of this model are measured, with its backbone."""
        name = self.profile_name
        known = ensure_measured(
            self.store, self.target, again=again, say=say, more_s=plan_device.SECONDS
        )
        if name in known.device_paths and not again:
            return known
        assert self.spec.moe is not None
        opener = plan_device.slice_opener(
            self.checkpoint, self.spec.moe, self.store, self.dtype, self.device
        )
        path = plan_device.measure_device_path(opener, known.device_bytes_s)
        known = known.with_device_path(name, path)
        machine_file.save(known)
        return known

    def _measure_backbone(self, machine: Machine) -> BackboneTimes:
        model = load_backbone(self.checkpoint, self.dtype, self.device)
        try:
            return measure_backbone(model, self.store, machine.profiles[self.profile_name].host)
        finally:
            model.close()

    @property
    def profile_name(self) -> str:
        return profile_name(self.store, self.target)

    def case(self, machine: Machine, load: Workload, context: int = 0) -> PlanCase:
        times = machine.backbones.get(self.profile_name)
        model = replace(self.planned_model(context), backbone=times)
        return PlanCase(model, machine, self.profile_name, load)

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
    """As stored: every tensor except the routed experts and an embedding that is not the head."""
    experts = store.tensors()
    return sum(
        checkpoint.extent(name).nbytes
        for name in checkpoint.names()
        if name not in experts and (spec.tied or "embed_tokens" not in name)
    )


ROWS = (1, 16, 128)
_BLOCK = 16
# larger than every cache
_BANK_BYTES = 128 << 20


class NoExperts:
    """Replaces the experts: every layer returns zeros at once."""

    wants_hints = False

    def __init__(self, geometry: ExpertGeometry) -> None:
        self.geometry = geometry
        self.trade: MemoryTrade | None = None
        # bytes that experts would read per layer: they evict the backbone from caches
        self.layer_bytes = 0
        # seconds of reading those bytes, which do not belong to the backbone
        self.read_s = 0.0
        self._bank = torch.empty(0)
        self._next = 0
        # records in the place of all experts, and what the gates chose in the last step
        self.residents: SyntheticResidents | None = None
        self.routed: Tensor | None = None

    def run(self, step: ExpertStep) -> Tensor:
        if self.layer_bytes and not step.hidden.is_cuda:
            started = time.perf_counter()
            self._read(self.layer_bytes // 4)
            self.read_s += time.perf_counter() - started
        return torch.zeros_like(step.hidden)

    def _read(self, count: int) -> None:
        if not len(self._bank):
            self._bank = torch.ones(max(_BANK_BYTES // 4, count))
        if self._next + count > len(self._bank):
            self._next = 0
        self._bank[self._next : self._next + count].sum()
        self._next += count

    def resident(self, phase: str) -> ResidentExperts | None:
        return self.residents.resident if self.residents is not None else None

    def device_pool(self) -> None:
        """The planner measures the CPU only."""

    def loading_pool(self) -> None:
        """The same."""

    def prompt_pool(self, rows: int) -> None:
        """The same."""

    def launched(self, copies: bool) -> None: ...

    moves_beside_steps = False

    def record_device_step(
        self, found: ResidentExperts, demands: StepDemands, s: float
    ) -> None: ...

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
        """There is nothing to release."""


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
        started = time.perf_counter()
        logits = self.model.forward(ids, batch, self._kv, torch.tensor([count - 1], device=device))
        logits.argmax(-1).item()
        return time.perf_counter() - started


def load_backbone(checkpoint: Checkpoint, dtype: str, device: str) -> CausalLM:
    """The model without its experts."""

    def none(wanted: MoeRequirements) -> NoExperts:
        return NoExperts(wanted.geometry())

    return load_model(checkpoint, dtype=dtype, device=device, experts=none)


def measure_backbone(model: CausalLM, store: ExpertStore, expert: CostCurve) -> BackboneTimes:
    """Seconds of a step by rows, with a context of a few hundred tokens. `expert`: seconds of one
    expert by its rows."""
    experts = model.experts
    assert isinstance(experts, NoExperts)
    # the bytes that a token's experts read per layer
    experts.layer_bytes = store.geometry.top_k * store.slot_bytes
    rows = tuple(count for count in ROWS if count <= model.spec.max_positions // 2)
    by_layer = CostCurve(rows, tuple(_of_rows(model, count, _by_layer_s) for count in rows))
    if model.device.type != "cpu":
        return BackboneTimes(by_layer)
    experts.residents = SyntheticResidents(store)
    one_call_s = _of_rows(model, 1, partial(_one_call_s, expert))
    if experts.routed is None:
        # not called: the model cannot run all layers in one call
        return BackboneTimes(by_layer)
    # one call saves the overhead of each layer, which does not grow with rows
    saved_s = by_layer.seconds[0] - one_call_s
    seconds = tuple(max(one_call_s, s - saved_s) for s in by_layer.seconds)
    return BackboneTimes(by_layer, CostCurve(by_layer.rows, seconds))


def _of_rows(
    model: CausalLM, rows: int, step_s: Callable[[SingleSequenceRun, Sequence[int], str], float]
) -> float:
    repeats = {1: 16, 16: 5}.get(rows, 2)
    run = SingleSequenceRun(model, max_tokens=rows * (repeats + 1) + 64)
    phase = "decode" if rows == 1 else "prefill"
    draw = random.Random(rows)
    times = []
    for _ in range(repeats + 1):
        times.append(step_s(run, [draw.randrange(model.spec.vocab) for _ in range(rows)], phase))
    # the first warms up; the lower quartile, as other processes make some times too long
    return sorted(times[1:])[(repeats - 1) // 4]


def _by_layer_s(run: SingleSequenceRun, tokens: Sequence[int], phase: str) -> float:
    experts = run.model.experts
    assert isinstance(experts, NoExperts)
    before = experts.read_s
    return run.step(tokens, phase) - (experts.read_s - before)


def _one_call_s(
    expert: CostCurve, run: SingleSequenceRun, tokens: Sequence[int], phase: str
) -> float:
    """The seconds of a step without its experts, whose time is estimated as in a plan."""
    experts = run.model.experts
    assert isinstance(experts, NoExperts) and experts.residents is not None
    experts.residents.rotate()
    seconds = run.step(tokens, phase)
    if experts.routed is None:
        return seconds
    rows = count_demands(experts.routed.numpy(), experts.geometry.num_experts)
    return max(0.0, seconds - sum(expert.at(int(count)) for count in rows[rows > 0]))
