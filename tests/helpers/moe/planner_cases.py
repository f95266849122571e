"""A machine of round numbers and small cases for tests of the planner."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.device_path import DevicePath
from coterie.moe.planner.machine import (
    BackboneTimes,
    Machine,
    MachineIdentity,
    RecordProfile,
    TransferCost,
)
from coterie.moe.planner.plan import PlanCase, PlannedModel
from coterie.moe.planner.workload import Workload, workload_from_heatmap
from coterie.moe.runtime.budget import ExpertSizes, TierNeeds
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry

MB = 10**6
GEOMETRY = ExpertGeometry((0, 1, 2, 3), 16, 2)
# records of 10 MB; a layer takes 0.1 ms, each missing expert 1 ms
PATH = DevicePath(
    kind="bf16",
    record_bytes=10 * MB,
    copy_bytes_s=20e9,
    read_bytes_s=5e9,
    cpu_bytes_s=5e9,
    decode_layer=CostCurve((1,), (1e-4,)),
    prompt_layer=CostCurve((64,), (1e-3,)),
    rest_s=1e-4,
    missing=CostCurve((1, 2), (1e-3, 2e-3)),
)


def machine(device: str = "cpu", **changes: object) -> Machine:
    """Reads 10 ms, copies 1 ms, runs 2 ms (1 ms on a device of its own) per expert of 10 MB."""
    fast = 1e-3 if device != "cpu" else 2e-3
    profile = RecordProfile(
        record_bytes=10 * MB,
        read=TransferCost(each_s=10e-3, alone_s=12e-3),
        link=TransferCost(each_s=1e-3, alone_s=2e-3),
        host=CostCurve((1, 4), (2e-3, 5e-3)),
        device=CostCurve((1, 4), (fast, fast * 2)),
    )
    facts: dict[str, object] = {
        "identity": MachineIdentity("cpu", 2, device, "2.0", "native"),
        "measured_at": time.time(),
        "dram_bytes_s": 10e9,
        "device_bytes_s": 10e9 if device == "cpu" else 100e9,
        "layer_s": 0.0,
        "profiles": {"p": profile},
    }
    return Machine(**{**facts, **changes})  # type: ignore[arg-type]


def skewed(geometry: ExpertGeometry = GEOMETRY, power: float = 1.2) -> Workload:
    shares = (1.0 + np.arange(geometry.num_experts)) ** -power
    counts = np.stack([np.roll(shares, 3 * row) for row in range(len(geometry.layers))])
    return workload_from_heatmap(Heatmap(geometry, counts), "a test", prompt_tokens=64).shortened(
        360
    )


def case(device: str = "cpu", load: Workload | None = None, **changes: object) -> PlanCase:
    sizes = ExpertSizes(GEOMETRY.total, 10 * MB, 10 * MB * GEOMETRY.total)
    backbone = BackboneTimes(CostCurve((1, 64), (5e-3, 20e-3)))
    subject = PlannedModel(GEOMETRY, sizes, 20 * MB, 1000, context=1000, backbone=backbone)
    return PlanCase(subject, machine(device, **changes), "p", load or skewed())


def on_gpu(load: Workload | None = None, path: DevicePath = PATH) -> PlanCase:
    made = case("gpu", load, device_paths={"p": path}, device_bytes_s=1e12)
    return replace(made, model=replace(made.model, kind="bf16"))


def needs(free: int = 4000 * MB, *, one_memory: bool = True, kv_bytes: int = MB) -> TierNeeds:
    return TierNeeds(True, True, free, free, kv_bytes, one_memory)
