"""What steps cost on a measured machine: waves of experts as numbers, and their seconds.

This module measures nothing, knows no strategy and does not import torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coterie.moe.dispatch.base import Demand, Wave
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import Machine, RecordProfile
from coterie.moe.store.base import Key


@dataclass(frozen=True, slots=True)
class WaveCounts:
    """One wave as numbers: rows of each expert that runs, and where the moved records come from."""

    resident: tuple[int, ...] = ()
    loaded: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    # records moved to device slots: from host memory, and from disk
    from_host: int = 0
    from_disk: int = 0
    # records read for experts that run on the host
    host_reads: int = 0

    @property
    def loads(self) -> int:
        return self.from_host + self.from_disk


@dataclass(slots=True)
class PhaseForecast:
    """The simulated seconds and counts of a phase. `limit_s` is the least time that its bytes need,
    when every path works at its full rate at the same time."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    limit_s: float = 0.0
    # by how much `seconds` may be off although the machine's figures are right
    error_s: float = 0.0
    hits: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    host_runs: int = 0
    # steps that ran all layers in one call
    one_call_steps: int = 0
    # records to the device, and from disk
    moved: int = 0
    read: int = 0

    @property
    def demands(self) -> int:
        return self.hits + self.prefetch_hits + self.misses + self.host_runs

    @property
    def hit_rate(self) -> float:
        """The share of demands whose expert was in a device slot already."""
        return (self.hits + self.prefetch_hits) / self.demands if self.demands else 0.0

    @property
    def error(self) -> float:
        """The share by which `seconds` may be off although the machine's figures are right."""
        return self.error_s / self.seconds if self.seconds else 0.0

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def limit_tokens_s(self) -> float:
        return self.tokens / self.limit_s if self.limit_s else 0.0

    def add(self, waves: Iterable[WaveCounts], costs: CostModel) -> None:
        for wave in waves:
            self.seconds += costs.wave_s(wave)
            self.limit_s += costs.limit_s(wave)
            self.moved += wave.loads
            self.read += wave.from_disk + wave.host_reads

    def add_resident(self, waves: Iterable[WaveCounts], costs: CostModel) -> None:
        """A layer of a step that runs in one call, without a decision or a move."""
        for wave in waves:
            self.seconds += costs.resident_s(wave)
            self.limit_s += costs.limit_s(wave)

    def add_background(self, wave: WaveCounts, costs: CostModel) -> float:
        """Loads in the background, which take cores from the computation. Returns their time."""
        self.seconds += costs.handling_s(wave)
        self.moved += wave.loads
        self.read += wave.from_disk
        return costs.moving_s(wave.from_host, wave.from_disk)


