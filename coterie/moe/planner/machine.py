"""The measured speeds of this machine, as values, kept in a file between runs.

There is one file per machine (CPU, cores, device, torch, kernels) in the state folder. It has what
was measured once for the machine and once per kind of expert record, a mark for each of these parts
(how far the true values may be away, what disturbed the measurement), and what real runs took
against their prediction. This module measures nothing (measure.py does) and knows no strategy. It
does not import torch, so that planning starts fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from coterie.moe.dispatch.base import ExpertCosts
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.device_path import DevicePath, path_from_json
from coterie.weights.home import state_dir

# with a file of another version the machine is measured again
VERSION = 6
# machines change (a disk fills, memory is added): after this time, measure again
STALE_AFTER_S = 30 * 24 * 3600.0
# a measurement that other processes disturbed is used for this long, and only if there is no other
DISTURBED_FOR_S = 1800.0
# before real runs have shown more: predictions are off by this share
MODEL_ERROR, LEAST_ERROR = 0.25, 0.05
# a real run corrects a prediction by no more than these factors
LEAST_RATIO, MOST_RATIO = 0.5, 2.0
# the kinds of decode steps that are corrected: all layers in one call; layer by layer with all
# experts in memory; with reads from disk
StepKind = Literal["one call", "in memory", "from disk"]
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """What a measurement is valid for. Any change makes it stale."""

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
class TransferCost:
    """One record from one tier to the next, with many transfers at the same time."""

    # wall time per record when the queue is full, and of one record alone
    each_s: float
    alone_s: float
    # processor time per record: on a CPU the computing threads lose it
    core_s: float = 0.0

    def scaled(self, factor: float) -> TransferCost:
        return TransferCost(self.each_s * factor, self.alone_s * factor, self.core_s * factor)


@dataclass(frozen=True, slots=True)
class RecordProfile:
    """The costs of one kind of expert record: this layout, this store, this disk."""

    record_bytes: int
    read: TransferCost
    link: TransferCost
    # seconds per expert by rows, with all threads; and the fixed cost of one call
    host: CostCurve
    device: CostCurve
    host_call_s: float = 0.0
    device_call_s: float = 0.0
    # the runtime's time per awaited load, without the copy's processor time
    load_s: float = 0.0

    def costs(self) -> ExpertCosts:
        """The costs from which a strategy decides whether an upload pays."""
        link, read = self.link.each_s, self.read.each_s
        return ExpertCosts(link, self.device.at(1), self.host.at(1), read)

    def slowed(self, mark: MeasurementMark) -> RecordProfile:
        """With every cost as large as `mark` allows."""
        run = 1 + mark.spread("run")
        return replace(
            self,
            read=self.read.scaled(1 + mark.spread("read")),
            link=self.link.scaled(1 + mark.spread("link")),
            host=self.host.scaled(run),
            device=self.device.scaled(run),
            host_call_s=self.host_call_s * run,
            device_call_s=self.device_call_s * run,
            load_s=self.load_s * (1 + mark.spread("load")),
        )


@dataclass(frozen=True, slots=True)
class BackboneTimes:
    """Seconds of a model's step without its experts, by rows."""

    # one layer after another, with a call of the runtime in each
    walk: CostCurve
    # all layers in one native call, possible while nothing moves; None: this model cannot
    express: CostCurve | None = None

    def scaled(self, factor: float) -> BackboneTimes:
        return BackboneTimes(self.walk.scaled(factor), self.express and self.express.scaled(factor))


@dataclass(frozen=True, slots=True)
class MeasurementMark:
    """How a part of a machine was measured."""

    at: float
    # by kind of cost: the true values lie within this share of the measured ones
    spreads: Mapping[str, float] = field(default_factory=dict)
    # what disturbed the measurement; "": nothing
    disturbed: str = ""

    def is_valid(self, now: float) -> bool:
        return 0 <= now - self.at < (DISTURBED_FOR_S if self.disturbed else STALE_AFTER_S)

    def spread(self, kind: str) -> float:
        return min(1.0, self.spreads.get(kind, 0.0))


@dataclass(frozen=True, slots=True)
class RealRatio:
    """Seconds of real decode steps against their prediction."""

    ratio: float
    # how far single steps were away from `ratio`
    spread: float
    steps: int

    def joined(self, later: RealRatio) -> RealRatio:
        """Both, half and half: a machine's speed may change."""
        share = later.steps / (later.steps + min(self.steps, later.steps))
        ratio = self.ratio + (later.ratio - self.ratio) * share
        spread = max(later.spread, abs(later.ratio / self.ratio - 1))
        return RealRatio(_bounded(ratio), spread, self.steps + later.steps)


