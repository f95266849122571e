"""The runtime's own time, measured with experts that are all zeros: per layer, and per load."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.core.moe import MoeSettings
from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.planner.timing import TimedWork, TimingReport, time_together
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.step import ExpertStep
from coterie.moe.store.base import ExpertGeometry, Key, StoreTimings
from coterie.moe.store.disk import DiskReader

_EXPERTS, _TOP_K, _HIDDEN = 16, 4, 64
_TINY_LAYOUT = ExpertLayout(_HIDDEN, 32, True, ("fp32", "fp32", "fp32"))
# roughly the cache that the experts of a layer use
_CACHE_BYTES = 4 << 20


class ZeroExpertStore:
    """A store of experts that are all zeros and are not read from disk; tiny by default."""

    fingerprint = "zero experts"
    lineage = ("zero experts",)
    staging_bytes = 0

    def __init__(self, layout: ExpertLayout = _TINY_LAYOUT, experts: int = _EXPERTS) -> None:
        self.geometry = ExpertGeometry((0,), experts, _TOP_K)
        self._layout = layout
        self.slot_bytes = layout.nbytes
        self.expert_bytes = self.slot_bytes * experts
        self.disk, self.spent = DiskReader("buffered"), StoreTimings()

    def layout(self, layer: int) -> ExpertLayout:
        return self._layout

    def read_bytes(self, key: Key) -> int:
        return 0

    def read(self, key: Key, out: Tensor) -> int:
        out.zero_()
        return 0

    def tensors(self) -> frozenset[str]:
        return frozenset()

    def files(self) -> frozenset[Path]:
        return frozenset()

    def close(self) -> None:
        self.disk.close()


@dataclass(frozen=True, slots=True)
class RuntimeOverhead:
    """Seconds per MoE layer when all experts are resident; and the seconds that are added by each
    load that the layer waits for, by running experts on host and device, and by any other load."""

    layer_s: float
    load_s: float
    both_s: float
    beside_s: float


def measure_overhead(device: str) -> RuntimeOverhead:
    with ExitStack() as stack:
        return overhead_of(time_together(overhead_works(stack, device)))


def overhead_works(stack: ExitStack, device: str) -> dict[str, TimedWork]:
    def layer(strategy: str, slots: int, loads: bool = False) -> TimedWork:
        return layer_work(stack, device, ZeroExpertStore(), strategy, slots, loads=loads)

    return {
        "layer": layer("lru", _EXPERTS),
        "layer of both": layer("hot_cached_static", _EXPERTS // 2),
        # all experts are loaded, few of them are used
        "layer through": layer("chunked", _EXPERTS, loads=True),
        "layer missing": layer("lru", _TOP_K, loads=True),
    }


OVERHEAD_WORKS = ("layer", "layer of both", "layer through", "layer missing")


def overhead_of(report: TimingReport) -> RuntimeOverhead:
    resident, shared, through, missing = map(report.seconds, OVERHEAD_WORKS)
    load_s = max(0.0, missing - resident) / _TOP_K
    beside_s = (through - resident - _TOP_K * load_s) / (_EXPERTS - _TOP_K)
    shared_s = max(0.0, shared - resident)
    return RuntimeOverhead(resident, load_s, shared_s, min(max(0.0, beside_s), load_s))


LOAD_WORKS = ("load resident", "load missing")


def load_works(
    stack: ExitStack, device: str, layout: ExpertLayout, experts: int
) -> dict[str, TimedWork]:
    """For the seconds that a load of such an expert from host memory adds to its layer."""

    def layer(slots: int) -> TimedWork:
        store = ZeroExpertStore(layout, experts)
        return layer_work(stack, device, store, "lru", slots, loads=slots < experts)

    return dict(zip(LOAD_WORKS, map(layer, (experts, _TOP_K)), strict=True))


def load_of(report: TimingReport) -> float:
    resident, missing = map(report.seconds, LOAD_WORKS)
    return max(0.0, missing - resident) / _TOP_K


def layer_work(
    stack: ExitStack,
    device: str,
    store: ZeroExpertStore,
    strategy: str,
    slots: int,
    *,
    loads: bool,
) -> TimedWork:
    """A layer of one token. `stack` closes the runtime. `loads`: other threads load for it."""
    run = _LayerRun(device, store, strategy, slots)
    stack.callback(run.runtime.close)
    for _ in range(2 * len(run.steps)):
        run()
    return TimedWork(run, prepare=run.use_caches, pooled=loads)


class _LayerRun:
    """Consecutive steps use different experts: with few slots every one is a miss. Half of every
    step's experts are hot."""

    def __init__(self, device: str, store: ZeroExpertStore, strategy: str, slots: int) -> None:
        experts = store.geometry.num_experts
        # with all of them in RAM a GPU's kernels read them there, and no layer is asked
        share = f"{100 * (experts - 1) / experts}%" if device != "cpu" else "100%"
        settings = MoeSettings(strategy, cache_capacity=slots, host_budget=share, predict="off")
        hot = np.tile([1.0, 0.0], experts // 2)[None]
        heatmap = Heatmap(store.geometry, hot)
        self.runtime: ExpertRuntime = open_experts(store, settings, device=device, heatmap=heatmap)
        width = store.layout(0).hidden
        self.steps = [_step(device, first, width) for first in range(0, experts, _TOP_K)]
        self._banks, self._next = torch.ones(8, _CACHE_BYTES // 4), 0

    def use_caches(self) -> Tensor:
        """As the rest of a model does between two layers."""
        return self._banks[self._next % 8].sum()

    def __call__(self) -> tuple[float]:
        step, self._next = self.steps[self._next % len(self.steps)], self._next + 1
        with torch.inference_mode():
            started = time.perf_counter()
            out = self.runtime.run(step)
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            return (time.perf_counter() - started,)


def _step(device: str, first: int, width: int) -> ExpertStep:
    ids = torch.arange(first, first + _TOP_K, dtype=torch.int32)[None]
    weights = torch.full((1, _TOP_K), 1.0 / _TOP_K, device=device)
    return ExpertStep(0, "decode", torch.zeros(1, width, device=device), ids, weights)
