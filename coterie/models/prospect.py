"""A model as a planner sees it: sizes, KV and budgets, found without loading any weights.

The one place where a checkpoint, its store and the planner's values meet. Knows no strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from coterie.core.errors import ConfigError
from coterie.models.base import kv_bytes_per_token, read_spec, stored_dtype
from coterie.models.experts import open_moe_store
from coterie.models.pace import load_backbone, measure_backbone
from coterie.moe.planner import machine as kept
from coterie.moe.planner.measure import ComputeTarget, ensure_measured, profile_name
from coterie.moe.planner.plan import MemoryDivision, PlanCase, PlannedModel, divisions
from coterie.moe.planner.workload import (
    Workload,
    assumed_workload,
    workload_from_heatmap,
    workload_from_trace,
)
from coterie.moe.runtime.opening import PlacementContext, needs_of, sizes_of

if TYPE_CHECKING:
    from pathlib import Path

    from coterie.core.dispatch import MoeSettings
    from coterie.models.spec import ModelSpec
    from coterie.moe.planner.machine import BackboneTimes, Machine
    from coterie.moe.planner.measure import Say
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.store.base import ExpertStore
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
        return divisions(settings, needs_of(set(), site))

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
