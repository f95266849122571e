"""Where each expert is, for people who look: one character for each, by the highest tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.core.moe import ABSENT, IN_RAM, ON_DEVICE, ON_DISK, PINNED, MoeResidency

if TYPE_CHECKING:
    from coterie.moe.runtime.runtime import ExpertRuntime

# experts of the largest map that is made: it is sent between processes
MAX_EXPERTS = 65_536


def residency(runtime: ExpertRuntime) -> MoeResidency | None:
    """None if the map would be too large. Called between two steps."""
    parts, geometry = runtime.parts, runtime.geometry
    if len(geometry.layers) * geometry.num_experts > MAX_EXPERTS:
        return None
    device, pinned = frozenset(parts.device.keys()), parts.slots.pinned()
    rows: list[str] = []
    rates: list[float] = []
    counts = runtime.telemetry.layers
    for layer in geometry.layers:
        in_ram = runtime.in_ram(layer)
        present = frozenset(geometry.present(layer))
        for expert in range(geometry.num_experts):
            key = layer, expert
            if expert not in present:
                rows.append(ABSENT)
            elif key in device:
                rows.append(PINNED if key in pinned else ON_DEVICE)
            else:
                rows.append(IN_RAM if expert in in_ram else ON_DISK)
        counted = counts[layer]
        hits = counted.device_hits + counted.prefetch_hits
        demands = hits + counted.device_misses + counted.host_runs
        rates.append(round(hits / demands, 3) if demands else 0.0)
    return MoeResidency(
        geometry.layers, geometry.num_experts, "".join(rows), tuple(rates), parts.strategy
    )
