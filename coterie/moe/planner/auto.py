"""`--strategy auto`: calls the planner with what is known when experts are opened."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from coterie.core.errors import ConfigError
from coterie.moe.planner.machine import load
from coterie.moe.planner.measure import ComputeTarget, ensure_measured, identity, profile_name
from coterie.moe.planner.plan import (
    PlanCase,
    PlanChoice,
    PlannedModel,
    choose,
    choose_in_place,
    divisions,
)
from coterie.moe.planner.workload import assumed_workload, workload_from_heatmap
from coterie.moe.runtime.budget import AUTO_SHARE
from coterie.moe.runtime.setup import allocation_for, needs_of, reads_in_place, sizes_of

if TYPE_CHECKING:
    from coterie.core.moe import MoeSettings
    from coterie.moe.dispatch.base import ExpertCosts
    from coterie.moe.planner.machine import Machine
    from coterie.moe.runtime.setup import PlacementContext
    from coterie.moe.store.base import ExpertStore

_log = logging.getLogger(__name__)


def chooser(store: ExpertStore, settings: MoeSettings, site: PlacementContext) -> MoeSettings:
    """The settings with a strategy and the division of memory that it was chosen for. Measures a
    machine that was never measured (a few seconds), unless no expert has to move."""
    unmoved = unmoved_strategy(store, settings, site)
    if unmoved is not None:
        return replace(settings, strategy=unmoved)
    in_place = replace(settings, strategy="adaptive")
    if _is_read_in_place(store, in_place, site):
        return replace(settings, strategy=_strategy_in_place(store, settings, site))
    best = choice(store, settings, site)
    return replace(
        settings,
        strategy=best.strategy,
        device_budget=best.device_budget,
        host_budget=best.host_budget,
    )


def _is_read_in_place(store: ExpertStore, settings: MoeSettings, site: PlacementContext) -> bool:
    """Whether a GPU reads misses from RAM: adaptive moves no more there than pays."""
    try:
        return reads_in_place(store, settings, site, allocation_for(store, settings, site))
    except ConfigError:
        return False


def unmoved_strategy(
    store: ExpertStore, settings: MoeSettings, site: PlacementContext
) -> str | None:
    """The strategy for when no budget is set and memory holds every expert: none has to move."""
    if settings.device_budget or settings.host_budget or settings.cache_capacity:
        return None
    needs = needs_of((), site)
    free = int(needs.free_device_bytes * AUTO_SHARE) - needs.kv_bytes
    if store.slot_bytes * store.geometry.total > free:
        return None
    return "cpu_only" if needs.one_memory else "persistent"


def _strategy_in_place(store: ExpertStore, settings: MoeSettings, site: PlacementContext) -> str:
    """adaptive, which moves no more there than pays; another one where this machine was measured
    and the planner expects clearly more of it."""
    target = _target(site)
    machine = load(identity(target))
    if machine is None or profile_name(store, target) not in machine.device_paths:
        return "adaptive"
    best = choose_in_place(_case(store, site, machine), divisions(settings, needs_of((), site))[0])
    _log.info("strategy %s: kernels read over the link what has no slot", best)
    return best


def choice(store: ExpertStore, settings: MoeSettings, site: PlacementContext) -> PlanChoice:
    machine = ensure_measured(store, _target(site), say=_log.info)
    case = _case(store, site, machine)
    best = choose(case, divisions(settings, needs_of((), site)))
    known = case.model.backbone is not None
    _log.info("strategy %s%s", best.reason, "" if known else " (experts alone, without attention)")
    return best


def _case(store: ExpertStore, site: PlacementContext, machine: Machine) -> PlanCase:
    known = site.heatmap
    if known is not None and known.total() > 0:
        work = workload_from_heatmap(known, "drawn from the recorded heatmap")
    else:
        work = assumed_workload(store.geometry)
    name = profile_name(store, _target(site))
    times = machine.backbones.get(name)
    model = PlannedModel(store.geometry, sizes_of(store), backbone=times)
    return PlanCase(model, machine, name, work)


def known_costs(store: ExpertStore, device: str) -> ExpertCosts | None:
    """The costs that strategies use, if this machine was measured. Measures nothing."""
    target = ComputeTarget(device, torch.get_num_threads())
    machine = load(identity(target))
    profile = machine.profiles.get(profile_name(store, target)) if machine else None
    return profile.costs() if profile else None


def _target(site: PlacementContext) -> ComputeTarget:
    return ComputeTarget(str(site.device), torch.get_num_threads())
