"""Makes a running engine from a `WorkerSpec`: weights, tokenizer, threads, KV budget, lanes.

No other module reads a checkpoint for serving.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from coterie.adapters.files import AdapterLibrary
from coterie.adapters.pool import AdapterPool
from coterie.adapters.residency import AdapterSlab
from coterie.core.errors import ConfigError, CoterieError
from coterie.core.lane import BLOCK_SIZE, LaneConfig
from coterie.core.moe import AUTOMATIC, MoeResidency, MoeSettings
from coterie.core.sampling import GENERATION_FIELDS
from coterie.engine.engine import Engine
from coterie.kernels.batch import KINDS
from coterie.models.base import (
    CausalLM,
    ModelSpec,
    kv_bytes_per_token,
    load_model,
    read_spec,
    stored_dtype,
)
from coterie.models.build.cuda_graph import PROMPTS, captured_sizes
from coterie.models.build.graph_memory import GraphMemory, estimate_graph_bytes
from coterie.models.build.mixed_graph import mixed_sizes
from coterie.models.build.moe import MoeRequirements, store_of
from coterie.models.build.piece_graph import piece_sizes
from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from coterie.moe.runtime.budget import TierNeeds, free_host_bytes, graph_room
from coterie.obs.log import log
from coterie.weights.checkpoint import Checkpoint, GGUFCheckpoint, open_checkpoint
from coterie.weights.shortage import is_shortage, started
from coterie.workers import memory
from coterie.workers.contract import (
    AdapterInfo,
    AdapterLoad,
    MoeInfo,
    ReplicaInfo,
    WorkerSpec,
)
from coterie.workers.device import device_of, use_threads
from coterie.workers.warmup import SAVE_EVERY_S, HeatmapFile, heatmap_path, refine

if TYPE_CHECKING:
    from coterie.core.plan import AdapterChoice
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.runtime.runtime import ExpertRuntime
    from coterie.moe.runtime.trace import Trace
    from coterie.moe.store.base import ExpertGeometry, ExpertStore

# generation_config keys that affect requests; the others are not sent to the gateway
GENERATION_KEYS = (*GENERATION_FIELDS, "eos_token_id")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class EngineHost:
    engine: Engine
    tokenizer: Tokenizer
    info: ReplicaInfo
    experts: MoeHost | None = None
    adapters: AdapterHost | None = None

    def save_if_due(self) -> None:
        """Save the heatmap if it is time. Called between steps."""
        if self.experts is not None:
            self.experts.save_if_due()

    def moe_report(self) -> dict[str, Any] | None:
        runtime = None if self.experts is None else self.experts.runtime
        return None if runtime is None else runtime.report()

    def residency(self) -> tuple[MoeResidency, ...]:
        """Where the experts are; empty if there are none to show."""
        found = None if self.experts is None else self.experts.residency()
        return () if found is None else (found,)

    def close(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        if self.experts is not None:
            self.experts.close()


def build_engine(spec: WorkerSpec, progress: Progress | None = None) -> EngineHost:
    try:
        return _build(spec, progress)
    except Exception as problem:
        if not is_shortage(problem):
            raise
        raise ConfigError(
            f"not enough memory to load {Path(spec.model).name}: {problem}; lower "
            "engine.kv_bytes, the context, or the experts' budgets",
            param="engine.kv_bytes",
        ) from problem


def _build(spec: WorkerSpec, progress: Progress | None) -> EngineHost:
    device = device_of(spec.device)
    threads = spec.threads or memory.cores()
    use_threads(threads)
    checkpoint = open_checkpoint(Path(spec.model))
    contexts = [lane.context for lane in spec.lanes]
    context = max(contexts) if all(contexts) else None
    shape = read_spec(checkpoint, context)
    _refuse_dense(shape, spec.dispatch)
    kv_bytes = spec.kv_bytes
    room = reserve_adapters(spec, device)
    graph_bytes = _graph_bytes(spec, shape, checkpoint, device)
    experts = None
    if shape.moe is not None:
        # size the KV cache before the experts, which take the remaining memory
        kv_bytes = kv_bytes or _moe_kv_bytes(spec, shape, checkpoint, device)
        experts = MoeHost(Path(spec.model), spec.dispatch, kv_bytes, graph_bytes)
        experts.block_size = _elastic_block_size(spec)
    reading = _TokenizerReading(Path(spec.model), checkpoint)
    model = load_model(
        checkpoint,
        dtype=spec.dtype,
        device=device,
        max_context=context,
        progress=progress,
        experts=experts.open if experts is not None else None,
    )
    adapters = None
    try:
        adapters = None if room is None else room.open(model)
        graphs = model.limit_graphs(graph_bytes)
        kv_bytes = kv_bytes or _auto_kv_bytes(spec, model, 0 if graphs is None else graph_bytes)
        parts = EngineResources(threads, experts, adapters, graphs)
        return _host(spec, checkpoint, model, kv_bytes, reading.result(), parts)
    except BaseException:
        if adapters is not None:
            adapters.close()
        model.close()
        raise


class _TokenizerReading:
    """Reads a tokenizer on a thread, while the weights are packed."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self._path = path
        self._header = checkpoint.take_header() if isinstance(checkpoint, GGUFCheckpoint) else None
        self._found: Future[Tokenizer] = Future()
        started(self._read, "tokenizer", 1, is_awaited=True)

    def result(self) -> Tokenizer:
        return self._found.result()

    def _read(self) -> None:
        header, self._header = self._header, None
        try:
            self._found.set_result(load_tokenizer(self._path, header))
        except BaseException as error:
            self._found.set_exception(error)


