"""The metrics of models with routed experts, and which of an engine's stats each one shows.

Labels are bounded: tiers and phases, never experts; layers only as a summary.
"""

from __future__ import annotations

from coterie.obs.metric import Metric

EXPERT_METRICS = (
    Metric(
        "coterie_expert_demands", "counter",
        "Experts that layers asked for, by how they were met: from a device slot, from one filled "
        "ahead, after a move, or computed on the host.",
        ("replica", "met"),
    ),
    Metric(
        "coterie_expert_host_lookups", "counter",
        "Lookups in RAM for a move or a run on the host; a miss reads the disk.",
        ("replica", "result"),
    ),
    Metric("coterie_expert_bytes", "counter", "Bytes of experts moved.", ("replica", "way")),
    Metric(
        "coterie_expert_seconds", "counter",
        "Seconds spent on experts by phase; `io` overlaps with `compute`, `stall` does not.",
        ("replica", "phase"),
    ),
    Metric(
        "coterie_expert_changes", "counter", "Evictions, updates between tokens, and their swaps.",
        ("replica", "change"),
    ),
    Metric(
        "coterie_expert_fallbacks", "counter",
        "Since loading: allocations that failed (`shortage`), and whether less is in place than "
        "was asked for (`reduced`).",
        ("replica", "kind"),
    ),
    Metric(
        "coterie_expert_memory_bytes", "gauge",
        "Memory of each tier, and what all experts would take beyond both (`saved`).",
        ("replica", "tier"),
    ),
    Metric(
        "coterie_expert_fallback_rate", "gauge",
        "Share of demands that found no device slot filled, 0 to 1.", ("replica",),
    ),
    Metric(
        "coterie_expert_layer_hit_rate", "gauge",
        "Share of demands met from device slots, over the layers.", ("replica", "layer"),
    ),
)  # fmt: skip

# an engine's stat -> metric and its label behind the replica
EXPERT_SERIES: dict[str, tuple[str, ...]] = {
    "expert_device_hits": ("coterie_expert_demands", "device_hit"),
    "expert_prefetch_hits": ("coterie_expert_demands", "prefetch_hit"),
    "expert_device_misses": ("coterie_expert_demands", "device_miss"),
    "expert_host_runs": ("coterie_expert_demands", "host_run"),
    "expert_host_hits": ("coterie_expert_host_lookups", "hit"),
    "expert_host_misses": ("coterie_expert_host_lookups", "miss"),
    "expert_moved_bytes": ("coterie_expert_bytes", "host_to_device"),
    "expert_read_bytes": ("coterie_expert_bytes", "disk_to_host"),
    "expert_routing_s": ("coterie_expert_seconds", "routing"),
    "expert_lookup_s": ("coterie_expert_seconds", "lookup"),
    "expert_io_s": ("coterie_expert_seconds", "io"),
    "expert_compute_s": ("coterie_expert_seconds", "compute"),
    "expert_stall_s": ("coterie_expert_seconds", "stall"),
    "expert_device_evictions": ("coterie_expert_changes", "device_eviction"),
    "expert_host_evictions": ("coterie_expert_changes", "host_eviction"),
    "expert_updates": ("coterie_expert_changes", "update"),
    "expert_swaps": ("coterie_expert_changes", "swap"),
    "expert_shortages": ("coterie_expert_fallbacks", "shortage"),
    "expert_fallbacks": ("coterie_expert_fallbacks", "reduced"),
    "expert_device_bytes": ("coterie_expert_memory_bytes", "device"),
    "expert_host_bytes": ("coterie_expert_memory_bytes", "host"),
    "expert_saved_bytes": ("coterie_expert_memory_bytes", "saved"),
    "expert_fallback_rate": ("coterie_expert_fallback_rate",),
    "expert_lowest_hit_rate": ("coterie_expert_layer_hit_rate", "lowest"),
    "expert_median_hit_rate": ("coterie_expert_layer_hit_rate", "median"),
    "expert_highest_hit_rate": ("coterie_expert_layer_hit_rate", "highest"),
}
