"""How many experts each tier may hold: slots calculated from the user's budgets.

A device budget in bytes includes the KV of one full context; shares and counts are experts only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.core.errors import ConfigError
from coterie.core.settings import parse_bytes

if TYPE_CHECKING:
    from coterie.core.moe import MoeSettings

# share of the free memory to use when no budget is given; the rest is for activations and others
AUTO_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of a store that budgets need."""

    total: int
    slot_bytes: int
    expert_bytes: int


@dataclass(frozen=True, slots=True)
class TierNeeds:
    """Which tiers the strategies use, and how much memory is free for each."""

    device: bool
    host: bool
    free_device_bytes: int
    free_host_bytes: int
    # one full context's KV, reserved before experts
    kv_bytes: int = 0
    # the device tier is in RAM too (no accelerator)
    one_memory: bool = True
    # of captured graphs, reserved before experts
    graph_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        return self.kv_bytes + self.graph_bytes


@dataclass(frozen=True, slots=True)
class TierSlots:
    device: int
    host: int
    # one memory that holds every expert once: device slots refer to the host's records
    shared: bool = False


def size_tiers(settings: MoeSettings, sizes: ExpertSizes, needs: TierNeeds) -> TierSlots:
    """Slots of both tiers. A budget that is too small for one expert is refused if its tier is
    needed."""
    device = min(_device_slots(settings, sizes, needs), sizes.total)
    if needs.device and device == 0:
        least = needs.reserved_bytes + sizes.slot_bytes
        raise ConfigError(
            f"device_budget {settings.device_budget or 'auto'} holds no expert: one context's KV "
            f"and one expert take {least:,} bytes",
            param="device_budget",
        )
    host = min(_host_slots(settings, sizes, needs, device), sizes.total)
    if needs.host and host == 0:
        raise ConfigError(
            f"host_budget {settings.host_budget or 'auto'} holds no expert: one takes "
            f"{sizes.slot_bytes:,} bytes and strategy {settings.strategy} computes on the host",
            param="host_budget",
        )
    return in_one_memory(device, host, sizes.total) if needs.one_memory else TierSlots(device, host)


def graph_room(
    settings: MoeSettings, sizes: ExpertSizes, needs: TierNeeds, graph_bytes: int
) -> int:
    """What captured graphs take from the device's budget: nothing where they would displace the
    last experts, or where a step reads experts from disk and cannot be captured."""
    if not graph_bytes or needs.one_memory:
        return 0
    whole = replace(needs, device=True, host=False, graph_bytes=graph_bytes)
    try:
        slots = size_tiers(settings, sizes, whole)
        alone = size_tiers(settings, sizes, replace(whole, graph_bytes=0))
    except ConfigError:
        return 0
    if slots.device < sizes.total <= alone.device:
        return 0
    beside = slots.host >= sizes.total and fits_bank(settings, sizes, needs)
    return graph_bytes if slots.device >= sizes.total or beside else 0


def fits_bank(settings: MoeSettings, sizes: ExpertSizes, needs: TierNeeds) -> bool:
    """Whether RAM has room for all experts in places of equal size."""
    return sizes.total * sizes.slot_bytes <= host_room(settings, needs)


def with_buffers(settings: MoeSettings, slots: int, buffers: int) -> tuple[int, int]:
    """Slots, and slots that are buffers for prompts. A share or a number of experts is meant
    without buffers; bytes are for both, and without a slot left there are no buffers."""
    text = settings.device_budget
    if settings.cache_capacity or text.endswith("%") or not (slots or text):
        return slots, buffers
    return (slots - buffers, buffers) if slots > buffers else (slots, 0)


def in_one_memory(device: int, host: int, total: int) -> TierSlots:
    """Both tiers are in RAM: if together they have room for all experts, none is stored twice."""
    shared = device > 0 and host > 0 and device + host >= total
    return TierSlots(device, total if shared else host, shared)


def _device_slots(settings: MoeSettings, sizes: ExpertSizes, needs: TierNeeds) -> int:
    if not needs.device:
        return 0
    if settings.cache_capacity:
        return settings.cache_capacity
    text = settings.device_budget
    if text.endswith("%"):
        return share(text, sizes.total, "device_budget")
    if text:
        free = parse_bytes(text, "device_budget") - needs.reserved_bytes
        return max(0, free) // sizes.slot_bytes
    free = needs.free_device_bytes
    if needs.one_memory:
        free //= 2
    return max(0, int(free * AUTO_SHARE) - needs.reserved_bytes) // sizes.slot_bytes


def _host_slots(settings: MoeSettings, sizes: ExpertSizes, needs: TierNeeds, device: int) -> int:
    text = settings.host_budget
    if text.endswith("%"):
        return share(text, sizes.total, "host_budget")
    if text:
        return _fitting(parse_bytes(text, "host_budget"), sizes)
    if device >= sizes.total and not needs.host:
        return 0
    free = int(needs.free_host_bytes * AUTO_SHARE)
    if needs.one_memory:
        free -= device * sizes.slot_bytes + needs.kv_bytes
    return max(_fitting(free, sizes), int(needs.host))


def host_room(settings: MoeSettings, needs: TierNeeds) -> int:
    """Bytes of RAM that experts may take beside the device."""
    text = settings.host_budget
    if text and not text.endswith("%"):
        return parse_bytes(text, "host_budget")
    return int(needs.free_host_bytes * AUTO_SHARE)


def _fitting(budget_bytes: int, sizes: ExpertSizes) -> int:
    # records may differ in size: when all fit, each has a place of exactly its size
    if budget_bytes >= sizes.expert_bytes:
        return sizes.total
    return max(0, budget_bytes) // sizes.slot_bytes


def share(text: str, total: int, param: str) -> int:
    """`25%` of all experts; at least one, unless it is 0%."""
    try:
        percent = float(text[:-1])
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ConfigError(f"{param} is {text!r}; write 6GB or 25%", param=param)
    return max(int(total * percent / 100), int(percent > 0))


def free_host_bytes() -> int:
    """RAM that can be allocated without swapping, inside this container."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _number(path: str) -> int | None:
    file = Path(path)
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdigit() else None
