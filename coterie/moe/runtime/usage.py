"""What experts cost: counts, bytes and seconds per layer, per step and per sequence.

The counts of a sequence are its own demands (an expert that two sequences need counts for both).
Its bytes and seconds are its share, so that all shares add up to the step's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.moe import USAGE_FIELDS, LayerHits, MoeUsage

if TYPE_CHECKING:
    from coterie.moe.runtime.step import DemandClasses, ExpertStep
    from coterie.moe.store.base import ExpertGeometry

# what a tally counts; updates belong to no layer
FIELDS = tuple(name for name in USAGE_FIELDS if name not in ("updates", "swaps"))
_ROW = {name: row for row, name in enumerate(FIELDS)}
# the demands of a step that was counted as a whole
_MET = [_ROW[name] for name in ("device_hits", "device_misses", "host_runs")]


class UsageTally:
    """`MoeUsage` while it is being counted."""

    # class attributes until they are counted: one of these is made per layer of every token
    device_hits = prefetch_hits = device_misses = host_runs = 0
    host_hits = host_misses = moved_bytes = read_bytes = 0
    routing_s = lookup_s = io_s = compute_s = stall_s = disk_s = cpu_s = 0.0

    def add(self, other: UsageTally) -> None:
        # written out: this runs twice per layer of every token
        self.device_hits += other.device_hits
        self.prefetch_hits += other.prefetch_hits
        self.device_misses += other.device_misses
        self.host_runs += other.host_runs
        self.host_hits += other.host_hits
        self.host_misses += other.host_misses
        self.moved_bytes += other.moved_bytes
        self.read_bytes += other.read_bytes
        self.routing_s += other.routing_s
        self.lookup_s += other.lookup_s
        self.io_s += other.io_s
        self.compute_s += other.compute_s
        self.stall_s += other.stall_s
        self.disk_s += other.disk_s
        self.cpu_s += other.cpu_s

    def usage(self, layers: tuple[LayerHits, ...]) -> MoeUsage:
        return MoeUsage(**{name: getattr(self, name) for name in FIELDS}, layers=layers)

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in FIELDS}


def _tally(values: Sequence[float]) -> UsageTally:
    """Of values in the order of FIELDS; seconds are fractions, all else is whole."""
    found = UsageTally()
    for name, value in zip(FIELDS, values, strict=True):
        if value:
            setattr(found, name, value if name.endswith("_s") else int(value))
    return found


class LayerTally(UsageTally):
    """The counts of one running layer, and when it waited for bytes. Two threads may add waits."""

    def __init__(self) -> None:
        self.waits: list[tuple[float, float]] = []
        # those of `waits` that were for the disk
        self.disk_waits: list[tuple[float, float]] = []

    def waited(self, begin: float, *, disk: bool) -> None:
        wait = begin, time.perf_counter()
        self.waits.append(wait)
        if disk:
            self.disk_waits.append(wait)


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """When a layer ran, or when a part of it did: `what` is layer, device, host or wait."""

    layer: int
    what: str
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def merged_intervals(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as disjoint ones in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def seconds_outside(
    waits: Iterable[tuple[float, float]], work: Iterable[tuple[float, float]]
) -> float:
    """Seconds of `waits` in which no `work` was done."""
    busy = merged_intervals(work)
    alone = 0.0
    for begin, end in merged_intervals(waits):
        alone += end - begin
        alone -= sum(max(0.0, min(end, b) - max(begin, a)) for a, b in busy)
    return alone


class UsageTelemetry:
    """Totals by layer since start, and the costs of the running step."""

    def __init__(self, geometry: ExpertGeometry) -> None:
        self._layers = {layer: UsageTally() for layer in geometry.layers}
        # [fields, layers]: of the last step that was counted as a whole, and sums of all such
        self._whole, self._wholes = np.zeros((2, len(FIELDS), len(self._layers)))
        self._place = {layer: place for place, layer in enumerate(geometry.layers)}
        self._num_experts = geometry.num_experts
        self._step = UsageTally()
        # of the running step, when the owners of its rows are known
        self._sequences: list[UsageTally] = []
        # [layers, 2] and [sequences, layers, 2]: demanded experts, and those in a device slot
        self._nothing = np.zeros((len(self._layers), 2), dtype=np.int64)
        self._met, self._own_met = self._nothing.copy(), self._nothing[None][:0]

    @property
    def layers(self) -> dict[int, UsageTally]:
        """Totals since start, by layer."""
        found = {}
        for (layer, tally), sums in zip(self._layers.items(), self._wholes.T.tolist(), strict=True):
            found[layer] = _tally(sums)
            found[layer].add(tally)
        return found

    def outside_steps(self, layer: int) -> UsageTally:
        """Takes counts of a layer that belong to no step."""
        return self._layers[layer]

    def add_step(self, counts: Mapping[str, NDArray[np.generic]]) -> UsageTally:
        """Count a whole step: by field, [layers]. Returns its sums. All layers at once, because the
        host has little time between two steps of a device."""
        step = self._whole
        step[:] = 0
        for name, values in counts.items():
            step[_ROW[name]] = values
        self._wholes += step
        hits, misses, on_host = step[_MET].astype(np.int64)
        self._met[:, 0] += hits + misses + on_host
        self._met[:, 1] += hits
        whole = _tally(step.sum(axis=1).tolist())
        self._step.add(whole)
        return whole

    def add(self, layer: int, tally: UsageTally) -> None:
        self._layers[layer].add(tally)
        self._step.add(tally)
        met = tally.device_hits + tally.prefetch_hits
        row = self._met[self._place[layer]]
        row[0] += met + tally.device_misses + tally.host_runs
        row[1] += met

    def attribute(
        self, step: ExpertStep, classes: DemandClasses, read_now: list[int], tally: UsageTally
    ) -> None:
        """Divide a layer's costs between sequences. `read_now`: host experts read from disk."""
        ids, owned = step.topk_ids, step.owners
        if owned is None:
            return
        owners = owned.numpy()
        rows = np.bincount(owners)
        self._add_sequences(len(rows))
        need = np.zeros((len(rows), self._num_experts), dtype=bool)
        need[np.repeat(owners, ids.shape[1]), ids.numpy().ravel()] = True
        self._count_own(need, "device_hits", classes.hits)
        self._count_own(need, "prefetch_hits", classes.early)
        self._count_own(need, "device_misses", classes.misses)
        self._count_own(need, "host_runs", classes.host)
        self._share(need[:, [*classes.misses, *read_now]], rows / rows.sum(), tally)
        met = self._own_met[: len(rows), self._place[step.layer]]
        met[:, 0] += need.sum(axis=1)
        met[:, 1] += need[:, [*classes.hits, *classes.early]].sum(axis=1)

    def attribute_resident(self, met: NDArray[np.int64], compute_s: float) -> None:
        """The same for a step without decisions: [sequences, layers, 2], see `_own_met`."""
        self._add_sequences(len(met))
        self._own_met[: len(met)] += met
        totals = met.sum(axis=1)
        asked = max(1, int(totals[:, 0].sum()))
        for own, (demands, slots) in zip(self._sequences, totals.tolist(), strict=False):
            own.device_hits += slots
            own.host_runs += demands - slots
            own.compute_s += compute_s * demands / asked

    def attribute_in_place(self, met: NDArray[np.int64], costs: UsageTally) -> None:
        """The same for a step that read experts which are in no slot where they lie."""
        self._add_sequences(len(met))
        self._own_met[: len(met)] += met
        totals = met.sum(axis=1)
        asked, hits = (max(1, int(count)) for count in totals.sum(axis=0))
        missed = max(1, asked - hits)
        for own, (demands, slots) in zip(self._sequences, totals.tolist(), strict=False):
            part = (demands - slots) / missed
            own.device_hits += slots
            own.device_misses += demands - slots
            own.host_hits += int(costs.host_hits * part)
            own.moved_bytes += int(costs.moved_bytes * part)
            own.io_s += costs.io_s * part
            own.stall_s += costs.stall_s * part
            own.disk_s += costs.disk_s * part
            own.cpu_s += costs.cpu_s * part
            own.compute_s += costs.compute_s * demands / asked

    def _add_sequences(self, sequences: int) -> None:
        new = sequences - len(self._sequences)
        if new > 0:
            self._sequences += [UsageTally() for _ in range(new)]
            more = np.zeros((new, *self._nothing.shape), dtype=np.int64)
            self._own_met = np.concatenate((self._own_met, more))

    def _count_own(self, need: NDArray[np.bool_], name: str, experts: tuple[int, ...]) -> None:
        if not experts:
            return
        counts = need[:, experts].sum(axis=1)
        for own, count in zip(self._sequences, counts.tolist(), strict=False):
            setattr(own, name, getattr(own, name) + count)

    def _share(
        self, loaded: NDArray[np.bool_], rows: NDArray[np.float64], tally: UsageTally
    ) -> None:
        """`loaded` [S, N]: which sequences need the experts that had to be loaded."""
        fetched = (loaded / np.maximum(loaded.sum(axis=0), 1)).sum(axis=1)
        fetched = fetched / fetched.sum() if fetched.any() else rows
        # plain floats: usages are sent to another process, and numpy's numbers cannot be
        parts = zip(self._sequences, fetched.tolist(), rows.tolist(), strict=False)
        for own, part, work in parts:
            for name in ("moved_bytes", "read_bytes", "host_hits", "host_misses"):
                setattr(own, name, getattr(own, name) + round(getattr(tally, name) * part))
            own.io_s += tally.io_s * part
            own.stall_s += (tally.stall_s - tally.cpu_s) * part + tally.cpu_s * work
            own.disk_s += tally.disk_s * part
            own.cpu_s += tally.cpu_s * work
            own.lookup_s += tally.lookup_s * work
            own.compute_s += tally.compute_s * work

    def end_step(self) -> tuple[MoeUsage, list[MoeUsage]]:
        several = self._sequences
        if several:
            self._spread()
        total = self._step.usage(self._hits(self._met))
        owned = zip(several, self._own_met, strict=True)
        parts = [one.usage(self._hits(met)) for one, met in owned] or [total]
        self._step, self._sequences = UsageTally(), []
        self._met, self._own_met = self._nothing.copy(), self._own_met[:0]
        return total, parts

    def _hits(self, met: NDArray[np.int64]) -> tuple[LayerHits, ...]:
        counted = zip(self._place, met.tolist(), strict=True)
        return tuple([(layer, demands, hits) for layer, (demands, hits) in counted])

    def _spread(self) -> None:
        """Divide equally what no demand of this step caused (prefetches, loads of whole groups).
        The first sequence gets the remainder."""
        for name in ("moved_bytes", "read_bytes", "host_hits", "host_misses"):
            attributed = sum(getattr(one, name) for one in self._sequences)
            each, rest = divmod(getattr(self._step, name) - attributed, len(self._sequences))
            for index, one in enumerate(self._sequences):
                setattr(one, name, getattr(one, name) + each + (rest if index == 0 else 0))

    def total(self) -> UsageTally:
        whole = UsageTally()
        for tally in self.layers.values():
            whole.add(tally)
        return whole


