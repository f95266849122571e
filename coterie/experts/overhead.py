"""What the runtime itself takes per layer and per load, measured on experts that weigh nothing.

Between layers caches are filled with other bytes, as real experts do.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from coterie.core.dispatch import DispatchSettings
from coterie.experts.disk import Disk
from coterie.experts.geometry import Geometry, Key
from coterie.experts.runtime import ExpertRuntime, open_experts
from coterie.experts.step import ExpertStep
from coterie.experts.store import Spent
from coterie.kernels.expert_layout import ExpertLayout

_EXPERTS, _TOP_K, _HIDDEN = 16, 4, 64
_REPEATS = 48
# what the experts of a layer push out of the caches, roughly
_WASH_BYTES = 4 << 20


class FeatherStore:
    """Tiny experts that are all zeros, and are read from nowhere."""

    fingerprint = "feather"
    lineage = ("feather",)
    staging_bytes = 0

    def __init__(self) -> None:
        self.geometry = Geometry((0,), _EXPERTS, _TOP_K)
        self._layout = ExpertLayout(_HIDDEN, 32, True, ("fp32", "fp32", "fp32"))
        self.slot_bytes = self._layout.nbytes
        self.expert_bytes = self.slot_bytes * _EXPERTS
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

    def close(self) -> None:
        self.disk.close()


def measure_overhead(device: str) -> tuple[float, float]:
    """Seconds per MoE layer when all is resident, and what each load adds to that."""
    resident = _layer_s(device, slots=_EXPERTS)
    missing = _layer_s(device, slots=_TOP_K)
    return resident, max(0.0, missing - resident) / _TOP_K


def _layer_s(device: str, slots: int) -> float:
    """Neighbouring steps ask for different experts: with few slots every one is a miss."""
    settings = DispatchSettings("lru", cache_capacity=slots, host_budget="100%", predict="off")
    runtime = open_experts(FeatherStore(), settings, device=device)
    try:
        steps = [_step(device, first) for first in range(0, _EXPERTS, _TOP_K)]
        banks, times = torch.ones(8, _WASH_BYTES // 4), []
        for turn in range(_REPEATS):
            banks[turn % 8].sum()
            times.append(_run_s(runtime, steps[turn % len(steps)]))
        settled = sorted(times[len(steps) * 2 :])
        return settled[len(settled) // 4]
    finally:
        runtime.close()


def _step(device: str, first: int) -> ExpertStep:
    ids = torch.arange(first, first + _TOP_K, dtype=torch.int32)[None]
    weights = torch.full((1, _TOP_K), 1.0 / _TOP_K, device=device)
    return ExpertStep(0, "decode", torch.zeros(1, _HIDDEN, device=device), ids, weights)


def _run_s(runtime: ExpertRuntime, step: ExpertStep) -> float:
    began = time.perf_counter()
    out = runtime.run(step)
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
    return time.perf_counter() - began