@dataclass(frozen=True, slots=True)
class CostModel:
    """A machine's rates for one kind of record. `host_tier`: records go through host memory;
    `shared`: device slots refer to it, so that nothing is copied."""

    machine: Machine
    profile: RecordProfile
    host_tier: bool = True
    shared: bool = False

    def wave_s(self, wave: WaveCounts) -> float:
        """The time of one wave: the loads followed by the last loaded expert's run, or all the
        computing, whichever is longer."""
        device = self._device_s(wave.resident + wave.loaded)
        host = self._host_s(wave.host)
        moving = self.moving_s(wave.from_host, wave.from_disk)
        reading = wave.host_reads * self.profile.read.each_s
        last = self.profile.device.at(wave.loaded[-1]) if wave.loaded else 0.0
        if self.machine.is_cuda:
            return max(moving + last, device, host, reading) + self.handling_s(wave)
        return max(moving + reading + last, device + host + self.handling_s(wave))

    @property
    def load_s(self) -> float:
        return max(self.machine.load_s, self.profile.load_s)

    def resident_s(self, wave: WaveCounts) -> float:
        """Experts inside the one call that runs all layers."""
        return sum(map(self.profile.host.at, wave.resident + wave.host))

    def best_s(self, rows: Sequence[int]) -> float:
        """Every expert on the faster of host and device; with an accelerator, on both at once."""
        device, host = self.profile.device, self.profile.host
        if self.machine.is_cuda:
            return sum(1.0 / (1.0 / device.at(n) + 1.0 / host.at(n)) for n in rows)
        return sum(min(device.at(n), host.at(n)) for n in rows)

    def layer_s(self, waves: Sequence[WaveCounts]) -> float:
        """The runtime's own time for a layer of these waves."""
        host = any(wave.host for wave in waves)
        device = any(wave.resident or wave.loads for wave in waves)
        return self.machine.layer_s + (self.machine.both_s if host and device else 0.0)

    def moving_s(self, from_host: int, from_disk: int) -> float:
        """Wall time of transfers to the device, many at the same time."""
        if not from_host + from_disk or (self.shared and not from_disk):
            return 0.0
        read, link = self.profile.read, self.profile.link
        if self.shared or (not self.host_tier and not self.machine.is_cuda):
            return max(from_disk * read.each_s, read.alone_s)
        reading, linking = from_disk * read.each_s, (from_host + from_disk) * link.each_s
        # reads and copies run at the same time; after the last read one copy remains
        tail = link.alone_s if from_disk else 0.0
        first = read.alone_s if from_disk else link.alone_s
        return max(reading + tail, linking, first + tail)

    def limit_s(self, wave: WaveCounts) -> float:
        """The time that the bytes of this wave need when every path works at its full rate."""
        size = self.profile.record_bytes
        read = (wave.from_disk + wave.host_reads) * self.profile.read.each_s
        run = (len(wave.resident) + len(wave.loaded)) * size / self.machine.device_bytes_s
        hosted = len(wave.host) * size
        if self.machine.is_cuda:
            link = wave.loads * self.profile.link.each_s
            return max(read, link, run, (hosted + wave.loads * size) / self.machine.dram_bytes_s)
        return max(read, run + hosted / self.machine.dram_bytes_s)

    def _device_s(self, rows: Sequence[int]) -> float:
        return _runs_s(self.profile.device, self.profile.device_call_s, rows)

    def _host_s(self, rows: Sequence[int]) -> float:
        return _runs_s(self.profile.host, self.profile.host_call_s, rows)

    def handling_s(self, wave: WaveCounts) -> float:
        """Time that copies and reads take from computing: the interpreter's time, and on a CPU
        their processor time, divided by the cores that also compute."""
        copied = self.host_tier and not self.shared
        reads, links = wave.from_disk + wave.host_reads, wave.loads if copied else 0
        # each loaded expert runs in a call of its own; the time of the call is included
        awaited = min(wave.loads, len(wave.loaded))
        spent = self.load_s * (awaited + wave.host_reads)
        spent += self.machine.beside_s * (wave.loads - awaited)
        if self.machine.is_cuda:
            return spent
        cores = reads * self.profile.read.core_s + links * self.profile.link.core_s
        return spent + cores / self.machine.identity.cores


def _runs_s(curve: CostCurve, call_s: float, rows: Sequence[int]) -> float:
    return call_s + sum(map(curve.at, rows)) if rows else 0.0


@dataclass(slots=True)
class SimulatedHostTier:
    """The host tier in a simulation: the last `slots` experts that were used."""

    slots: int
    keys: OrderedDict[Key, None] = field(default_factory=OrderedDict)

    def fill(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if len(self.keys) >= self.slots:
                return
            self.keys[key] = None

    def take(self, key: Key) -> bool:
        """Whether it was here. From now on it is, if there are any slots."""
        if key in self.keys:
            self.keys.move_to_end(key)
            return True
        if self.slots:
            self.keys[key] = None
            if len(self.keys) > self.slots:
                self.keys.popitem(last=False)
        return False


def wave_counts(wave: Wave, demand: Demand, host_tier: SimulatedHostTier) -> WaveCounts:
    """A strategy's wave as numbers. Marks what is moved or run on the host as used there."""
    rows = dict(zip(demand.experts, demand.counts, strict=True))
    moved = {key for key, _ in wave.load}
    from_disk = sum(not host_tier.take(key) for key in moved)
    loaded = {expert for layer, expert in moved if layer == demand.layer}
    return WaveCounts(
        resident=tuple(rows[e] for e in wave.device if e not in loaded),
        loaded=tuple(rows[e] for e in wave.device if e in loaded),
        host=tuple(rows[e] for e in wave.host),
        from_host=len(moved) - from_disk,
        from_disk=from_disk,
        host_reads=sum(not host_tier.take((demand.layer, e)) for e in wave.host),
    )