class SampledLayer(NamedTuple):
    """One layer of a decoded token: experts by where they ran, and what it waited for."""

    resident: int
    loaded: int
    host: int
    loads_from_disk: int = 0
    host_reads: int = 0


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A decode step of one row, from the end of the step before it."""

    seconds: float
    one_call: bool
    layers: tuple[SampledLayer, ...]


class StepSampler:
    """Keeps some of the decode steps of one row that no other process interrupted, so that their
    seconds can be compared with their prediction."""

    MOST = 64

    def __init__(self) -> None:
        self.steps: list[SampledStep] = []
        self._layers: list[SampledLayer] = []
        self._one_call = False
        # when the last step ended, if it was a decode step of one row
        self._ended_s: float | None = None
        self._switches = 0

    def add_layer(self, step: ExpertStep, tally: UsageTally, host_reads: int) -> None:
        if step.phase != "decode" or len(step.topk_ids) != 1:
            return
        resident = tally.device_hits + tally.prefetch_hits
        reads = max(0, tally.host_misses - host_reads)
        found = SampledLayer(resident, tally.device_misses, tally.host_runs, reads, host_reads)
        self._layers.append(found)

    def add_whole(self, layers: int, rows: int, experts: int) -> None:
        """All layers in one call, each with so many experts."""
        if rows == 1:
            self._one_call = True
            self._layers = [SampledLayer(experts, 0, 0)] * layers

    def end_step(self) -> None:
        if len(self.steps) >= self.MOST:
            return
        now, switches = time.perf_counter(), getrusage(RUSAGE_SELF).ru_nivcsw
        layers, since = self._layers, self._ended_s
        if layers and since is not None and switches == self._switches:
            self.steps.append(SampledStep(now - since, self._one_call, tuple(layers)))
        self._ended_s = now if layers else None
        self._layers, self._one_call, self._switches = [], False, switches

    def take(self) -> list[SampledStep]:
        taken, self.steps = self.steps, []
        self._ended_s = None
        return taken
