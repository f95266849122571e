"""Seconds of a MoE layer from what it moves and runs: the planner's arithmetic.

Follows the runtime's rules: resident experts run while others arrive, waves follow one another, the
host and the device work side by side. On a CPU both sides and every copy share the same cores.
Measures nothing and decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coterie.moe.dispatch.base import Demand, Wave
from coterie.moe.planner.machine import CostCurve, Machine, RecordProfile
from coterie.moe.store.base import Key


@dataclass(frozen=True, slots=True)
class WaveCounts:
    """One wave as numbers: rows of each expert that runs, and where the moved records come from."""

    resident: tuple[int, ...] = ()
    arriving: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    # records moved to device slots: out of host memory, and those that the disk is read for first
    from_host: int = 0
    from_disk: int = 0
    # records read for experts that run on the host
    host_reads: int = 0

    @property
    def loads(self) -> int:
        return self.from_host + self.from_disk


@dataclass(slots=True)
class PhaseForecast:
    """What a phase came to. Seconds and counts of experts; `limit_s` is what its bytes need at best
    when every path runs at its full rate at once."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    limit_s: float = 0.0
    hits: int = 0
    prefetch_hits: int = 0
    misses: int = 0
    host_runs: int = 0
    # steps that ran all layers in one call
    rides: int = 0
    # records to the device, and from disk
    moved: int = 0
    read: int = 0

    @property
    def demands(self) -> int:
        return self.hits + self.prefetch_hits + self.misses + self.host_runs

    @property
    def hit_rate(self) -> float:
        """Demands that were met from a device slot without waiting for bytes."""
        return (self.hits + self.prefetch_hits) / self.demands if self.demands else 0.0

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def limit_tokens_s(self) -> float:
        return self.tokens / self.limit_s if self.limit_s else 0.0

    def add(self, turns: Iterable[WaveCounts], prices: CostModel) -> None:
        for turn in turns:
            self.seconds += prices.turn_s(turn)
            self.limit_s += prices.limit_s(turn)
            self.moved += turn.loads
            self.read += turn.from_disk + turn.host_reads

    def add_resident(self, turns: Iterable[WaveCounts], prices: CostModel) -> None:
        """A layer of a step that runs in one call: nobody is asked, nothing moves."""
        for turn in turns:
            self.seconds += prices.resident_s(turn)
            self.limit_s += prices.limit_s(turn)

    def add_beside(self, turn: WaveCounts, prices: CostModel) -> float:
        """Loads in the background: they take cores from whatever runs. Answers their own time."""
        self.seconds += prices.handling_s(turn)
        self.moved += turn.loads
        self.read += turn.from_disk
        return prices.moving_s(turn.from_host, turn.from_disk)