def _bounded(ratio: float) -> float:
    return min(MOST_RATIO, max(LEAST_RATIO, ratio))


MACHINE = "machine"


def profile_mark(name: str) -> str:
    return f"profile {name}"


def backbone_mark(name: str) -> str:
    return f"backbone {name}"


def device_mark(name: str) -> str:
    return f"device path {name}"


@dataclass(frozen=True, slots=True)
class Machine:
    identity: MachineIdentity
    measured_at: float
    # reading with all threads; the device's own memory (the same on a CPU)
    dram_bytes_s: float
    device_bytes_s: float
    # the runtime's time per MoE layer; per expert that a layer waits for (a lower bound: see
    # RecordProfile.load_s); per layer that runs on host and device; per other load
    layer_s: float
    load_s: float = 0.0
    both_s: float = 0.0
    beside_s: float = 0.0
    profiles: Mapping[str, RecordProfile] = field(default_factory=dict)
    # by the names of `profiles`
    backbones: Mapping[str, BackboneTimes] = field(default_factory=dict)
    # the same; of a CUDA device whose kernels read these records where they are
    device_paths: Mapping[str, DevicePath] = field(default_factory=dict)
    # by MACHINE, `profile_mark`, `backbone_mark` and `device_mark`
    marks: Mapping[str, MeasurementMark] = field(default_factory=dict)
    # by the names of `profiles`, then by kind of step
    real: Mapping[str, Mapping[StepKind, RealRatio]] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.identity.device != "cpu"

    def with_profile(
        self, name: str, profile: RecordProfile, mark: MeasurementMark | None = None
    ) -> Machine:
        return replace(
            self._marked(profile_mark(name), mark), profiles={**self.profiles, name: profile}
        )

    def with_backbone(
        self, name: str, times: BackboneTimes, mark: MeasurementMark | None = None
    ) -> Machine:
        """What real runs took against earlier figures is forgotten."""
        made = self._marked(backbone_mark(name), mark)
        real = {key: value for key, value in self.real.items() if key != name}
        return replace(made, backbones={**self.backbones, name: times}, real=real)

    def with_device_path(
        self, name: str, path: DevicePath, mark: MeasurementMark | None = None
    ) -> Machine:
        made = self._marked(device_mark(name), mark)
        return replace(made, device_paths={**self.device_paths, name: path})

    def _marked(self, part: str, mark: MeasurementMark | None) -> Machine:
        return self if mark is None else replace(self, marks={**self.marks, part: mark})

    def with_real(self, name: str, found: Mapping[StepKind, RealRatio]) -> Machine:
        known = dict(self.real.get(name, {}))
        for kind, later in found.items():
            known[kind] = known[kind].joined(later) if kind in known else later
        return replace(self, real={**self.real, name: known})

    def disturbed(self, name: str) -> str:
        """What disturbed the measurements that a plan for these records uses; "": nothing."""
        parts = (MACHINE, profile_mark(name), backbone_mark(name), device_mark(name))
        found = (self.marks[part].disturbed for part in parts if part in self.marks)
        return next((reason for reason in found if reason), "")

    def correction(self, name: str, kind: StepKind) -> float:
        """By what the predicted seconds of such steps are multiplied."""
        known = self.real.get(name, {}).get(kind)
        return 1.0 if known is None else _bounded(known.ratio)

    def model_error(self, name: str, kind: StepKind) -> float:
        """The share by which predictions of such steps are off, with the right figures."""
        known = self.real.get(name, {}).get(kind)
        return MODEL_ERROR if known is None else min(MODEL_ERROR, max(LEAST_ERROR, known.spread))

    def spread(self, name: str) -> float:
        """The largest one of what a plan for these records uses."""
        parts = (MACHINE, profile_mark(name), backbone_mark(name))
        found = (mark.spreads for part in parts if (mark := self.marks.get(part)) is not None)
        return min(
            1.0, max((value for spreads in found for value in spreads.values()), default=0.0)
        )

    def slowest(self, name: str) -> Machine:
        """With every cost as large as its measurement allows."""
        own, record, steps = (
            self.marks.get(part, MeasurementMark(0.0))
            for part in (MACHINE, profile_mark(name), backbone_mark(name))
        )
        late, memory = 1 + own.spread("runtime"), 1 + own.spread("memory")
        made = replace(
            self,
            dram_bytes_s=self.dram_bytes_s / memory,
            device_bytes_s=self.device_bytes_s / memory,
            layer_s=self.layer_s * late,
            load_s=self.load_s * late,
            both_s=self.both_s * late,
            beside_s=self.beside_s * late,
        ).with_profile(name, self.profiles[name].slowed(record))
        if name not in self.backbones:
            return made
        slowed = {**self.backbones, name: self.backbones[name].scaled(1 + steps.spread("backbone"))}
        return replace(made, backbones=slowed)


