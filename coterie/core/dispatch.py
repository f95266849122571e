"""Where experts may live and how they are moved: the user's wishes, and what a request cost.

Plain values that a gateway may hold and send. Knows no strategy by what it does, only its name.
"""

from __future__ import annotations

from dataclasses import dataclass

WARMUPS = ("none", "heatmap", "hybrid")
PREDICTIONS = ("off", "protect", "prefetch", "auto")
READS = ("auto", "direct", "buffered")


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Budgets are sizes ("6GB"), shares of all experts ("25%") or "" for automatic."""

    # a name, PREFILL+DECODE, layer_grouped:N, or auto (the planner's choice)
    strategy: str = "auto"
    device_budget: str = ""
    host_budget: str = ""
    # device slots as a number of experts; 0 = by device_budget
    cache_capacity: int = 0
    warmup: str = "heatmap"
    # names the heatmap that is loaded and saved
    workload: str = "default"
    predict: str = "auto"
    reads: str = "auto"
    # fixes where each expert is computed
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """What the experts of one request (or step) cost. Seconds, bytes and counts.

    A demand is one expert of one layer that one step needs. `device_hits + prefetch_hits +
    device_misses + host_runs` is the number of demands.
    """

    device_hits: int = 0
    # first use of something that was loaded before it was asked for
    prefetch_hits: int = 0
    # moved to the device because this step asked for it
    device_misses: int = 0
    # computed on the host instead
    host_runs: int = 0
    # host lookups (for a move or a host run) that found the expert in RAM, and that did not
    host_hits: int = 0
    host_misses: int = 0
    # host to device, and disk to host
    moved_bytes: int = 0
    read_bytes: int = 0
    routing_s: float = 0.0
    lookup_s: float = 0.0
    io_s: float = 0.0
    compute_s: float = 0.0
    # time in which nothing could be computed because bytes were awaited
    stall_s: float = 0.0