def _elastic_block_size(spec: WorkerSpec) -> int:
    """Of the lane whose KV shares memory with experts, if one does. Refuses several."""
    if spec.dispatch.elastic_memory and len(spec.lanes) > 1:
        names = ", ".join(lane.name for lane in spec.lanes)
        raise ConfigError(
            f"elastic_memory serves one specialist of an engine, not {names}: give each its own "
            "model, or leave it out",
            param="elastic_memory",
        )
    return spec.lanes[0].block_size


class EngineResources(NamedTuple):
    """What an engine needs in addition to its model."""

    threads: int
    experts: MoeHost | None
    adapters: AdapterHost | None
    graphs: GraphMemory | None


def _host(
    spec: WorkerSpec,
    checkpoint: Checkpoint,
    model: CausalLM,
    kv_bytes: int,
    tokenizer: Tokenizer,
    parts: EngineResources,
) -> EngineHost:
    threads, experts, adapters, graphs = parts
    whole_prompts = experts is not None and experts.walks_groups
    kind, copies = model.device.type, model.copies_experts
    wanted = tuple(lane.for_device(kind, copies) for lane in spec.lanes)
    model.chunk_tokens = max(lane.max_step_tokens for lane in wanted)
    lanes = plan_lanes(wanted, model, kv_bytes, whole_prompts)
    engine = Engine(
        model,
        tokenizer,
        lanes,
        replica=spec.name,
        adapters=None if adapters is None else adapters.pool,
        batching=spec.adapters.batching,
    )
    if experts is not None:
        experts.refine(engine, tokenizer, lanes[0])
    if graphs is not None:
        engine.graph_stats = graphs.stats
        if spec.capture_graphs == "start":
            engine.capture(CaptureProgress(spec.name))
    info = ReplicaInfo(
        name=spec.name,
        pid=os.getpid(),
        architecture=model.spec.architecture,
        dtype=model.dtype,
        device=str(model.device),
        threads=threads,
        weight_bytes=model.weight_bytes,
        kv_bytes=_own_kv_bytes(lanes, model),
        fingerprint=checkpoint.fingerprint(),
        contexts={lane.name: lane.context for lane in lanes},
        max_sequences={lane.name: lane.max_sequences for lane in lanes},
        generation=_generation(checkpoint.generation),
        kv_budget=kv_bytes,
        experts=None if experts is None else experts.facts(),
        adapters=None if adapters is None else adapters.facts,
        graph_bytes=0 if graphs is None else graphs.reserved or 0,
        block_bytes={lane.name: _block_bytes(lane, model) for lane in lanes},
        processor=_processor(model),
    )
    return EngineHost(engine, tokenizer, info, experts, adapters)


def _processor(model: CausalLM) -> str:
    if model.device.type != "cuda":
        return memory.cpu_name()
    return f"{memory.cpu_name()}, {torch.cuda.get_device_name(model.device)}"


