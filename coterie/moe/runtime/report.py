"""A runtime's counters as one plain value, for `--report`, metrics and tests. Counts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.moe.runtime.runtime import ExpertRuntime


def report(runtime: ExpertRuntime) -> dict[str, Any]:
    """Per tier, per layer and in all; names as in ExpertUsage. `fallback_rate` is the share of
    demands that found nothing on the device: moved now, or computed on the host."""
    parts, total = runtime.parts, runtime.telemetry.total()
    asked = total.device_hits + total.prefetch_hits + total.device_misses + total.host_runs
    late = total.device_misses + total.host_runs
    held = parts.device.budget_bytes + parts.host.budget_bytes
    return {
        "strategy": parts.strategy,
        "asked": parts.asked,
        "fallback": parts.fallback,
        "shortages": parts.shortages,
        "demands": asked,
        "hit_rate": (total.device_hits + total.prefetch_hits) / asked if asked else 0.0,
        "fallback_rate": late / asked if asked else 0.0,
        "dcu_calls": runtime.update_calls,
        "swaps": runtime.swaps,
        "prediction": runtime.predictor.report(),
        "total": total.as_dict(),
        "tiers": {"device": _device(runtime), "host": _host(runtime)},
        "layers": {layer: _layer(runtime, layer) for layer in runtime.geometry.layers},
        "expert_bytes": parts.store.expert_bytes,
        "memory_saved_bytes": max(0, parts.store.expert_bytes - held),
    }


def _device(runtime: ExpertRuntime) -> dict[str, float]:
    tier, total = runtime.parts.device, runtime.telemetry.total()
    return {
        "slots": tier.num_slots,
        "budget_bytes": tier.budget_bytes,
        "resident": len(tier.keys()),
        "hits": total.device_hits + total.prefetch_hits,
        "prefetch_hits": total.prefetch_hits,
        "misses": total.device_misses,
        "evictions": sum(tier.evictions.values()),
        "moved_bytes": total.moved_bytes,
        "stall_s": total.stall_s,
    }


def _host(runtime: ExpertRuntime) -> dict[str, float]:
    tier, total = runtime.parts.host, runtime.telemetry.total()
    return {
        "slots": tier.num_slots,
        "budget_bytes": tier.budget_bytes,
        "used_bytes": tier.used_bytes,
        "hits": total.host_hits,
        "misses": total.host_misses,
        "evictions": sum(tier.evictions.values()),
        "read_bytes": total.read_bytes,
        "io_s": total.io_s,
    }


def _layer(runtime: ExpertRuntime, layer: int) -> dict[str, float]:
    evicted = runtime.parts.device.evictions[layer], runtime.parts.host.evictions[layer]
    counted = runtime.telemetry.layers[layer].as_dict()
    return counted | {"device_evictions": evicted[0], "host_evictions": evicted[1]}
