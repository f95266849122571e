"""The metrics of adapters, and which of an engine's stats each one shows.

Labels are bounded: tiers and stages, and of single adapters only those that a worker tells (the
last 64 it loaded), by the first digits of their digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from coterie.obs.metric import Metric

# enough to tell installed adapters apart; names move, digests do not
DIGEST_DIGITS = 12

ADAPTER_METRICS = (
    Metric(
        "coterie_adapter_lookups", "counter",
        "Stacks of adapters that requests asked for, by where they were found.",
        ("replica", "tier"),
    ),
    Metric(
        "coterie_adapter_loads", "counter",
        "Adapters read from disk or found in RAM for a load, and stacks placed on the device.",
        ("replica", "tier"),
    ),
    Metric(
        "coterie_adapter_load_seconds", "counter",
        "Seconds of loading adapters by stage, beside the engine's steps.", ("replica", "stage"),
    ),
    Metric("coterie_adapter_failures", "counter", "Loads that failed.", ("replica",)),
    Metric("coterie_adapter_uses", "counter", "Times a stack was taken to run.", ("replica",)),
    Metric(
        "coterie_adapter_evictions", "counter", "Stacks or adapters that made room.",
        ("replica", "tier"),
    ),
    Metric("coterie_adapter_memory_bytes", "gauge", "Bytes held, by tier.", ("replica", "tier")),
    Metric("coterie_adapter_stacks", "gauge", "Stacks by state.", ("replica", "state")),
    Metric(
        "coterie_adapter_resident", "gauge",
        "1 while a stack with this adapter is on the device; of the adapters loaded last.",
        ("replica", "adapter"),
    ),
    Metric(
        "coterie_adapter_own_loads", "counter", "Loads of one adapter.", ("replica", "adapter")
    ),
    Metric(
        "coterie_adapter_own_load_seconds", "counter", "Seconds of one adapter's loads by stage.",
        ("replica", "adapter", "stage"),
    ),
)  # fmt: skip

# those with a label per adapter: set anew from what a worker tells
OWN_METRICS = (
    "coterie_adapter_resident",
    "coterie_adapter_own_loads",
    "coterie_adapter_own_load_seconds",
)

# an engine's stat -> metric and its label behind the replica
ADAPTER_SERIES: dict[str, tuple[str, ...]] = {
    "adapter_lookups_device": ("coterie_adapter_lookups", "device"),
    "adapter_lookups_host": ("coterie_adapter_lookups", "host"),
    "adapter_lookups_disk": ("coterie_adapter_lookups", "disk"),
    "adapter_loads": ("coterie_adapter_loads", "device"),
    "adapter_loads_host": ("coterie_adapter_loads", "host"),
    "adapter_loads_disk": ("coterie_adapter_loads", "disk"),
    "adapter_load_disk_s": ("coterie_adapter_load_seconds", "disk"),
    "adapter_compose_s": ("coterie_adapter_load_seconds", "compose"),
    "adapter_place_s": ("coterie_adapter_load_seconds", "place"),
    "adapter_hits": ("coterie_adapter_uses",),
    "adapter_evictions": ("coterie_adapter_evictions", "device"),
    "adapter_host_evictions": ("coterie_adapter_evictions", "host"),
    "adapter_resident_bytes": ("coterie_adapter_memory_bytes", "device"),
    "adapter_host_bytes": ("coterie_adapter_memory_bytes", "host"),
    "adapter_resident": ("coterie_adapter_stacks", "resident"),
    "adapter_loading": ("coterie_adapter_stacks", "loading"),
    "adapter_failures": ("coterie_adapter_failures",),
}


class Load(Protocol):
    """One adapter's loads, as a worker tells them."""

    @property
    def digest(self) -> str: ...
    @property
    def resident(self) -> bool: ...
    @property
    def loads(self) -> int: ...
    @property
    def disk_s(self) -> float: ...
    @property
    def compose_s(self) -> float: ...
    @property
    def place_s(self) -> float: ...


def own_series(replica: str, loads: Iterable[Load]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """(metric, labels, value) of every adapter that a worker tells."""
    resident, count, seconds = OWN_METRICS
    for load in loads:
        labels = (replica, load.digest[:DIGEST_DIGITS])
        yield resident, labels, float(load.resident)
        yield count, labels, float(load.loads)
        for stage in ("disk", "compose", "place"):
            yield seconds, (*labels, stage), getattr(load, f"{stage}_s")