class CaptureProgress:
    """Logs how many graphs are captured, at the start and every few seconds."""

    INTERVAL_S = 3.0

    def __init__(self, replica: str) -> None:
        self._replica, self._logged_at = replica, 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._logged_at >= self.INTERVAL_S:
            self._logged_at = now
            log("capturing_graphs", replica=self._replica, reason=f"{done} of {total}")


def _graph_bytes(spec: WorkerSpec, shape: ModelSpec, checkpoint: Checkpoint, device: str) -> int:
    """Reserved for captured graphs; 0 where nothing is captured."""
    if spec.capture_graphs == "off":
        return 0
    adapters = bool(spec.library and spec.adapters.device_bytes)
    return graph_reserve(shape, checkpoint, spec.dtype, device, spec.lanes, adapters)


def graph_reserve(
    shape: ModelSpec,
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    lanes: Sequence[LaneConfig],
    adapters: bool,
) -> int:
    """The bytes that an engine on this device reserves for captured graphs, if it captures any."""
    if not device.startswith("cuda"):
        return 0
    kept = stored_dtype(checkpoint, device) if dtype == "auto" else dtype
    given = [lane.for_device("cuda") for lane in lanes]
    sequences = max(lane.max_sequences for lane in given)
    longest = max(lane.max_step_tokens for lane in given)
    stored = sum(checkpoint.extent(name).nbytes for name in checkpoint.names())
    mixes = mixed_sizes(shape, kept, stored, longest, sequences)
    mixes += piece_sizes(shape, longest)
    prompt, kinds = min(PROMPTS[-1], longest), 1 + adapters * len(KINDS)
    each = estimate_graph_bytes(shape, kept, captured_sizes(sequences), prompt, kinds, mixes)
    return len(given) * each


def _refuse_dense(spec: ModelSpec, settings: MoeSettings) -> None:
    """Refuse MoE settings for a dense model: a setting without effect is a mistake."""
    if spec.moe is not None or settings == AUTOMATIC:
        return
    named = [
        name for name in MoeSettings.__slots__
        if getattr(settings, name) != getattr(AUTOMATIC, name)
    ]  # fmt: skip
    raise ConfigError(
        f"{spec.architecture} has no routed experts: leave out {', '.join(named)}", param=named[0]
    )


def plan_lanes(
    lanes: tuple[LaneConfig, ...], model: CausalLM, kv_bytes: int, whole_prompts: bool = False
) -> tuple[LaneConfig, ...]:
    """Divide the KV budget between the lanes by weight. A lane's context is limited by its quota.

    With `whole_prompts` a prompt runs in one step, and the model cuts it into chunks.
    """
    total = sum(lane.weight for lane in lanes)
    planned = (_with_quota(lane, model, int(kv_bytes * lane.weight / total)) for lane in lanes)
    if not whole_prompts:
        return tuple(planned)
    return tuple(
        replace(lane, max_step_tokens=max(lane.max_step_tokens, lane.context), max_mixed_tokens=0)
        for lane in planned
    )


def _with_quota(lane: LaneConfig, model: CausalLM, kv_bytes: int) -> LaneConfig:
    num_blocks, trade = kv_bytes // _block_bytes(lane, model), model.memory_trade
    if trade is not None and num_blocks >= 2:
        num_blocks = trade.layout.num_blocks
    if num_blocks < 2:
        raise ConfigError(
            f"{kv_bytes} bytes of KV hold {num_blocks} blocks of {lane.block_size} tokens for "
            f"{lane.name}; at least two are needed",
            param="engine.kv_bytes",
        )
    longest = model.spec.max_positions
    context = min(lane.context or longest, longest, num_blocks * lane.block_size)
    return replace(lane, num_blocks=num_blocks, context=context)


def _own_kv_bytes(lanes: Sequence[LaneConfig], model: CausalLM) -> int:
    """What KV always has; experts may lend more."""
    trade = model.memory_trade
    if trade is not None:
        return trade.layout.kv.own * trade.layout.kv.block_bytes
    return sum(lane.num_blocks * _block_bytes(lane, model) for lane in lanes)


def _block_bytes(lane: LaneConfig, model: CausalLM) -> int:
    return model.kv_bytes_per_token() * lane.block_size


