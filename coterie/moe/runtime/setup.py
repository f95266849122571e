"""Builds the parts of a runtime: which strategies run, and with how many slots.

It decides from settings and free memory only, and loads nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from coterie.core.errors import ConfigError
from coterie.kernels.backend import best_backend
from coterie.moe.dispatch.active_only import ActiveOnly
from coterie.moe.dispatch.base import ExpertCosts, Strategy, StrategyContext
from coterie.moe.dispatch.lru import Lru
from coterie.moe.dispatch.persistent import split_layers
from coterie.moe.dispatch.table import build_strategies, resolve_strategy, strategy_classes
from coterie.moe.runtime.budget import (
    ExpertSizes,
    TierNeeds,
    TierSlots,
    fits_bank,
    free_host_bytes,
    size_tiers,
    with_buffers,
)
from coterie.moe.runtime.host_bank import HostBank, has_device_records
from coterie.moe.runtime.layer_stream import buffer_slots
from coterie.moe.runtime.slabs import KvBlocks, SlabLayout, plan_slabs
from coterie.moe.runtime.slot_map import SlotMap
from coterie.moe.runtime.tiers import DeviceTier, HostTier

if TYPE_CHECKING:
    from coterie.core.moe import MoeSettings
    from coterie.moe.runtime.heatmap import Heatmap
    from coterie.moe.store.base import ExpertGeometry, ExpertStore

_log = logging.getLogger(__name__)

# chooses for `auto`: (store, settings, site) -> settings with a strategy and its budgets
StrategyChooser = Callable[["ExpertStore", "MoeSettings", "PlacementContext"], "MoeSettings"]


@dataclass(frozen=True, slots=True)
class PlacementContext:
    """Where experts are to be placed, and what is known about the machine."""

    device: torch.device
    # one full context's KV, reserved before experts
    kv_bytes: int = 0
    heatmap: Heatmap | None = None
    # measured on this machine; None = estimated from sizes
    costs: ExpertCosts | None = None
    chooser: StrategyChooser | None = None
    # the KV that shares the device's memory with experts and is part of `kv_bytes`; None: none does
    kv: KvBlocks | None = None


@dataclass(frozen=True, slots=True)
class RuntimeParts:
    """What a runtime is made of."""

    store: ExpertStore
    host: HostTier
    device: DeviceTier
    slots: SlotMap
    # by phase
    strategies: dict[str, Strategy]
    # as it runs, fallbacks applied
    strategy: str
    predict: str
    # the strategy in the settings, why another one runs, and how many allocations failed
    asked: str = ""
    fallback: str = ""
    shortages: int = 0
    # all experts in RAM, where the device reads them; the host tier then has no slots
    bank: HostBank | None = None
    # what KV may take of the device's slots
    slabs: SlabLayout | None = None

    @property
    def host_slots(self) -> int:
        return self.host.num_slots if self.bank is None else self.store.geometry.total

    @property
    def host_bytes(self) -> int:
        return self.host.budget_bytes if self.bank is None else self.bank.nbytes


@dataclass(frozen=True, slots=True)
class TierAllocation:
    """How many slots the tiers get, and which allocations have failed so far."""

    tiers: TierSlots
    needs: TierNeeds
    failed: tuple[str, ...] = ()

    def reduced(self, geometry: ExpertGeometry, problem: Exception) -> TierAllocation:
        """What to try after `problem`: room for one of two groups of layers if there was room for
        all experts, otherwise half. Raises when it cannot be reduced further."""
        tiers, needs = self.tiers, self.needs
        on_device = isinstance(problem, torch.OutOfMemoryError) or "CUDA" in str(problem)
        device, host = tiers.device, tiers.host
        if needs.one_memory or on_device:
            groups = split_layers(geometry, 2)
            group = max(sum(len(geometry.present(layer)) for layer in each) for each in groups)
            half = group if group < device >= geometry.total else device // 2
            device = max(half, int(needs.device))
        if needs.one_memory or not on_device:
            host = max(0, geometry.total // 2 - device) if tiers.shared else host // 2
            host = max(host, int(needs.host))
        if (device, host) == (tiers.device, tiers.host):
            raise ConfigError(
                f"not even {device} device and {host} host slots for experts could be allocated: "
                f"{problem}",
                param="device_budget",
            ) from problem
        return TierAllocation(TierSlots(device, host), needs, (*self.failed, str(problem)))


def allocation_for(
    store: ExpertStore, settings: MoeSettings, site: PlacementContext
) -> TierAllocation:
    """The slots that the budgets give. `settings` must name a strategy."""
    needs = needs_of(strategy_classes(settings.strategy), site)
    return TierAllocation(size_tiers(settings, sizes_of(store), needs), needs)


def allocate_parts(
    store: ExpertStore, settings: MoeSettings, site: PlacementContext, room: TierAllocation
) -> RuntimeParts:
    """Allocate the memory. Raises what the allocator raises when there is not enough."""
    bank = _open_bank(store, settings, site, room)
    try:
        return _parts_with(store, settings, site, room, bank)
    except BaseException:
        if bank is not None:
            bank.close()
        raise


def reads_in_place(
    store: ExpertStore, settings: MoeSettings, site: PlacementContext, room: TierAllocation
) -> bool:
    """Whether the device can read experts that have no slot from RAM, which holds all."""
    tiers, total = room.tiers, store.geometry.total
    beside = tiers.host >= total > tiers.device and best_backend(site.device) == "triton"
    if not beside or not has_device_records(store):
        return False
    return fits_bank(settings, sizes_of(store), room.needs)


def _open_bank(
    store: ExpertStore, settings: MoeSettings, site: PlacementContext, room: TierAllocation
) -> HostBank | None:
    """All experts for the device's kernels, where RAM has room for them and not all have slots."""
    if not reads_in_place(store, settings, site, room):
        return None
    bank = HostBank(store, site.device)
    if bank.address is not None:
        return bank
    bank.close()
    _log.warning("RAM could not be pinned for the device: experts run layer by layer")
    return None


