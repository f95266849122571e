"""Runs a model's experts, layer by layer: the strategy decides, transfers and kernels execute.

Owns tiers, strategies and counters for the life of an engine. After an error the state is as if
the failed loads had never been started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import InternalError
from coterie.kernels.cpu.expert_mlp import combine
from coterie.moe.runtime.banked import BankedExperts
from coterie.moe.runtime.layer_executor import LayerExecutor, LayerJob
from coterie.moe.runtime.memory_trade import MemoryTrade
from coterie.moe.runtime.predict import PredictionTracker
from coterie.moe.runtime.resident import ResidentFinder, StepDemands
from coterie.moe.runtime.setup import (
    PlacementContext,
    RuntimeParts,
    StrategyChooser,
    allocate_parts,
    allocation_for,
    choose_strategy,
    unused_hints,
    uses_hints,
)
from coterie.moe.runtime.step import classify, demand_of, first_uses
from coterie.moe.runtime.transfer import TierTransfer
from coterie.moe.runtime.usage import (
    LayerSpan,
    LayerTally,
    StepSampler,
    UsageTally,
    UsageTelemetry,
)
from coterie.weights.shortage import is_shortage

if TYPE_CHECKING:
    from coterie.core.moe import MoeSettings, MoeUsage
    from coterie.moe.dispatch.base import Demand, ExpertCosts
    from coterie.moe.runtime.device_pool import DevicePool, ResidentExperts
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.runtime.slabs import KvBlocks
    from coterie.moe.runtime.step import ExpertStep
    from coterie.moe.runtime.tiers import ExpertLoad
    from coterie.moe.runtime.trace import Trace
    from coterie.moe.runtime.transfer import TierTransfer
    from coterie.moe.runtime.usage import UsageTelemetry
    from coterie.moe.store.base import ExpertStore, Key

# where RAM has room for all experts: after this many tokens, the unused ones are read too
FILL_AFTER = 32
# the first request waits no longer for experts that it may not use
START_S = 2.0


class ExpertRuntime:
    """Only one thread (the engine's) may call it."""

    def __init__(self, parts: RuntimeParts) -> None:
        self.parts, self.geometry = parts, parts.store.geometry
        self._host, self._device, self._slots = parts.host, parts.device, parts.slots
        self._transfer = TierTransfer(parts.store, parts.host, parts.device)
        self._transfer.retired = self._count_load
        self._transfer.device_only = self._device_only
        self.executor = LayerExecutor(parts.host, parts.device, self._transfer)
        self.telemetry = UsageTelemetry(self.geometry)
        self.predictor = PredictionTracker(parts.predict)
        self._banked: BankedExperts | None = None
        if parts.bank is not None:
            self._banked = BankedExperts(parts, parts.bank, self.telemetry)
        # what KV takes of the slots, and gives back; None: nothing
        self.trade: MemoryTrade | None = None
        if parts.slabs is not None:
            self.trade = MemoryTrade(parts.slabs, parts.device.memory, parts.slots, self)
        few = 0 < parts.slots.num_slots < self.geometry.total
        self._uses_hints = few and parts.bank is None and uses_hints(parts.strategies["decode"])
        if not self._uses_hints:
            self.predictor.unused = unused_hints(parts, few)
        # prefetched and not used since; and the next layer's prediction, until this layer has run
        self._prefetched: set[Key] = set()
        self._predicted: tuple[int, list[int]] | None = None
        # recorders, off unless somebody sets them
        self.heatmap: Heatmap | None = None
        self.trace: Trace | None = None
        self.spans: list[LayerSpan] | None = None
        self.sampler: StepSampler | None = None
        self.update_calls = self.swaps = self._tokens = 0
        # swaps that decisions of the running step made
        self._replaced = 0
        self._layouts = {layer: parts.store.layout(layer) for layer in self.geometry.layers}
        self._resident_finder = ResidentFinder(parts, self.telemetry)
        self._background_fill = BackgroundFill(self._transfer, self.telemetry)
        self._out = self._out_view = torch.empty(0)
        self._layer: int | None = None
        # of the start, still running: they belong to no request
        self._start_loads: set[ExpertLoad] = set()
        self._closed = False

    def start(self) -> None:
        """Load what strategies need before the first request, but for no longer than START_S: the
        rest is loaded while requests are served, and a step waits for what it uses."""
        if self._banked is not None:
            self._banked.start(START_S)
            return
        for strategy in dict.fromkeys(self.parts.strategies.values()):
            for key, slot in strategy.start():
                self._transfer.start(key, slot, None, urgent=False)
        if self._slots.num_slots < self.geometry.total and not self._device.shared:
            self._start_loads = self._transfer.wait(START_S)
        if self._transfer.failed:
            self._transfer.call_off()
        if not self._start_loads:
            self._finish_loads()
        self.telemetry.end_step()  # these loads belong to no request

    def run(self, step: ExpertStep) -> Tensor:
        """[T, D]: every row's experts, weighted and summed in top-k order. Call it in inference
        mode."""
        if self._banked is not None:
            raise InternalError("experts in the bank are read by the device's kernels only")
        begin = time.perf_counter()
        if self._transfer.failed:
            self._reconcile()
        demand = demand_of(step)
        if self.heatmap is not None:
            self.heatmap.add(demand.layer, demand.experts, demand.counts)
        if self.trace is not None:
            self.trace.record(demand)
        first = first_uses(self._slots, demand)
        if self._uses_hints:
            self._score_prediction(demand, first)
        strategy = self.parts.strategies[step.phase]
        before = strategy.replaced
        waves = strategy.decide(demand)
        self._replaced += strategy.replaced - before
        job = LayerJob(step, self._layouts[step.layer], self._buffer(step), self.executor.kernel)
        job.exact = self.spans is not None
        self._layer = step.layer
        job.demand, job.classes = demand, classify(demand, waves, first)
        job.tally.lookup_s = time.perf_counter() - begin
        try:
            if self._device.pending:
                self._transfer.sweep()
            for key, slot in waves[0].load:
                self._transfer.start(key, slot, job.tally)
            self.executor.run(job, waves)
        except BaseException:
            self._reconcile()
            raise
        finally:
            self._layer = None
        result = combine(job.out, step.topk_weights, dtype=step.hidden.dtype)
        self._count(job, begin)
        self._prefetch()
        return result

    def resident(self, phase: str) -> ResidentExperts | None:
        """Where all experts are, if no layer needs a decision, a move or a record."""
        recording = self.trace is not None or self.spans is not None
        return None if recording else self._resident_finder.find(phase)

    def device_pool(self) -> DevicePool | None:
        """All experts where a CUDA device reads them, if no layer needs a decision, a move or a
        record."""
        if self._banked is not None:
            return self._banked.pool
        recording = self.trace is not None or self.spans is not None
        return None if recording else self._resident_finder.find_pool()

    def loading_pool(self) -> DevicePool | None:
        """The same while experts are still read for the first time."""
        return None if self._banked is None else self._banked.loading_pool()

    @property
    def is_loading(self) -> bool:
        """Whether experts are still loaded that strategies want before the first request."""
        if self._banked is not None:
            return self._banked.fill is not None and not self._banked.fill.is_complete
        return any(not load.done for load in self._start_loads)

    def wait_loaded(self) -> None:
        """Wait for all that is loaded at start."""
        if self._banked is not None:
            self._banked.wait_loaded()
        else:
            self._finish_loads()

    def in_ram(self, layer: int) -> frozenset[int]:
        """The experts of a layer that are in RAM."""
        if self._banked is None:
            return self._host.ready(layer)
        here, fill = self.geometry.present(layer), self._banked.fill
        return frozenset(e for e in here if fill is None or fill.holds((layer, e)))

    def prompt_pool(self, rows: int) -> DevicePool | None:
        """The same for a step of so many rows, of which some are of a prompt, if what is missing is
        copied ahead of it; that begins now."""
        return None if self._banked is None else self._banked.prompt_pool(rows)

    def launched(self, copies: bool) -> None:
        """A step was enqueued on the device, which `copies` experts or not: decide what no step has
        to wait for."""
        if self._banked is not None:
            self._banked.launched(copies)

    def record_resident_step(
        self, found: ResidentExperts, routed: Tensor, owners: Tensor | None, seconds: float
    ) -> None:
        """Count a step that `resident` allowed to run as a whole: routed int32 [layers, T, K]."""
        self._observe(self._resident_finder.count(found, routed, owners, seconds))
        if self.sampler is not None:
            self.sampler.add_whole(*routed.shape)

    def record_device_step(self, found: ResidentExperts, demands: StepDemands, s: float) -> None:
        """The same for a step that `device_pool` allowed, which took `s` seconds."""
        if self._banked is None:
            self._resident_finder.add(found, demands, s)
            self._observe(demands.rows)
            return
        if self.heatmap is not None:
            self.heatmap.counts += demands.rows
        if self.trace is not None:
            self._banked.trace(demands, self.trace)
        self._replaced += self._banked.record(found, demands, s)

    def _observe(self, rows: NDArray[np.int64]) -> None:
        for strategy in dict.fromkeys(self.parts.strategies.values()):
            strategy.observe(rows)
        if self.heatmap is not None:
            self.heatmap.counts += rows

    def _count(self, job: LayerJob, begin: float) -> None:
        job.close()
        if self.spans is not None:
            self.spans += job.spans(begin, time.perf_counter())
        self.telemetry.add(job.layer, job.tally)
        if self.sampler is not None:
            self.sampler.add_layer(job.step, job.tally, len(job.read_now))
        if job.step.owners is not None:
            self.telemetry.attribute(job.step, job.classes, job.read_now, job.tally)

    def _buffer(self, step: ExpertStep) -> Tensor:
        """[T * K, D] fp32 that all layers reuse: new memory costs page faults."""
        rows, width = step.topk_ids.numel(), step.hidden.shape[1]
        if self._out_view.shape != (rows, width):
            if self._out.numel() < rows * width:
                device = step.hidden.device
                self._out = torch.empty(rows * width, dtype=torch.float32, device=device)
            self._out_view = self._out[: rows * width].view(rows, width)
        return self._out_view

    def groups(self, phase: str) -> tuple[tuple[int, ...], ...] | None:
        if phase != "prefill" or self._banked is not None:
            return None
        return self.parts.strategies[phase].groups()

    def load_group(self, index: int) -> None:
        """Start to load a group of layers. Each layer then waits for its own experts."""
        for key, slot in self.parts.strategies["prefill"].load_group(index):
            self._transfer.start(key, slot, None)

    @property
    def wants_hints(self) -> bool:
        recording = self.trace is not None and self._banked is None
        return recording or (self._uses_hints and self.predictor.protects)

    @property
    def moves_beside_steps(self) -> bool:
        return self._banked is not None

    def hint(self, layer: int, predicted: Tensor) -> None:
        """`layer` will probably need these: keep them, and load them if the link is idle. Models
        predict only while they decode: a prompt needs most experts anyway."""
        experts = sorted(set(predicted.reshape(-1).tolist()))
        if self.trace is not None:
            self.trace.hint(layer, experts)
        if self._uses_hints and self.predictor.protects:
            self.predictor.predict(layer, experts)
            self.parts.strategies["decode"].protect(layer, experts)
            self._predicted = layer, experts

    def _score_prediction(self, demand: Demand, first: set[Key]) -> None:
        """Report to the predictor which experts are needed, and which prefetches were useful."""
        self.predictor.ask(demand.layer, demand.experts)
        if first and self._prefetched:
            self.predictor.used(len(first & self._prefetched))
            self._prefetched -= first

    def _prefetch(self) -> None:
        """Load predicted experts, after the layer's own loads and only while the link is idle."""
        if self._predicted is None:
            return
        (layer, experts), self._predicted = self._predicted, None
        if not self.predictor.prefetches:
            return
        self.predictor.link(idle := self._transfer.idle)
        if not idle:
            return
        loads = self.parts.strategies["decode"].prefetch(layer, experts)
        for key, slot in loads:
            self._transfer.start(key, slot, None, urgent=False)
        if loads:
            self._prefetched = {key for key in self._prefetched if key in self._slots.prefetched}
            self._prefetched.update(key for key, _ in loads)
            self.predictor.fetch(len(loads), len(loads) * self._layouts[layer].nbytes)

    def update(self) -> tuple[int, int]:
        """Called between tokens: let the strategies change slots, in the background. Returns the
        number of updates and of experts exchanged."""
        before = self.update_calls, self.swaps
        self._tokens += 1
        if self._tokens == FILL_AFTER and self._host.complete:
            self._background_fill.start(iter(self.geometry.keys()), self._device_only)
        if self.loading_pool() is not None:
            return 0, 0
        strategies = dict.fromkeys(self.parts.strategies.values())
        for strategy in strategies:
            loads = strategy.update()
            self.swaps += len(loads)
            if self._banked is not None:
                self._banked.move(loads)
                continue
            for key, slot in loads:
                self._transfer.start(key, slot, None, urgent=False)
        # those made behind a step count too
        self.update_calls = sum(strategy.updates for strategy in strategies)
        return self.update_calls - before[0], self.swaps - before[1]

    def withdraw(self, slots: Sequence[int]) -> None:
        """Between steps: use these slots no longer, until `restore`."""
        if self._banked is not None:
            self._banked.withdraw(slots)
            return
        if self._transfer.settle() or self._transfer.failed:
            self._reconcile()
        for slot in slots:
            self._device.vacate(slot, evicted=True)
        self._slots.withdraw(slots)

    def restore(self, slots: Sequence[int]) -> None:
        self._slots.restore(slots)

    def worth(self) -> Callable[[Key], float]:
        """What it is worth to have an expert in a slot, 0 or more."""
        values, slots = self.parts.strategies["decode"].worth(), self._slots
        if values is None:
            return lambda key: 1.0 / (1 + slots.age(key))
        known, rows = values, {layer: row for row, layer in enumerate(self.geometry.layers)}
        return lambda key: float(known[rows[key[0]], key[1]])

    def end_step(self) -> tuple[MoeUsage, list[MoeUsage]]:
        """What the step cost: in total, and by sequence (one entry when owners are not known)."""
        self._transfer.sweep()
        self._background_fill.sweep()
        if self.trace is not None:
            self.trace.end_step()
        if self.sampler is not None:
            self.sampler.end_step()
        total, parts = self.telemetry.end_step()
        made, self._replaced = self._replaced, 0
        if not made:
            return total, parts
        self.swaps += made
        return replace(total, swaps=made), [replace(part, swaps=made) for part in parts]

    def wire_rates(self) -> tuple[float, float, float] | None:
        """Bytes per second of copies to the device, of its kernels that read RAM and of the CPU
        beside them; None where kernels do not read RAM."""
        return None if self._banked is None else self._banked.wire_rates()

    def check(self) -> None:
        """Raise unless slots and tiers agree and nothing is in use between steps."""
        self._finish_loads()
        if self._banked is not None:
            self._banked.finish()
        self._host.check()
        self._device.check()
        if left := self._host.keys_in_use(wait_s=5.0):
            raise InternalError(f"host entries left in use: {left}")
        for key in list(self._slots.keys()):
            if self._device.slot_of(key) != self._slots.slot_of(key):
                raise InternalError(f"expert {key} does not lie where it is believed to")
        if len(self._device.keys()) > self._slots.num_slots:
            raise InternalError("more experts than slots")
        if self.trade is not None:
            self.trade.check()

    def report(self) -> dict[str, Any]:
        """All counters since start, as plain values."""
        self._transfer.sweep()
        return report(self)

    def close(self, *, keep_store: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        self._transfer.call_off()
        for load in self._transfer.settle():
            self._device.vacate(load.slot or 0)
        self.executor.close()
        self._transfer.close()
        if self._banked is not None:
            self._banked.close()
        self._host.close()
        self._device.close()
        if not keep_store:
            self.parts.store.close()

    def _device_only(self, key: Key) -> bool:
        """Whether `key` stays on the device for good, so that a copy in RAM is not needed."""
        if self._device.shared:
            return False
        return self._slots.num_slots >= self.geometry.total or self._slots.is_pinned(key)

    def _count_load(self, load: ExpertLoad, tally: LayerTally | None) -> None:
        at_start = load in self._start_loads
        self._start_loads.discard(load)
        if load.error is not None:
            return
        counted: UsageTally = UsageTally()
        if tally is not None and load.key[0] == self._layer:
            counted = tally
        elif at_start:
            counted = self.telemetry.outside_steps(load.key[0])
        counted.host_hits += load.host_hit
        counted.host_misses += not load.host_hit
        counted.moved_bytes += load.moved_bytes
        counted.read_bytes += load.read_bytes
        counted.io_s += load.done_s - load.started_s
        if counted is not tally and not at_start:
            self.telemetry.add(load.key[0], counted)

    def _finish_loads(self) -> None:
        for load in self._transfer.settle():
            self._reconcile()
            if load.error is not None:
                raise load.error

    def _reconcile(self) -> None:
        """Forget experts whose bytes were not loaded, so that slots and tiers agree again."""
        self._transfer.call_off()
        for load in self._transfer.settle():
            if load.slot is not None:
                self._device.vacate(load.slot)
        self._transfer.failed = False
        for key in list(self._slots.keys()):
            slot = self._slots.slot_of(key)
            if self._device.slot_of(key) != slot or not self._device.holds(key[0], (key[1],)):
                self._slots.forget(key)
        for key in list(self._device.keys()):
            if key not in self._slots:
                self._device.vacate(self._device.slot_of(key) or 0)


def open_experts(
    store: ExpertStore,
    settings: MoeSettings,
    *,
    device: str | torch.device = "cpu",
    kv_bytes: int = 0,
    heatmap: Heatmap | None = None,
    costs: ExpertCosts | None = None,
    chooser: StrategyChooser | None = None,
    kv: KvBlocks | None = None,
) -> ExpertRuntime:
    """Size the tiers, build the strategies and load what they need at start. `kv_bytes` of one full
    context are taken from a device budget in bytes; `chooser` chooses the strategy for `auto`.
    `kv`: with `elastic_memory`, the KV that shares the device's memory, which `kv_bytes` has."""
    site = PlacementContext(torch.device(device), kv_bytes, heatmap, costs, chooser, kv)
    settings = choose_strategy(store, settings, site)
    room = allocation_for(store, settings, site)
    try:
        while True:
            try:
                return _started(allocate_parts(store, settings, site, room))
            except Exception as problem:
                if not is_shortage(problem):
                    raise
                room = room.reduced(store.geometry, problem)
    except BaseException:
        store.close()
        raise


def _started(parts: RuntimeParts) -> ExpertRuntime:
    runtime = None
    try:
        runtime = ExpertRuntime(parts)
        runtime.start()
    except BaseException:
        # the caller keeps the store: another attempt reads from it
        if runtime is not None:
            runtime.close(keep_store=True)
        else:
            parts.host.close()
            parts.device.close()
            if parts.bank is not None:
                parts.bank.close()
        raise
    return runtime


def report(runtime: ExpertRuntime) -> dict[str, Any]:
    """Counters per tier, per layer and in total; names as in MoeUsage. `fallback_rate` is the share
    of demands whose expert was not on the device: it was moved, or computed on the host."""
    parts, total = runtime.parts, runtime.telemetry.total()
    asked = total.device_hits + total.prefetch_hits + total.device_misses + total.host_runs
    late = total.device_misses + total.host_runs
    allocated = parts.device.budget_bytes + parts.host_bytes
    read_ahead = {} if runtime._banked is None else runtime._banked.report_prefetch()
    return {
        "strategy": parts.strategy,
        "asked": parts.asked,
        "fallback": parts.fallback,
        "shortages": parts.shortages,
        "demands": asked,
        "hit_rate": (total.device_hits + total.prefetch_hits) / asked if asked else 0.0,
        "fallback_rate": late / asked if asked else 0.0,
        "dcu_calls": runtime.update_calls,
        "swaps": runtime.swaps,
        "prediction": {**runtime.predictor.report(), **read_ahead},
        "total": total.as_dict(),
        "tiers": {"device": _device(runtime), "host": _host(runtime)},
        "layers": {
            layer: _layer(runtime, layer, tally)
            for layer, tally in runtime.telemetry.layers.items()
        },
        "elastic": {} if runtime.trade is None else runtime.trade.report(),
        "cpu_share": {} if runtime._banked is None else runtime._banked.report_share(),
        "expert_bytes": parts.store.expert_bytes,
        "memory_saved_bytes": max(0, parts.store.expert_bytes - allocated),
    }


def _device(runtime: ExpertRuntime) -> dict[str, float]:
    tier, total = runtime.parts.device, runtime.telemetry.total()
    return {
        "slots": tier.num_slots,
        "budget_bytes": tier.budget_bytes,
        "resident": len(tier.keys()),
        "hits": total.device_hits + total.prefetch_hits,
        "prefetch_hits": total.prefetch_hits,
        "misses": total.device_misses,
        "evictions": sum(tier.evictions.values()),
        "moved_bytes": total.moved_bytes,
        "stall_s": total.stall_s,
    }


def _host(runtime: ExpertRuntime) -> dict[str, float]:
    parts, total = runtime.parts, runtime.telemetry.total()
    tier = parts.host
    return {
        "slots": parts.host_slots,
        "budget_bytes": parts.host_bytes,
        "used_bytes": tier.used_bytes if parts.bank is None else parts.host_bytes,
        "hits": total.host_hits,
        "misses": total.host_misses,
        "evictions": sum(tier.evictions.values()),
        "read_bytes": total.read_bytes,
        "io_s": total.io_s,
    }


def _layer(runtime: ExpertRuntime, layer: int, tally: UsageTally) -> dict[str, float]:
    evicted = runtime.parts.device.evictions[layer], runtime.parts.host.evictions[layer]
    return tally.as_dict() | {"device_evictions": evicted[0], "host_evictions": evicted[1]}


class BackgroundFill:
    """Reads all experts into RAM, one after another, while no step waits for a load."""

    def __init__(self, transfer: TierTransfer, telemetry: UsageTelemetry) -> None:
        self._transfer, self._telemetry = transfer, telemetry
        # read by the load threads, not counted yet
        self._read: SimpleQueue[tuple[Key, int]] = SimpleQueue()

    def start(self, keys: Iterator[Key], elsewhere: Callable[[Key], bool]) -> None:
        """Read all but those that stay elsewhere for good."""
        wanted = (key for key in keys if not elsewhere(key))
        self._transfer.fill_host(wanted, lambda key, size: self._read.put((key, size)))

    def sweep(self) -> None:
        """Count what was read, by layer: it belongs to no request."""
        while not self._read.empty():
            key, size = self._read.get()
            tally = self._telemetry.outside_steps(key[0])
            tally.host_misses += 1
            tally.read_bytes += size