@dataclass(frozen=True, slots=True)
class CostModel:
    """A machine's rates for one kind of record. `host_tier`: records pass through host memory;
    `shared`: device slots refer to it, so that nothing is copied."""

    machine: Machine
    profile: RecordProfile
    host_tier: bool = True
    shared: bool = False

    def turn_s(self, turn: WaveCounts) -> float:
        """One wave. Loads and the last arrival's run are a chain; so is all the computing; the
        longer chain is the wave's time."""
        device = self._device_s(turn.resident + turn.arriving)
        host = self._host_s(turn.host)
        moving = self.moving_s(turn.from_host, turn.from_disk)
        reading = turn.host_reads * self.profile.read.each_s
        last = self.profile.device.at(turn.arriving[-1]) if turn.arriving else 0.0
        if self.machine.is_cuda:
            return max(moving + last, device, host, reading) + self.handling_s(turn)
        return max(moving + reading + last, device + host + self.handling_s(turn))

    @property
    def load_s(self) -> float:
        return max(self.machine.load_s, self.profile.load_s)

    def resident_s(self, turn: WaveCounts) -> float:
        """Experts inside a call that is under way anyway."""
        return sum(map(self.profile.host.at, turn.resident + turn.host))

    def best_s(self, rows: Sequence[int]) -> float:
        """Experts wherever they run sooner, both sides of an accelerator's machine at once."""
        device, host = self.profile.device, self.profile.host
        if self.machine.is_cuda:
            return sum(1.0 / (1.0 / device.at(n) + 1.0 / host.at(n)) for n in rows)
        return sum(min(device.at(n), host.at(n)) for n in rows)

    def layer_s(self, turns: Sequence[WaveCounts]) -> float:
        """The runtime's own time for a layer of these turns."""
        host = any(turn.host for turn in turns)
        device = any(turn.resident or turn.loads for turn in turns)
        return self.machine.layer_s + (self.machine.both_s if host and device else 0.0)

    def moving_s(self, from_host: int, from_disk: int) -> float:
        """Wall time of records on their way to the device, many under way at once."""
        if not from_host + from_disk or (self.shared and not from_disk):
            return 0.0
        read, link = self.profile.read, self.profile.link
        if self.shared or (not self.host_tier and not self.machine.is_cuda):
            return max(from_disk * read.each_s, read.alone_s)
        reading, linking = from_disk * read.each_s, (from_host + from_disk) * link.each_s
        # both stages run at once; the last record still has to pass the second
        tail = link.alone_s if from_disk else 0.0
        first = read.alone_s if from_disk else link.alone_s
        return max(reading + tail, linking, first + tail)

    def limit_s(self, turn: WaveCounts) -> float:
        """What the bytes of this turn need when every path runs at its full rate at once."""
        size = self.profile.record_bytes
        read = (turn.from_disk + turn.host_reads) * self.profile.read.each_s
        run = (len(turn.resident) + len(turn.arriving)) * size / self.machine.device_bytes_s
        hosted = len(turn.host) * size
        if self.machine.is_cuda:
            link = turn.loads * self.profile.link.each_s
            return max(read, link, run, (hosted + turn.loads * size) / self.machine.dram_bytes_s)
        return max(read, run + hosted / self.machine.dram_bytes_s)

    def _device_s(self, rows: Sequence[int]) -> float:
        return _runs_s(self.profile.device, self.profile.device_call_s, rows)

    def _host_s(self, rows: Sequence[int]) -> float:
        return _runs_s(self.profile.host, self.profile.host_call_s, rows)

    def handling_s(self, turn: WaveCounts) -> float:
        """Time that copies and reads take from computing: the interpreter's, and on a CPU their
        processor time, spread over the cores that also compute."""
        copied = self.host_tier and not self.shared
        reads, links = turn.from_disk + turn.host_reads, turn.loads if copied else 0
        # arrivals run as they come, in calls of their own: that is in here
        awaited = min(turn.loads, len(turn.arriving))
        spent = self.load_s * (awaited + turn.host_reads)
        spent += self.machine.beside_s * (turn.loads - awaited)
        if self.machine.is_cuda:
            return spent
        cores = reads * self.profile.read.core_s + links * self.profile.link.core_s
        return spent + cores / self.machine.identity.cores


def _runs_s(curve: CostCurve, call_s: float, rows: Sequence[int]) -> float:
    return call_s + sum(map(curve.at, rows)) if rows else 0.0


@dataclass(slots=True)
class SimulatedHostTier:
    """The host tier in a replay: the last `slots` experts asked of it."""

    slots: int
    held: OrderedDict[Key, None] = field(default_factory=OrderedDict)

    def fill(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if len(self.held) >= self.slots:
                return
            self.held[key] = None

    def take(self, key: Key) -> bool:
        """Was it here? It is now, if anything can be."""
        if key in self.held:
            self.held.move_to_end(key)
            return True
        if self.slots:
            self.held[key] = None
            if len(self.held) > self.slots:
                self.held.popitem(last=False)
        return False

    def drop(self, key: Key) -> None:
        self.held.pop(key, None)


def wave_counts(wave: Wave, demand: Demand, shelf: SimulatedHostTier) -> WaveCounts:
    """A strategy's wave as numbers; asks the host tier for what is moved or run there."""
    rows = dict(zip(demand.experts, demand.counts, strict=True))
    loaded = {key for key, _ in wave.load}
    from_disk = sum(not shelf.take(key) for key in loaded)
    arriving = {expert for layer, expert in loaded if layer == demand.layer}
    return WaveCounts(
        resident=tuple(rows[e] for e in wave.device if e not in arriving),
        arriving=tuple(rows[e] for e in wave.device if e in arriving),
        host=tuple(rows[e] for e in wave.host),
        from_host=len(loaded) - from_disk,
        from_disk=from_disk,
        host_reads=sum(not shelf.take((demand.layer, e)) for e in wave.host),
    )
