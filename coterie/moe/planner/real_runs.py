"""Compares decode steps of a running engine with their prediction, and corrects the machine's file.

Only steps of one row count that no other process interrupted (runtime/usage.py keeps some of them).
A step is priced from what it really used, so that the routing of a workload has no part in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from coterie.moe.planner import machine as machine_file
from coterie.moe.planner.machine import Machine, RealRatio, StepKind
from coterie.moe.planner.measure import ComputeTarget, identity, profile_name
from coterie.moe.planner.step_costs import CostModel, WaveCounts
from coterie.moe.runtime.runtime import ExpertRuntime
from coterie.moe.runtime.usage import SampledLayer, SampledStep

# steps of a kind from which something is learnt
LEAST_STEPS = 16


def learn_from(runtime: ExpertRuntime) -> None:
    """Store what the sampled steps took against their prediction, if this machine was measured for
    these experts. Measures nothing."""
    if runtime.sampler is None:
        return
    steps, parts = runtime.sampler.take(), runtime.parts
    if len(steps) < LEAST_STEPS:
        return
    target = ComputeTarget(str(parts.device.device), torch.get_num_threads())
    known = machine_file.load(identity(target))
    name = profile_name(parts.store, target)
    if known is None or name not in known.profiles or name not in known.backbones:
        return
    costs = CostModel(known, known.profiles[name], parts.host_slots > 0, parts.device.shared)
    found = real_ratios(known, name, costs, steps)
    if found:
        machine_file.store(known.with_real(name, found))


def real_ratios(
    machine: Machine, name: str, costs: CostModel, steps: Sequence[SampledStep]
) -> dict[StepKind, RealRatio]:
    """By kind of step: seconds over predicted seconds, of half of the steps closest to the
    median."""
    by_kind: dict[StepKind, list[float]] = {}
    for step in steps:
        predicted = predicted_s(machine, name, costs, step)
        if predicted > 0:
            by_kind.setdefault(kind_of(step), []).append(step.seconds / predicted)
    found: dict[StepKind, RealRatio] = {}
    for kind, ratios in by_kind.items():
        if len(ratios) >= LEAST_STEPS:
            lower, middle, upper = statistics.quantiles(ratios, n=4)
            found[kind] = RealRatio(middle, (upper - lower) / 2 / middle, len(ratios))
    return found


def kind_of(step: SampledStep) -> StepKind:
    if step.one_call:
        return "one call"
    reads = any(layer.loads_from_disk or layer.host_reads for layer in step.layers)
    return "from disk" if reads else "in memory"


def predicted_s(machine: Machine, name: str, costs: CostModel, step: SampledStep) -> float:
    """As the planner's simulation adds it up."""
    backbone = machine.backbones[name]
    if step.one_call:
        curve = backbone.express or backbone.walk
        return curve.at(1) + sum(costs.resident_s(_wave(layer)) for layer in step.layers)
    waves = [_wave(layer) for layer in step.layers]
    return backbone.walk.at(1) + sum(costs.wave_s(wave) + costs.layer_s([wave]) for wave in waves)


def _wave(layer: SampledLayer) -> WaveCounts:
    return WaveCounts(
        resident=(1,) * layer.resident,
        loaded=(1,) * layer.loaded,
        host=(1,) * layer.host,
        from_host=max(0, layer.loaded - layer.loads_from_disk),
        from_disk=layer.loads_from_disk,
        host_reads=layer.host_reads,
    )
