"""What the runtime itself takes per layer and per load, measured on experts that mean nothing.

Weightless ones for the layer's own time; ones of a model's size for a load, which arrives later
then, and alone. Between layers caches are filled with other bytes, as real experts do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.core.dispatch import DispatchSettings
from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.step import ExpertStep
from coterie.moe.store.base import Spent
from coterie.moe.store.disk import Disk
from coterie.moe.store.geometry import Geometry, Key

_EXPERTS, _TOP_K, _HIDDEN = 16, 4, 64
_FEATHER = ExpertLayout(_HIDDEN, 32, True, ("fp32", "fp32", "fp32"))
_REPEATS = 48
# what the experts of a layer push out of the caches, roughly
_WASH_BYTES = 4 << 20


class FeatherStore:
    """Experts that are all zeros, and are read from nowhere; tiny unless told otherwise."""

    fingerprint = "feather"
    lineage = ("feather",)
    staging_bytes = 0

    def __init__(self, layout: ExpertLayout = _FEATHER, experts: int = _EXPERTS) -> None:
        self.geometry = Geometry((0,), experts, _TOP_K)
        self._layout = layout
        self.slot_bytes = layout.nbytes
        self.expert_bytes = self.slot_bytes * experts
        self.disk, self.spent = Disk("buffered"), Spent()

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
class Overhead:
    """Seconds per MoE layer when all is resident; what each load adds that the layer waits for,
    what it adds that host and device both have experts to run, and what a load beside it adds."""

    layer_s: float
    load_s: float
    both_s: float
    beside_s: float


def measure_overhead(device: str) -> Overhead:
    resident = _layer_s(device, FeatherStore(), "lru", slots=_EXPERTS)
    shared = _layer_s(device, FeatherStore(), "hot_cached_static", slots=_EXPERTS // 2)
    # all experts are loaded, few of them asked for
    through = _layer_s(device, FeatherStore(), "chunked", slots=_EXPERTS)
    load_s = measure_load(device)
    beside_s = (through - resident - _TOP_K * load_s) / (_EXPERTS - _TOP_K)
    shared_s = max(0.0, shared - resident)
    return Overhead(resident, load_s, shared_s, min(max(0.0, beside_s), load_s))


def measure_load(device: str, layout: ExpertLayout = _FEATHER, experts: int = _EXPERTS) -> float:
    """What a load out of host memory adds to a layer that waits for it."""
    resident = _layer_s(device, FeatherStore(layout, experts), "lru", slots=experts)
    missing = _layer_s(device, FeatherStore(layout, experts), "lru", slots=_TOP_K)
    return max(0.0, missing - resident) / _TOP_K


def _layer_s(device: str, store: FeatherStore, strategy: str, slots: int) -> float:
    """Neighbouring steps ask for different experts: with few slots every one is a miss. Half of
    every step's experts are hot."""
    settings = DispatchSettings(strategy, cache_capacity=slots, host_budget="100%", predict="off")
    experts = store.geometry.num_experts
    hot = np.tile([1.0, 0.0], experts // 2)[None]
    heatmap = Heatmap(store.geometry, hot)
    runtime = open_experts(store, settings, device=device, heatmap=heatmap)
    try:
        width = store.layout(0).hidden
        steps = [_step(device, first, width) for first in range(0, experts, _TOP_K)]
        banks, times = torch.ones(8, _WASH_BYTES // 4), []
        for turn in range(len(steps) * 2 + _REPEATS):
            banks[turn % 8].sum()
            times.append(_run_s(runtime, steps[turn % len(steps)]))
        settled = sorted(times[len(steps) * 2 :])
        return settled[len(settled) // 4]
    finally:
        runtime.close()


def _step(device: str, first: int, width: int) -> ExpertStep:
    ids = torch.arange(first, first + _TOP_K, dtype=torch.int32)[None]
    weights = torch.full((1, _TOP_K), 1.0 / _TOP_K, device=device)
    return ExpertStep(0, "decode", torch.zeros(1, width, device=device), ids, weights)


def _run_s(runtime: ExpertRuntime, step: ExpertStep) -> float:
    began = time.perf_counter()
    out = runtime.run(step)
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
    return time.perf_counter() - began
