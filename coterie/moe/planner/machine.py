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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.moe.dispatch.base import ExpertCosts
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