def _parts_with(
    store: ExpertStore,
    settings: MoeSettings,
    site: PlacementContext,
    room: TierAllocation,
    bank: HostBank | None,
) -> RuntimeParts:
    buffers = 0
    if bank is not None:
        wanted = buffer_slots(store.geometry)
        ahead = int(prefetches_in_place(settings, room.tiers.device))
        count, buffers = with_buffers(settings, room.tiers.device, wanted + ahead)
        if not buffers:
            # prompts first
            count, buffers = with_buffers(settings, room.tiers.device, wanted)
        room = replace(room, tiers=replace(room.tiers, device=count))
    tiers = room.tiers
    text, why = _fitting_strategy(settings.strategy, store, room)
    slabs = None if site.kv is None else _slabs(store, tiers, buffers, text, site.kv)
    beside = 0 if slabs is None else slabs.nbytes - slabs.before
    slots = SlotMap(tiers.device)
    costs = site.costs or estimated_costs(store, site.device)
    context = StrategyContext(
        geometry=store.geometry,
        slots=slots,
        heatmap=site.heatmap,
        costs=costs.with_host(tiers.host / store.geometry.total, shared=tiers.shared),
        host_can_run=tiers.host > 0,
        deterministic=settings.deterministic,
        in_place_bytes=0 if bank is None else store.slot_bytes,
    )
    prefill, decode = build_strategies(text, context)
    on_cuda = site.device.type == "cuda"
    # a prefetch depends on when the link is idle: a deterministic placement may only protect
    protect_only = settings.deterministic and settings.predict != "off" and uses_hints(decode)
    device = DeviceTier(
        store, tiers.device, site.device, shared=tiers.shared, buffers=buffers, beside=beside
    )
    try:
        host = HostTier(store, 0 if bank is not None else tiers.host, pinned=on_cuda)
    except BaseException:
        device.close()
        raise
    return RuntimeParts(
        store=store,
        host=host,
        device=device,
        slots=slots,
        strategies={"prefill": prefill, "decode": decode},
        strategy=text,
        predict="protect" if protect_only else settings.predict,
        asked=settings.strategy,
        fallback=why,
        shortages=len(room.failed),
        bank=bank,
        slabs=slabs,
    )


def _slabs(
    store: ExpertStore, tiers: TierSlots, buffers: int, strategy: str, kv: KvBlocks
) -> SlabLayout:
    """How experts and KV share the device's memory. Raises where slots have none of their own, or
    where an expert without a slot would not be found."""
    problem = ""
    if tiers.shared:
        problem = (
            "device slots refer to experts in RAM here and take no memory that KV could use; "
            "it needs a CUDA device, or budgets that hold fewer than all experts"
        )
    elif tiers.device >= store.geometry.total:
        problem = (
            "every expert has a slot and no other place; give a device_budget that holds fewer"
        )
    elif tiers.device == 0:
        problem = (
            f"{strategy} runs here and has no device slots that KV could use; give a "
            "device_budget or a cache_capacity that holds some of the experts, not all, beside "
            "KV's own part, and a strategy with slots, such as adaptive"
        )
    if problem:
        raise ConfigError(f"elastic_memory: {problem}", param="elastic_memory")
    least = max(kind.least_slots(store.geometry) for kind in strategy_classes(strategy))
    return plan_slabs(kv, store.slot_bytes, tiers.device, buffers, least)


