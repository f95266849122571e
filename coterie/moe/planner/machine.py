"""What this machine does per second, as values, kept between runs.

Owns the file under the state folder: one per machine (CPU, cores, device, torch, kernels), which
holds what was measured once for the machine and once per kind of expert record. Measures nothing
itself (measure.py does) and knows no strategy. Torch-free, so that a plan is made in no time.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.moe.dispatch.base import Demand, ExpertCosts, Wave
from coterie.moe.store.base import Key
from coterie.weights.home import state_dir

# a file of another version is measured again
VERSION = 4
# machines change (a neighbour moves in, a disk fills): measured again after this
STALE_AFTER_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """What a measurement holds for. Any change makes it stale."""

    cpu: str
    cores: int
    device: str
    torch: str
    kernels: str

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds by number of rows: straight between points, the last slope beyond them (which is not
    downwards, whatever a busy machine measured)."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: float) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            return self.seconds[0]
        right = min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        slope = (y1 - y0) / (x1 - x0)
        return y1 + max(slope, 0.0) * (rows - x1) if rows > x1 else y0 + slope * (rows - x0)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """One record from one tier to the next, many under way at once."""

    # wall time per record when the queue is full, and of one record alone
    each_s: float
    alone_s: float
    # processor time per record: on a CPU it is taken from the experts' own threads
    core_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordProfile:
    """What one kind of expert record costs: of this layout, from this store, on this disk."""

    record_bytes: int
    read: TransferCost
    link: TransferCost
    # seconds per expert by rows, with all threads; and the fixed cost of one call
    host: CostCurve
    device: CostCurve
    host_call_s: float = 0.0
    device_call_s: float = 0.0
    # what the runtime takes per awaited load, beside the copy's processor time
    load_s: float = 0.0

    def costs(self) -> ExpertCosts:
        """What a strategy's pay-back test reads."""
        link, read = self.link.each_s, self.read.each_s
        return ExpertCosts(link, self.device.at(1), self.host.at(1), read)


@dataclass(frozen=True, slots=True)
class BackboneTimes:
    """Seconds of a model's step without its experts, by rows."""

    # layer by layer, the runtime asked at each
    walk: CostCurve
    # all layers in one native call, as while nothing moves; None: this model cannot
    express: CostCurve | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    identity: MachineIdentity
    measured_at: float
    # reading with all threads; the device's own memory (the same on a CPU)
    dram_bytes_s: float
    device_bytes_s: float
    # the runtime's own time per MoE layer; per expert that a layer waits for (at least: a record
    # that weighs something arrives alone, see Profile); per layer with two sides; per other load
    layer_s: float
    load_s: float = 0.0
    both_s: float = 0.0
    beside_s: float = 0.0
    profiles: Mapping[str, RecordProfile] = field(default_factory=dict)
    # by the names of `profiles`
    backbones: Mapping[str, BackboneTimes] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.identity.device != "cpu"

    def with_profile(self, name: str, profile: RecordProfile) -> Machine:
        return replace(self, profiles={**self.profiles, name: profile})

    def with_backbone(self, name: str, pace: BackboneTimes) -> Machine:
        return replace(self, backbones={**self.backbones, name: pace})


def stale(machine: Machine, now: MachineIdentity) -> str:
    """Why a measurement does not hold any more; "" when it does."""
    for name, value in asdict(now).items():
        if getattr(machine.identity, name) != value:
            return f"{name} changed"
    if not 0 <= time.time() - machine.measured_at < STALE_AFTER_S:
        return "it is older than 30 days"
    return ""


def path_of(identity: MachineIdentity) -> Path:
    return state_dir() / "machine" / f"{identity.digest}.json"


def load(identity: MachineIdentity) -> Machine | None:
    """What was kept for this machine, unless it is stale or cannot be read."""
    try:
        machine = from_json(json.loads(path_of(identity).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None if stale(machine, identity) else machine


def save(machine: Machine) -> Path:
    path = path_of(machine.identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(to_json(machine), indent=1))
    draft.replace(path)
    return path


def to_json(machine: Machine) -> dict[str, Any]:
    return {"version": VERSION, **asdict(machine)}


def from_json(data: Mapping[str, Any]) -> Machine:
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}")
    fields = {name: value for name, value in data.items() if name != "version"}
    fields["identity"] = MachineIdentity(**data["identity"])
    fields["profiles"] = {name: _profile(value) for name, value in data["profiles"].items()}
    fields["backbones"] = {name: _pace(value) for name, value in data["backbones"].items()}
    return Machine(**fields)


def _profile(data: Mapping[str, Any]) -> RecordProfile:
    moves = {name: TransferCost(**data[name]) for name in ("read", "link")}
    curves = {name: _curve(data[name]) for name in ("host", "device")}
    return RecordProfile(**{**data, **moves, **curves})


def _pace(data: Mapping[str, Any]) -> BackboneTimes:
    return BackboneTimes(_curve(data["walk"]), _curve(data["express"]) if data["express"] else None)


def _curve(data: Mapping[str, Any]) -> CostCurve:
    return CostCurve(tuple(data["rows"]), tuple(data["seconds"]))


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
