"""What limits a plan, and what to buy or to change for more speed, in one sentence.

Both are calculated: a plan is made again as if one part of the machine were twice as fast, as if
there were more memory, and with smaller experts. Nothing here knows a kind of machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from coterie.moe.planner.machine import BackboneTimes, Machine, RecordProfile
from coterie.moe.planner.plan import (
    QUICK,
    MemoryDivision,
    PlanCase,
    PlanRow,
    backbone_times,
    forecast_row,
)
from coterie.moe.runtime.budget import AUTO_SHARE, ExpertSizes

# bytes of a weight, by precision
_WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 34 / 32, "int4": 20 / 32}
# shares of the experts on the device that are tried
_SHARES = (25, 50, 75, 100)
# gains below this are not worth a word; with this much, no larger purchase is proposed
_WORTH, _ENOUGH = 1.05, 1.25


@dataclass(frozen=True, slots=True)
class SpeedGain:
    """What a change would give: decode tok/s."""

    text: str
    tokens_s: float


def advise(case: PlanCase, division: MemoryDivision, row: PlanRow) -> str:
    """For the chosen `row` of `division`."""
    adviser = _Adviser(case, division, row)
    if adviser.now <= 0:
        return "nothing decodes in this workload, so nothing can be said about its speed"
    slowest, faster = adviser.bottleneck()
    changes = [each for each in adviser.changes() if each.tokens_s > row.decode_tokens_s * _WORTH]
    changes.sort(key=lambda each: -each.tokens_s)
    if not changes:
        return (
            f"{slowest} is the bottleneck, and neither more memory nor smaller experts would help: "
            f"twice as fast, it would give about {_rate(faster)} tok/s instead of "
            f"{_rate(row.decode_tokens_s)}"
        )
    first, *others = changes
    text = f"{slowest} is the bottleneck: {first.text} would give about {_rate(first.tokens_s)}"
    text += f" tok/s instead of {_rate(row.decode_tokens_s)}"
    return text + "".join(f", {each.text} about {_rate(each.tokens_s)}" for each in others[:1])


class _Adviser:
    """Plans the same again with something changed."""

    def __init__(self, case: PlanCase, division: MemoryDivision, row: PlanRow) -> None:
        self.case, self.division, self.row = case, division, row
        # to compare parts of the machine, a part of the workload is enough
        self._short = case.quick(QUICK)
        self.now = self._tokens_s(self._short, division)

    def _tokens_s(
        self, case: PlanCase, division: MemoryDivision, names: tuple[str, ...] = ()
    ) -> float:
        made = [forecast_row(case, division, name) for name in (self.row.strategy, *names)]
        return max((each.decode_tokens_s for each in made if each is not None), default=0.0)

    def bottleneck(self) -> tuple[str, float]:
        """The part that gives most if it is twice as fast, and what it gives."""
        found = [
            SpeedGain(name, self._tokens_s(_changed(self._short, changed), self.division))
            for name, changed in _faster_parts(self._short)
        ]
        best = max(found, key=lambda each: each.tokens_s)
        return best.text, self.row.decode_tokens_s * best.tokens_s / self.now

    def changes(self) -> Iterator[SpeedGain]:
        yield from self._more_ram()
        yield from self._more_device_memory()
        yield from self._smaller_experts()

    def _more_ram(self) -> Iterator[SpeedGain]:
        """Room for all experts."""
        row, sizes = self.row, self.case.model.sizes
        if row.disk_bytes <= 0:
            return
        needs = self.division.needs
        wanted = sizes.total * sizes.slot_bytes
        room = int(wanted / AUTO_SHARE) + needs.kv_bytes + sizes.slot_bytes
        settings = replace(self.division.settings, host_budget="100%")
        if needs.one_memory and not settings.cache_capacity:
            settings = replace(settings, device_budget=settings.device_budget or "0%")
        free = max(room, needs.free_host_bytes)
        on_device = free if needs.one_memory else needs.free_device_bytes
        needs = replace(needs, free_host_bytes=free, free_device_bytes=on_device)
        division = MemoryDivision(settings, needs)
        gain = self._tokens_s(self.case, division, ("cpu_only", "adaptive"))
        more = sizes.expert_bytes - row.host_bytes
        if needs.one_memory:
            more = max(row.disk_bytes, more - row.device_bytes)
        yield SpeedGain(f"{_size(more)} more RAM for experts", gain)

    def _more_device_memory(self) -> Iterator[SpeedGain]:
        """The smallest larger share that is clearly faster."""
        row, sizes = self.row, self.case.model.sizes
        if self.division.needs.one_memory:
            return
        best: SpeedGain | None = None
        for share in _SHARES:
            slots = sizes.total * share // 100
            if slots <= row.device_slots:
                continue
            settings = replace(self.division.settings, device_budget=f"{share}%", cache_capacity=0)
            division = replace(self.division, settings=settings)
            gain = self._tokens_s(self.case, division, ("adaptive",))
            more = (slots - row.device_slots) * sizes.slot_bytes
            what = "all experts" if share == 100 else f"{share}% of the experts"
            best = SpeedGain(f"{_size(more)} more device memory, which holds {what},", gain)
            if gain >= row.decode_tokens_s * _ENOUGH:
                break
        if best is not None:
            yield best

    def _smaller_experts(self) -> Iterator[SpeedGain]:
        case = self.case
        now = _WEIGHT_BYTES.get(case.model.kind)
        if now is None or case.model.kind == "int4":
            return
        smaller = with_smaller_experts(case, "int4", _WEIGHT_BYTES["int4"] / now)
        yield SpeedGain("int4 experts", self._tokens_s(smaller, self.division))


def with_smaller_experts(case: PlanCase, kind: str, share: float) -> PlanCase:
    """The same with experts of `share` of the bytes, if they take `share` of the time."""
    sizes, machine, name = case.model.sizes, case.machine, case.profile
    smaller = ExpertSizes(
        sizes.total, int(sizes.slot_bytes * share), int(sizes.expert_bytes * share)
    )
    profile = machine.profiles[name]
    machine = machine.with_profile(
        name,
        replace(
            profile,
            record_bytes=int(profile.record_bytes * share),
            read=profile.read.scaled(share),
            link=profile.link.scaled(share),
            host=profile.host.scaled(share),
            device=profile.device.scaled(share),
        ),
    )
    if name in machine.device_paths:
        path = machine.device_paths[name].smaller(kind, share)
        machine = machine.with_device_path(name, path)
    return replace(case, model=replace(case.model, sizes=smaller, kind=kind), machine=machine)


@dataclass(frozen=True, slots=True)
class FasterMachine:
    machine: Machine
    # as in the case, or faster too
    backbone: BackboneTimes | None = None


def _changed(case: PlanCase, faster: FasterMachine) -> PlanCase:
    model = case.model
    if faster.backbone is not None:
        model = replace(model, backbone=faster.backbone)
    return replace(case, machine=faster.machine, model=model)


def _faster_parts(case: PlanCase) -> Iterator[tuple[str, FasterMachine]]:
    """(part of the machine, the machine if that is twice as fast)."""
    machine, name = case.machine, case.profile
    profile, path = machine.profiles[name], machine.device_paths.get(name)

    def changed(record: RecordProfile, **faster: float) -> Machine:
        made = machine.with_profile(name, record)
        if path is not None and faster:
            made = made.with_device_path(name, path.faster(**faster))
        return made

    times = backbone_times(case.model, machine)
    half = times.scaled(0.5)
    yield "the disk", FasterMachine(changed(replace(profile, read=profile.read.scaled(0.5))))
    host = replace(profile, host=profile.host.scaled(0.5), host_call_s=profile.host_call_s / 2)
    device = replace(
        profile, device=profile.device.scaled(0.5), device_call_s=profile.device_call_s / 2
    )
    if not machine.is_cuda:
        both = replace(host, device=device.device, device_call_s=device.device_call_s)
        yield "the CPU with its RAM", FasterMachine(changed(both), half)
        return
    link = replace(profile, link=profile.link.scaled(0.5))
    yield "the link between RAM and GPU", FasterMachine(changed(link, link=2.0))
    yield "the CPU with its RAM", FasterMachine(changed(host, cpu=2.0))
    yield "the GPU itself", FasterMachine(changed(device, device=2.0), half)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def _rate(tokens_s: float) -> str:
    return f"{tokens_s:.0f}" if tokens_s >= 100 else f"{tokens_s:.1f}"