def _auto_kv_bytes(spec: WorkerSpec, model: CausalLM, graph_bytes: int) -> int:
    """A share of the machine's memory beside `graph_bytes`, but not more than all sequences at full
    length can use."""
    longest = model.spec.max_positions
    useful = sum(lane.max_sequences * (lane.context or longest) for lane in spec.lanes)
    share = memory.auto_kv_bytes(str(model.device), reserved=graph_bytes)
    return min(share, useful * model.kv_bytes_per_token())


def _moe_kv_bytes(spec: WorkerSpec, shape: ModelSpec, checkpoint: Checkpoint, device: str) -> int:
    """KV bytes of a MoE model: one full context per lane if the lanes have a configured context, or
    if a budget in bytes is for KV and experts together; else a share of the free memory, as for any
    model."""
    kept = stored_dtype(checkpoint, device) if spec.dtype == "auto" else spec.dtype
    token_bytes = kv_bytes_per_token(shape, kept)
    contexts = [
        min(lane.context or shape.max_positions, shape.max_positions) for lane in spec.lanes
    ]
    blocks = [-(-n // lane.block_size) for n, lane in zip(contexts, spec.lanes, strict=True)]
    sizes = [n * lane.block_size for n, lane in zip(blocks, spec.lanes, strict=True)]
    # the bytes are divided by weight: the lane with the smallest share must still fit its context
    total = sum(lane.weight for lane in spec.lanes)
    pairs = zip(sizes, spec.lanes, strict=True)
    whole = math.ceil(max(size * total / lane.weight for size, lane in pairs)) * token_bytes
    budget = spec.dispatch.device_budget
    if budget and not budget.endswith("%"):
        return whole
    useful = sum(lane.max_sequences * n for lane, n in zip(spec.lanes, contexts, strict=True))
    share = min(memory.auto_kv_bytes(device, beside_experts=True), useful * token_bytes)
    return max(whole, share) if all(lane.context for lane in spec.lanes) else share


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in GENERATION_KEYS if config.get(key) is not None}


class AdapterReservation:
    """Device memory for adapters, reserved before weights and KV get theirs."""

    def __init__(self, spec: WorkerSpec, device: str) -> None:
        self._spec, self._device = spec, torch.device(device)
        self._slab = AdapterSlab(spec.adapters.device_bytes, self._device)

    def open(self, model: CausalLM) -> AdapterHost:
        library = AdapterLibrary(Path(self._spec.library))
        settings = self._spec.adapters
        pool = AdapterPool(library, model.targets, settings, self._device, slab=self._slab)
        modules = model.targets.modules()
        return AdapterHost(
            pool, AdapterInfo(self._slab.nbytes, settings.host_bytes, pool.max_stacks, modules)
        )


class AdapterHost:
    def __init__(self, pool: AdapterPool, facts: AdapterInfo) -> None:
        self.pool, self.facts = pool, facts

    @property
    def version(self) -> int:
        """A number that changes when `loads` changes."""
        return self.pool.version

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        """Start to load. Errors are not raised here: the request that follows gets them."""
        try:
            self.pool.want(adapters)
        except CoterieError as error:
            log("preload_refused", level="debug", code=error.code)

    def loads(self) -> tuple[AdapterLoad, ...]:
        resident = set(self.pool.resident())
        return tuple(
            AdapterLoad(
                digest,
                digest in resident,
                times.loads,
                times.disk_s,
                times.compose_s,
                times.place_s,
            )
            for digest, times in self.pool.loads().items()
        )

    def close(self) -> None:
        self.pool.close()


def reserve_adapters(spec: WorkerSpec, device: str) -> AdapterReservation | None:
    """None if no adapters can run: there is no library, or no memory for them."""
    return AdapterReservation(spec, device) if spec.library and spec.adapters.device_bytes else None


class MoeHost:
    """The MoE experts of an engine: their runtime, heatmap and trace. `open` is passed to
    `load_model`. Imports what only models with experts need when it is needed: a dense one is ready
    a quarter of a second earlier."""

    def __init__(
        self, model: Path, settings: MoeSettings, kv_bytes: int, graph_bytes: int = 0
    ) -> None:
        self._model, self._settings, self._kv_bytes = model, settings, kv_bytes
        self._graph_bytes = graph_bytes
        # of the KV that shares memory with experts
        self.block_size = BLOCK_SIZE
        self._heatmap: HeatmapFile | None = None
        self._learnt_at = 0.0
        self.runtime: ExpertRuntime | None = None

    def open(self, requirements: MoeRequirements) -> ExpertRuntime:
        from coterie.moe.planner.auto import chooser, known_costs
        from coterie.moe.runtime.runtime import open_experts
        from coterie.moe.runtime.usage import StepSampler

        settings = self._settings
        store = store_of(requirements, settings.reads)
        kv, nbytes = requirements.shared_kv(settings, self._kv_bytes, self.block_size)
        try:
            known = self._known(store.geometry, store.lineage)
            runtime = open_experts(
                store,
                settings,
                device=requirements.device,
                kv_bytes=nbytes + self._graph_room(store, requirements.device),
                heatmap=known,
                costs=known_costs(store, requirements.device),
                chooser=chooser,
                kv=kv,
            )
        except BaseException:
            store.close()
            raise
        if self._heatmap is not None:
            runtime.heatmap = self._heatmap.live
        if runtime.parts.device.device.type == "cpu":
            runtime.sampler = StepSampler()
        self.runtime = runtime
        self._learnt_at = time.monotonic()
        return runtime

    def _graph_room(self, store: ExpertStore, device: str) -> int:
        if not self._graph_bytes:
            return 0
        from coterie.moe.runtime.setup import sizes_of

        free, _ = torch.cuda.mem_get_info(device)
        ram = free_host_bytes()
        needs = TierNeeds(True, False, free, ram, self._kv_bytes, one_memory=False)
        return graph_room(self._settings, sizes_of(store), needs, self._graph_bytes)

    def _known(self, geometry: ExpertGeometry, lineage: tuple[str, ...]) -> Heatmap | None:
        """The stored heatmap. With warmup "none" nothing is loaded or counted."""
        settings = self._settings
        if settings.warmup == "none":
            return None
        path = heatmap_path(self._model, lineage[-1], settings.workload)
        self._heatmap = HeatmapFile(path, lineage, settings.workload)
        return self._heatmap.load(geometry)

    @property
    def walks_groups(self) -> bool:
        """Whether a whole prompt must run in one step."""
        return self.runtime is not None and self.runtime.groups("prefill") is not None

    def refine(self, engine: Engine, tokenizer: Tokenizer, lane: LaneConfig) -> None:
        """Do the hybrid warm-up, if it is configured."""
        if self._settings.warmup == "hybrid":
            refine(engine, tokenizer, lane.name, lane.context)

    def residency(self) -> MoeResidency | None:
        """Where the experts are; None if there is nothing to show."""
        from coterie.moe.runtime.residency import residency

        return None if self.runtime is None else residency(self.runtime)

    def record(self) -> Trace:
        """From now on, record which experts every step uses."""
        from coterie.moe.runtime.trace import Trace

        assert self.runtime is not None
        self.runtime.trace = trace = Trace(self.runtime.geometry)
        return trace

    def save_trace(self, path: Path) -> None:
        runtime = self.runtime
        if runtime is not None and runtime.trace is not None:
            runtime.trace.save(path, fingerprint=runtime.parts.store.fingerprint)

    def facts(self) -> MoeInfo | None:
        if self.runtime is None:
            return None
        parts = self.runtime.parts
        geometry, store = parts.store.geometry, parts.store
        active = len(geometry.layers) * geometry.top_k / max(1, geometry.total)
        return MoeInfo(
            strategy=parts.strategy,
            count=geometry.total,
            device_slots=parts.device.num_slots,
            host_slots=parts.host_slots,
            expert_bytes=store.expert_bytes,
            held_bytes=parts.device.budget_bytes + parts.host_bytes,
            token_bytes=int(store.expert_bytes * active),
            fallback=parts.fallback,
        )

    def save_if_due(self) -> None:
        if self._heatmap is not None:
            self._heatmap.save_if_due()
        if self.runtime is not None and time.monotonic() - self._learnt_at >= SAVE_EVERY_S:
            self._learn(self.runtime)

    def _learn(self, runtime: ExpertRuntime) -> None:
        """What real steps took corrects later plans."""
        from coterie.moe.planner.real_runs import learn_from

        self._learnt_at = time.monotonic()
        try:
            learn_from(runtime)
        except OSError as error:
            log("real_steps_not_saved", level="warning", reason=str(error.strerror))

    def close(self) -> None:
        if self._heatmap is not None:
            self._heatmap.save()
        if self.runtime is not None:
            self._learn(self.runtime)
            self.runtime.close()