def stale(machine: Machine, now: MachineIdentity) -> str:
    """Why a measurement is no longer valid; "" when it is."""
    for name, value in asdict(now).items():
        if getattr(machine.identity, name) != value:
            return f"{name} changed"
    if not 0 <= time.time() - machine.measured_at < STALE_AFTER_S:
        return "it is older than 30 days"
    mark = machine.marks.get(MACHINE)
    if mark is not None and not mark.is_valid(time.time()):
        return f"it was disturbed: {mark.disturbed}"
    return ""


def path_of(identity: MachineIdentity) -> Path:
    return state_dir() / "machine" / f"{identity.digest}.json"


def load(identity: MachineIdentity) -> Machine | None:
    """The stored measurement of this machine without the parts that are no longer valid; None if it
    is stale or cannot be read."""
    machine = _read(identity)
    if machine is None or stale(machine, identity):
        return None
    now = time.time()
    old = {part for part, mark in machine.marks.items() if not mark.is_valid(now)}
    return replace(
        machine,
        profiles={k: v for k, v in machine.profiles.items() if profile_mark(k) not in old},
        backbones={k: v for k, v in machine.backbones.items() if backbone_mark(k) not in old},
        device_paths={k: v for k, v in machine.device_paths.items() if device_mark(k) not in old},
    )


def _read(identity: MachineIdentity) -> Machine | None:
    try:
        return from_json(json.loads(path_of(identity).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def store(machine: Machine) -> Machine:
    """Save it, but keep every sound part of the file whose new measurement was disturbed. Returns
    what is in the file now."""
    known = _read(machine.identity)
    made = (
        machine if known is None or known.identity != machine.identity else _joined(known, machine)
    )
    save(made)
    return made


def _joined(known: Machine, later: Machine) -> Machine:
    def kept(part: str, here: bool) -> bool:
        """Whether the part of the file is the better one."""
        new, old = later.marks.get(part), known.marks.get(part)
        return not here or (new is not None and bool(new.disturbed) and _is_sound(old))

    def both(name: str, mark: Callable[[str], str]) -> dict[str, Any]:
        old, new = getattr(known, name), getattr(later, name)
        found = {**old, **new}
        found.update({key: value for key, value in old.items() if kept(mark(key), key in new)})
        return found

    marks = {**known.marks, **later.marks}
    marks.update({
        part: mark for part, mark in known.marks.items() if kept(part, part in later.marks)
    })  # fmt: skip
    base = later
    if kept(MACHINE, True):
        own = ("measured_at", "dram_bytes_s", "device_bytes_s", *_RUNTIME_COSTS)
        base = replace(later, **{name: getattr(known, name) for name in own})
    return replace(
        base,
        profiles=both("profiles", profile_mark),
        backbones=both("backbones", backbone_mark),
        device_paths=both("device_paths", device_mark),
        marks=marks,
        real=_real(known, later),
    )


def _real(known: Machine, later: Machine) -> dict[str, Mapping[StepKind, RealRatio]]:
    """What real runs took, unless the figures that it belongs to were measured again."""
    found = dict(later.real)
    for name, kinds in known.real.items():
        old, new = (each.marks.get(backbone_mark(name)) for each in (known, later))
        disturbed = new is not None and new.disturbed
        if new is None or old == new or (disturbed and _is_sound(old)):
            found.setdefault(name, kinds)
    return found


_RUNTIME_COSTS = ("layer_s", "load_s", "both_s", "beside_s")


def _is_sound(mark: MeasurementMark | None) -> bool:
    return mark is not None and not mark.disturbed


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
    fields["backbones"] = {
        name: _backbone_times(value) for name, value in data["backbones"].items()
    }
    fields["device_paths"] = {
        name: path_from_json(value) for name, value in data["device_paths"].items()
    }
    fields["marks"] = {part: MeasurementMark(**mark) for part, mark in data["marks"].items()}
    fields["real"] = {
        name: {kind: RealRatio(**found) for kind, found in kinds.items()}
        for name, kinds in data["real"].items()
    }
    return Machine(**fields)


def _profile(data: Mapping[str, Any]) -> RecordProfile:
    moves = {name: TransferCost(**data[name]) for name in ("read", "link")}
    curves = {name: _curve(data[name]) for name in ("host", "device")}
    return RecordProfile(**{**data, **moves, **curves})


def _backbone_times(data: Mapping[str, Any]) -> BackboneTimes:
    return BackboneTimes(_curve(data["walk"]), _curve(data["express"]) if data["express"] else None)


def _curve(data: Mapping[str, Any]) -> CostCurve:
    return CostCurve(tuple(data["rows"]), tuple(data["seconds"]))
