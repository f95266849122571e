"""The planner's inputs for one model: sizes, KV and budgets, found without loading any weights.

Only this module knows a checkpoint, its store and the planner's values.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from coterie.models.weight_sizes import matrix_bytes
from coterie.moe.planner import machine as machine_file
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import BackboneTimes, MeasurementMark
from coterie.moe.planner.measure import (
    ComputeTarget,
    SyntheticResidents,
    disturbed_notice,
    ensure_measured,
    profile_name,
)
from coterie.moe.planner.plan import MemoryDivision, PlanCase, PlannedModel, divisions
from coterie.moe.planner.timing import MachineUse, TimedWork, time_together
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

    @property
    def backbone_bytes(self) -> int:
        """In memory: every matrix except the routed experts and an embedding that is not the
        head, of which a step reads some rows."""
        without = set(self.store.tensors())
        if not self.spec.tied:
            without |= {name for name in self.checkpoint.names() if "embed_tokens" in name}
        given = self.checkpoint, self.dtype, self.device
        return matrix_bytes(*given, tied=self.spec.tied, without=without)

    def planned_model(self, context: int = 0) -> PlannedModel:
        kept_as = stored_dtype(self.checkpoint, self.device) if self.dtype == "auto" else self.dtype
        return PlannedModel(
            geometry=self.store.geometry,
            sizes=sizes_of(self.store),
            backbone_bytes=self.backbone_bytes,
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
        size = self.backbone_bytes
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
        return self._stored(
            known.with_backbone(self.profile_name, *self._measure_backbone(known)), say
        )

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
        use = MachineUse()
        path = plan_device.measure_device_path(opener, known.device_bytes_s)
        mark = MeasurementMark(time.time(), {}, use.reason())
        return self._stored(known.with_device_path(name, path, mark), say)

    def _stored(self, made: Machine, say: Say | None) -> Machine:
        """In the file, unless a sound measurement is there and this one was disturbed."""
        kept, name = machine_file.store(made), self.profile_name
        if say is not None and (reason := made.disturbed(name)):
            say(disturbed_notice(reason, kept.disturbed(name)))
        return kept

    def _measure_backbone(self, machine: Machine) -> tuple[BackboneTimes, MeasurementMark]:
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


ROWS = (1, 16, 128)
CONTEXT = 192
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
        # when a layer's experts began and ended: what lies between two is the backbone's
        self.times: list[float] = []
        self._bank = torch.empty(0)
        self._next = 0
        # records in the place of all experts, and what the gates chose in the last step
        self.residents: SyntheticResidents | None = None
        self.routed: Tensor | None = None

    def run(self, step: ExpertStep) -> Tensor:
        self.times.append(time.perf_counter())
        if self.layer_bytes and not step.hidden.is_cuda:
            self._read(self.layer_bytes // 4)
        self.times.append(time.perf_counter())
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


def measure_backbone(
    model: CausalLM, store: ExpertStore, expert: CostCurve
) -> tuple[BackboneTimes, MeasurementMark]:
    """Seconds of a step by rows, with a context of a few hundred tokens. `expert`: seconds of one
    expert by its rows."""
    experts = model.experts
    assert isinstance(experts, NoExperts)
    # the bytes that a token's experts read per layer
    layer_bytes = store.geometry.top_k * store.slot_bytes
    rows = tuple(count for count in ROWS if count <= model.spec.max_positions // 2)
    steps = {f"walk {count}": _WalkedStep(model, count, layer_bytes) for count in rows}
    works = {name: step.work() for name, step in steps.items()}
    one_call = _OneCallStep(model, SyntheticResidents(store), expert)
    if model.device.type == "cpu":
        works["one call"] = one_call.work()
    report = time_together(works)
    spread = max(each.spread for each in report.timings.values())
    mark = MeasurementMark(time.time(), {"backbone": spread}, report.reason(works))
    by_layer = CostCurve(rows, tuple(report.seconds(f"walk {count}") for count in rows))
    if not one_call.was_called:
        # the model cannot run all layers in one call
        return BackboneTimes(by_layer), mark
    one_call_s = max(0.0, report.seconds("one call") - one_call.experts_s)
    # one call saves the overhead of each layer, which does not grow with rows
    saved_s = by_layer.seconds[0] - one_call_s
    seconds = tuple(max(one_call_s, s - saved_s) for s in by_layer.seconds)
    return BackboneTimes(by_layer, CostCurve(by_layer.rows, seconds)), mark


class _WalkedStep:
    """A step of so many rows layer by layer, always behind the same context."""

    def __init__(self, model: CausalLM, rows: int, layer_bytes: int) -> None:
        assert isinstance(model.experts, NoExperts)
        self.experts, self._rows, self._layer_bytes = model.experts, rows, layer_bytes
        self._before = min(CONTEXT, model.spec.max_positions // 2)
        self._run = SingleSequenceRun(model, max_tokens=self._before + rows)
        self._draw = random.Random(rows)
        self._take(self._before, "prefill")

    def _take(self, rows: int, phase: str) -> None:
        vocab = self._run.model.spec.vocab
        self._run.step([self._draw.randrange(vocab) for _ in range(rows)], phase)

    def step(self) -> None:
        self._run.length = self._before
        self._take(self._rows, "decode" if self._rows == 1 else "prefill")

    def _parts(self) -> Sequence[float]:
        """Those before, between and after the layers' experts."""
        experts = self.experts
        experts.residents, experts.times, experts.layer_bytes = None, [], self._layer_bytes
        started = time.perf_counter()
        self.step()
        times = [started, *experts.times, time.perf_counter()]
        return [end - begin for begin, end in zip(times[::2], times[1::2], strict=True)]

    def _on_one(self) -> None:
        self.experts.residents, self.experts.layer_bytes = None, 0
        with _one_thread():
            self.step()

    def work(self) -> TimedWork:
        return TimedWork(self._parts, threads=torch.get_num_threads(), on_one=self._on_one)


class _OneCallStep(_WalkedStep):
    """A decode step that runs all layers in one call, where the model can. Its experts' time is
    estimated as in a plan."""

    def __init__(self, model: CausalLM, residents: SyntheticResidents, expert: CostCurve) -> None:
        super().__init__(model, 1, 0)
        self._residents, self._expert = residents, expert
        self._experts_s: list[float] = []

    def _ready(self) -> None:
        self._residents.rotate()
        self.experts.residents, self.experts.routed = self._residents, None

    def _count(self) -> Sequence[float]:
        started = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - started
        if self.experts.routed is not None:
            demands = count_demands(self.experts.routed.numpy(), self.experts.geometry.num_experts)
            self._experts_s.append(sum(self._expert.at(int(n)) for n in demands[demands > 0]))
        return (seconds,)

    def _alone(self) -> None:
        with _one_thread():
            self.step()

    @property
    def was_called(self) -> bool:
        return bool(self._experts_s)

    @property
    def experts_s(self) -> float:
        return statistics.median(self._experts_s)

    def work(self) -> TimedWork:
        self._ready()
        threads = torch.get_num_threads()
        return TimedWork(self._count, prepare=self._ready, threads=threads, on_one=self._alone)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