def choose_strategy(
    store: ExpertStore, settings: MoeSettings, site: PlacementContext
) -> MoeSettings:
    if settings.strategy != "auto":
        return settings
    if site.chooser is not None:
        return site.chooser(store, settings, site)
    limited = settings.device_budget or settings.cache_capacity
    name = "adaptive" if limited or site.device.type == "cuda" else "cpu_only"
    return replace(settings, strategy=name)


def sizes_of(store: ExpertStore) -> ExpertSizes:
    return ExpertSizes(store.geometry.total, store.slot_bytes, store.expert_bytes)


def needs_of(kinds: Sequence[type[Strategy]], site: PlacementContext) -> TierNeeds:
    on_cuda = site.device.type == "cuda"
    free_host = free_host_bytes()
    return TierNeeds(
        device=any(kind.needs_device for kind in kinds),
        host=any(kind.runs_on_host for kind in kinds),
        free_device_bytes=torch.cuda.mem_get_info(site.device)[0] if on_cuda else free_host,
        free_host_bytes=free_host,
        kv_bytes=site.kv_bytes,
        one_memory=not on_cuda,
    )


def _fitting_strategy(text: str, store: ExpertStore, room: TierAllocation) -> tuple[str, str]:
    """The strategy that runs (the fallback where there are too few slots), and why."""
    geometry, tiers, reasons = store.geometry, room.tiers, []
    if room.failed:
        reasons.append(
            f"memory could not be allocated ({room.failed[-1]}): "
            f"cut to {tiers.device} device and {tiers.host} host slots"
        )
    runs = resolve_strategy(text, geometry, tiers.device)
    largest = max(len(geometry.present(layer)) for layer in geometry.layers)
    waves = ", a layer in waves" if largest > tiers.device else ""
    for kind in dict.fromkeys(strategy_classes(text)):
        if (least := kind.least_slots(geometry)) > tiers.device:
            reasons.append(
                f"{kind.name} needs {least} slots and has {tiers.device}: running {runs}{waves}"
            )
    why = "; ".join(reasons)
    if why:
        _log.warning("%s", why)
    return runs, why


def prefetches_in_place(settings: MoeSettings, slots: int) -> bool:
    """Whether a device that reads experts where they lie copies some ahead, into a buffer: by
    itself only where no expert has a slot. With a quarter in slots a copy takes from the CPU's
    reads what it gives to the link. `settings` must name a strategy."""
    asked = settings.predict == "prefetch" or (settings.predict == "auto" and slots == 0)
    # these bring what they miss to slots themselves
    places = slots > 0 and strategy_classes(settings.strategy)[1] in (Lru, ActiveOnly)
    return asked and not settings.deterministic and not places


def uses_hints(strategy: Strategy) -> bool:
    """Whether predictions of the next layer's experts change anything that it does."""
    kind = type(strategy)
    takes = kind.protect is not Strategy.protect or kind.prefetch is not Strategy.prefetch
    return takes and not strategy.settled()


def unused_hints(parts: RuntimeParts, few: bool) -> str:
    """Why predictions have no effect here. Logs a warning where the settings ask for them."""
    name = parts.strategies["decode"].name
    if parts.bank is not None:
        why = "the device reads experts where they lie"
        if parts.device.buffers > buffer_slots(parts.store.geometry):
            # what it reads ahead by itself is told in the report
            return why
    elif not few:
        why = "every expert has a slot, or none has"
    elif parts.strategies["decode"].settled():
        why = f"{name} moves nothing while it decodes"
    else:
        why = f"{name} takes no guesses; adaptive does"
    if parts.predict == "prefetch" and parts.bank is not None:
        # the CPU may get hints
        _log.warning("predict is prefetch and nothing is copied ahead: %s", why)
    elif parts.predict in ("protect", "prefetch"):
        _log.warning("predict is %s and has no effect: %s", parts.predict, why)
    return why


def estimated_costs(store: ExpertStore, device: torch.device) -> ExpertCosts:
    """Typical rates of a desktop: RAM 10 GB/s for one expert, link 20 GB/s, disk 2 GB/s."""
    size = store.slot_bytes
    fast = 1e12 if device.type == "cuda" else 1e10
    return ExpertCosts(size / 2e10, size / fast, size / 1e10, size / 2e9)
