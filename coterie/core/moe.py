"""Where MoE experts are kept and how they are moved: the settings, and what a request cost.

Plain values that the gateway can use and send.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from coterie.core.settings import key

WARMUPS = ("none", "heatmap", "hybrid")
PREDICTIONS = ("off", "protect", "prefetch", "auto")
READS = ("auto", "direct", "buffered")


@dataclass(frozen=True, slots=True)
class MoeSettings:
    """Where a mixture-of-experts model keeps its experts. A dense model takes none of these."""

    strategy: str = key(
        "auto",
        "text",
        "A strategy's name, `PREFILL+DECODE`, `layer_grouped:N`, or `auto` (the planner's choice).",
    )
    device_budget: str = key(
        "",
        "budget",
        "Device memory of KV and experts (`6GB`), or a share of all experts (`25%`); "
        "empty = what is free.",
    )
    host_budget: str = key(
        "",
        "budget",
        "RAM for experts beside the device's (`6GB`, `25%` of all, `0` = read from disk each "
        "time); empty = what is free.",
    )
    cache_capacity: int = key(
        0, "integer", "Experts the device holds; 0 = by `device_budget`.", low=0
    )
    warmup: str = key("heatmap", "text", "What is done before the first request.", among=WARMUPS)
    workload: str = key("default", "name", "Names the heatmap that is loaded and saved.")
    predict: str = key(
        "auto",
        "text",
        "What a guess at the next layer's experts is used for, by adaptive and by a GPU that reads "
        "experts from RAM.",
        among=PREDICTIONS,
    )
    reads: str = key("auto", "text", "How experts are read from disk.", among=READS)
    deterministic: bool = key(False, "flag", "Fix where each expert is computed.")
    elastic_memory: bool = key(
        False,
        "flag",
        "Let KV take memory of the device's expert slots while it needs more, and give it back.",
    )


# no setting was given
AUTOMATIC = MoeSettings()


# for one layer: its number, the experts it needed, and how many of them were in a device slot; a
# tuple instead of a dataclass, because every row of every step has one for each layer
LayerHits = tuple[int, int, int]


# where an expert is: one character of `MoeResidency.tiers`
ON_DISK, IN_RAM, ON_DEVICE, PINNED, ABSENT = "01234"


@dataclass(frozen=True, slots=True)
class MoeResidency:
    """Where each expert of an engine is at one moment, layer after layer."""

    layers: tuple[int, ...]
    num_experts: int
    # one character for each expert of each layer; the highest tier that holds it
    tiers: str
    # by layer: the share of demands that found their expert on the device; 0 without demands
    hit_rates: tuple[float, ...]
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class MoeUsage:
    """What the experts of one request (or step) cost. Seconds, bytes and counts.

    A demand is one expert of one layer that one step needs. `device_hits + prefetch_hits +
    device_misses + host_runs` is the number of demands.
    """

    device_hits: int = 0
    # first use of an expert that was loaded before it was needed
    prefetch_hits: int = 0
    # moved to the device because this step needed it
    device_misses: int = 0
    # computed on the host instead
    host_runs: int = 0
    # host lookups (for a move or a host run) that found the expert in RAM, and those that did not
    host_hits: int = 0
    host_misses: int = 0
    # host to device, and disk to host
    moved_bytes: int = 0
    read_bytes: int = 0
    routing_s: float = 0.0
    lookup_s: float = 0.0
    io_s: float = 0.0
    compute_s: float = 0.0
    # time in which nothing could be computed because data was still being moved; and its parts
    # that passed waiting for the disk, and for what the CPU computes beside a device
    stall_s: float = 0.0
    disk_s: float = 0.0
    cpu_s: float = 0.0
    # how often a strategy reconsidered its slots while the request ran, and the experts that were
    # exchanged by that
    updates: int = 0
    swaps: int = 0
    # one for each MoE layer, in order
    layers: tuple[LayerHits, ...] = ()

    @property
    def demands(self) -> int:
        return self.device_hits + self.prefetch_hits + self.device_misses + self.host_runs

    @property
    def fallback_rate(self) -> float:
        """Share of demands that no device slot could serve at once."""
        return (self.device_misses + self.host_runs) / max(self.demands, 1)

    def __add__(self, other: MoeUsage) -> MoeUsage:
        mine, theirs = self.layers, other.layers
        layers = mine or theirs
        if mine and theirs:
            layers = tuple(
                (layer, demands + more, hits + met)
                for (layer, demands, hits), (_, more, met) in zip(mine, theirs, strict=True)
            )
        counts = {name: getattr(self, name) + getattr(other, name) for name in USAGE_FIELDS}
        return MoeUsage(**counts, layers=layers)


# all fields that are one number
USAGE_FIELDS = tuple(item.name for item in fields(MoeUsage) if item.name != "layers")
