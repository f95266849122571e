"""Measures this machine for experts: memory, disk, link, kernels, and the runtime's own overhead.

It takes a few seconds, once; machine.py stores the result. It uses the real store, kernels and
runtime, so that the results are valid for them. All costs are measured in turns (timing.py), so
that other processes neither disturb one of them more than another nor go unnoticed.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.expert_mlp import RecordTable, run_experts
from coterie.kernels.cpu.expert_record import pack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.planner import machine as machine_file
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import (
    MACHINE,
    Machine,
    MachineIdentity,
    MeasurementMark,
    RecordProfile,
    TransferCost,
)
from coterie.moe.planner.overhead import (
    LOAD_WORKS,
    OVERHEAD_WORKS,
    load_of,
    load_works,
    overhead_of,
    overhead_works,
)
from coterie.moe.planner.timing import TimedWork, TimingReport, time_together
from coterie.moe.runtime.device_pool import ResidentExperts
from coterie.moe.runtime.transfer import DEPTH
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES
from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Weight, convert

if TYPE_CHECKING:
    from coterie.moe.store.base import ExpertStore

Say = Callable[[str], None]
Item = TypeVar("Item")

ROWS = (1, 4, 16, 64)
# roughly the time that measuring takes, for the message to the user
SECONDS = 4.0
_DRAM_BYTES = 256 << 20
# experts of a call, and bytes of memory that a slice reads or copies: a few milliseconds
_EXPERTS_PER_CALL, _SLICE_BYTES = 8, 16 << 20
# different records that are read
_READS = 48


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """Where experts are computed, and by how many host threads."""

    device: str
    threads: int

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def ensure_measured(
    store: ExpertStore,
    target: ComputeTarget,
    *,
    again: bool = False,
    say: Say | None = None,
    more_s: float = 0.0,
) -> Machine:
    """This machine with a profile of `store`'s records: from the file, or measured now. `more_s`:
    how long the caller will measure after this. A disturbed measurement never replaces a sound one,
    however old."""
    say = say or _quiet
    machine_id = identity(target)
    known = None if again else machine_file.load(machine_id)
    name = profile_name(store, target)
    if known is not None and name in known.profiles:
        return known
    say(f"measuring this machine, once, about {SECONDS + more_s:.0f} s")
    made = measure(store, target, known)
    kept = machine_file.store(made)
    if reason := made.disturbed(name):
        say(disturbed_notice(reason, kept.disturbed(name)))
    return kept


def disturbed_notice(reason: str, kept: str) -> str:
    """`kept`: what disturbed the figures that are used now; "" if they are sound ones."""
    if not kept:
        return f"the measurement was disturbed ({reason}): the earlier, sound figures are used"
    minutes = machine_file.DISTURBED_FOR_S / 60
    return (
        f"the measurement was disturbed ({reason}): it is less certain, and is used for "
        f"{minutes:.0f} minutes"
    )


def identity(target: ComputeTarget) -> MachineIdentity:
    library = native()
    device = torch.cuda.get_device_name(target.device) if target.is_cuda else "cpu"
    kernels = "torch" if library is None else f"{library.isa} {library.path.stem}"
    return MachineIdentity(_cpu_name(), target.threads, device, str(torch.__version__), kernels)


def profile_name(store: ExpertStore, target: ComputeTarget) -> str:
    """Names everything that a record's cost depends on: layout, device, and the store (which may be
    on another disk)."""
    layout = store.layout(store.geometry.layers[0])
    shape = f"{'-'.join(layout.kinds)} {layout.hidden}x{layout.intermediate}"
    bank = "cold" if store.expert_bytes >= COLD_BYTES else f"{store.expert_bytes >> 20}MiB"
    return f"{shape} {type(store).__name__} {store.fingerprint[:16]} {target.device} {bank}"


def measure(store: ExpertStore, target: ComputeTarget, known: Machine | None) -> Machine:
    """A profile of `store`'s records and, unless it is known, the machine, in turns."""
    with ExitStack() as stack:
        record = RecordWorks(stack, store, target)
        works = dict(record.works)
        if known is None:
            works |= _machine_works(stack, target)
        report = time_together(works)
        if known is None:
            known = _machine_of(report, identity(target), target)
        mark = MeasurementMark(time.time(), record.spreads(report), report.reason(record.works))
        return known.with_profile(profile_name(store, target), record.profile(report), mark)


def _machine_works(stack: ExitStack, target: ComputeTarget) -> dict[str, TimedWork]:
    works = overhead_works(stack, target.device)
    works["host memory"] = _read_work("cpu", target)
    if target.is_cuda:
        works["device memory"] = _read_work(target.device, target)
    return works


def _machine_of(
    report: TimingReport, machine_id: MachineIdentity, target: ComputeTarget
) -> Machine:
    memory = [name for name in ("host memory", "device memory") if name in report.timings]
    rates = [_read_bytes() / report.seconds(name) for name in memory]
    spreads = {"memory": report.spread(*memory), "runtime": report.spread(*OVERHEAD_WORKS)}
    now = time.time()
    mark = MeasurementMark(now, spreads, report.reason([*OVERHEAD_WORKS, *memory]))
    spent = asdict(overhead_of(report))
    return Machine(machine_id, now, rates[0], rates[-1], **spent, marks={MACHINE: mark})


def _read_bytes() -> int:
    return min(_SLICE_BYTES, _DRAM_BYTES // 4)


def _read_work(device: str, target: ComputeTarget) -> TimedWork:
    """Reads parts of an array that is larger than every cache, one after another."""
    data = torch.ones(_DRAM_BYTES // 4, dtype=torch.float32, device=device)
    each = _read_bytes() // 4
    parts = _Cycle([data[at : at + each] for at in range(0, len(data), each)])

    def read() -> None:
        parts.take(1)[0][1].sum()
        target.wait()

    return TimedWork(read, threads=target.threads)


class RecordWorks:
    """What is timed for one kind of expert record. `stack` releases what the works use."""

    def __init__(self, stack: ExitStack, store: ExpertStore, target: ComputeTarget) -> None:
        self._store, self._target = store, target
        self._layout, self._size = store.layout(store.geometry.layers[0]), store.slot_bytes
        count = max(2, min(COLD_BYTES // self._size, store.geometry.total))
        record = sample_record(self._layout, self._size)
        self._bank = [record.clone() for _ in range(count)]
        fitting = max(2, _SLICE_BYTES // self._size)
        self._experts = min(_EXPERTS_PER_CALL, count, fitting)
        self._copies = min(2 * DEPTH, count // 2, fitting)
        self._reads = min(2 * DEPTH, count, fitting)
        self._pool = stack.enter_context(ThreadPoolExecutor(DEPTH))
        on_host = ComputeTarget("cpu", target.threads)
        self.works = self._read_works() | self._link_works()
        self.works |= self._run_works("host", self._bank, on_host)
        if target.is_cuda:
            bank = [each.to(target.device) for each in self._bank]
            self.works |= self._run_works("device", bank, target)
        # records that are too large to measure: their transfer takes much longer than this
        loads = min(COLD_BYTES // self._layout.nbytes, 64) // 8 * 8
        if loads:
            self.works |= load_works(stack, target.device, self._layout, loads)

    def _read_works(self) -> dict[str, TimedWork]:
        """Random experts into slots, at the runtime's queue depth and one at a time."""
        store, pool = self._store, self._pool
        keys = store.geometry.keys()
        picked = keys[:: max(1, len(keys) // _READS)][:_READS]
        slots = [torch.empty_like(self._bank[0]) for _ in range(self._reads)]
        for _ in pool.map(store.read, picked, (slots * len(picked))[: len(picked)]):
            pass  # the first read of a record also verifies its checksum
        many, one = _Cycle(picked), _Cycle(picked)

        def read_many() -> None:
            for _ in pool.map(store.read, [key for _, key in many.take(len(slots))], slots):
                pass

        def read_one() -> None:
            store.read(one.take(1)[0][1], slots[0])

        return {
            "read": TimedWork(read_many, pooled=True, threads=self._target.threads),
            "read alone": TimedWork(read_one, pooled=True),
        }

    def _link_works(self) -> dict[str, TimedWork]:
        """Host memory to device slots: copies by threads on a CPU, copies from pinned memory on
        CUDA."""
        target, pool, half = self._target, self._pool, len(self._bank) // 2
        sources, slots = list(self._bank[:half]), list(self._bank[half : 2 * half])
        if target.is_cuda:
            sources = [record.pin_memory() for record in sources]
            slots = [record.to(target.device) for record in slots]
        copy = _copy_to_cuda if target.is_cuda else _copy_in_ram
        pairs = _Cycle(list(zip(slots, sources, strict=True)))

        def copy_all(count: int) -> None:
            taken = [pair for _, pair in pairs.take(count)]
            for _ in pool.map(copy, *zip(*taken, strict=True)):
                pass
            target.wait()

        def copy_one() -> None:
            copy(*pairs.take(1)[0][1])
            target.wait()

        return {
            "link": TimedWork(partial(copy_all, self._copies), pooled=True, threads=target.threads),
            "link alone": TimedWork(copy_one),
        }

    def _run_works(
        self, side: str, bank: Sequence[Tensor], target: ComputeTarget
    ) -> dict[str, TimedWork]:
        """Calls of experts. Every call uses the next experts of the bank, so that their bytes come
        from memory and not from a cache, as in a model."""
        taken = _Cycle(bank)
        works = {
            f"{side} {rows}": _run_work(self._layout, taken, self._experts, rows, target)
            for rows in ROWS
        }
        if self._experts > 1:
            works[f"{side} one"] = _run_work(self._layout, taken, 1, 1, target)
        return works

    def profile(self, report: TimingReport) -> RecordProfile:
        target = self._target
        read, alone = report.timings["read"], report.timings["read alone"]
        reads = TransferCost(read.seconds / self._reads, alone.seconds, read.core_s / self._reads)
        link, alone = report.timings["link"], report.timings["link alone"]
        core_s = 0.0 if target.is_cuda else link.core_s / self._copies
        links = TransferCost(link.seconds / self._copies, alone.seconds, core_s)
        host, host_call = self._curve("host", report)
        device, device_call = self._curve("device", report) if target.is_cuda else (host, host_call)
        copying = links.each_s if target.is_cuda else links.core_s / target.threads
        load_s = max(0.0, load_of(report) - copying) if LOAD_WORKS[0] in self.works else 0.0
        return RecordProfile(self._size, reads, links, host, device, host_call, device_call, load_s)

    def _curve(self, side: str, report: TimingReport) -> tuple[CostCurve, float]:
        """Seconds per expert by rows, and the fixed seconds of a call."""
        many = self._experts
        several = [report.seconds(f"{side} {rows}") for rows in ROWS]
        single = report.seconds(f"{side} one") if many > 1 else 0.0
        return curve_of(several, single, many)

    def spreads(self, report: TimingReport) -> dict[str, float]:
        """By kind of cost, as `RecordProfile.slowed` names them."""
        groups = {
            "read": ["read", "read alone"],
            "link": ["link", "link alone"],
            "run": [name for name in self.works if name.startswith(("host", "device"))],
            "load": [name for name in LOAD_WORKS if name in self.works],
        }
        return {kind: report.spread(*names) for kind, names in groups.items() if names}


def curve_of(several: Sequence[float], single: float, many: int) -> tuple[CostCurve, float]:
    """From calls of `many` experts by rows, and of a single one with one row. None is negative,
    whatever the errors of the measurements."""
    call_s = 0.0
    if many > 1:
        each = (several[0] - single) / (many - 1)
        call_s = min(max(0.0, single - each), min(several) / 2)
    # more rows never take less time: what was seen to take longer with fewer was disturbed
    least = [min(several[row:]) for row in range(len(several))]
    return CostCurve(ROWS, tuple((taken - call_s) / many for taken in least)), call_s


def _copy_in_ram(target: Tensor, source: Tensor) -> None:
    # as the runtime does: other threads can run meanwhile
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def _copy_to_cuda(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class _Cycle(Generic[Item]):
    """The next items, again and again."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items, self._next = items, 0

    def take(self, count: int) -> list[tuple[int, Item]]:
        first, self._next = self._next, self._next + count
        return [(i, self._items[(first + i) % len(self._items)]) for i in range(count)]


def _run_work(
    layout: ExpertLayout, taken: _Cycle[Tensor], experts: int, rows: int, target: ComputeTarget
) -> TimedWork:
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    # a decoded token uses all of them, each token of a prompt uses two
    picks = experts if rows == 1 else min(2, experts)
    tokens = rows * experts // picks
    hidden = torch.randn(tokens, layout.hidden).to(target.device, dtype)
    ids = torch.arange(tokens * picks, dtype=torch.int32).view(tokens, picks) % experts
    out = torch.empty(tokens * picks, layout.hidden, device=target.device)
    threads = None if target.is_cuda else target.threads

    def run(threads: int | None = threads) -> None:
        run_experts(layout, hidden, ids, taken.take(experts), out, threads)
        target.wait()

    on_one = None if target.is_cuda else partial(run, 1)
    return TimedWork(run, threads=target.threads, on_one=on_one)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(_pair(line) for line in reversed(lines) if ":" in line)
    name = facts.get("model name") or " ".join(
        facts[key] for key in ("CPU implementer", "CPU part") if key in facts
    )
    return f"{platform.machine()} {name}".strip()


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _quiet(_: str) -> None:
    return None


# larger than every cache; a store with fewer bytes of experts than this is measured as it is
COLD_BYTES = 192 << 20


def sample_record(layout: ExpertLayout, size: int) -> Tensor:
    """One expert of small random weights, in the layout of the kernels."""
    record = torch.zeros(size, dtype=torch.uint8)
    drawn = torch.Generator().manual_seed(0)
    parts: dict[str, Weight | Tensor] = {}
    for part in layout.parts():
        if part.kind in BLOCK_KINDS:
            elements, nbytes = BLOCK_SIZES[part.kind.upper()]
            width = part.columns // elements * nbytes
            parts[part.name] = GgufBlocks(
                part.kind.upper(), torch.zeros(part.rows, width, dtype=torch.uint8)
            )
            continue
        shape = (part.rows, part.columns) if part.columns else (part.rows,)
        values = torch.randn(shape, generator=drawn) * 0.02
        parts[part.name] = values if not part.columns else convert(DenseWeight(values), part.kind)
    pack_record(layout, parts, record)
    return record


class SyntheticResidents:
    """Records in memory in the place of every expert of `store`."""

    def __init__(self, store: ExpertStore) -> None:
        geometry = store.geometry
        self._keys = geometry.keys()
        layouts = {layer: store.layout(layer) for layer in geometry.layers}
        self._banks = _banks(layouts, len(self._keys))
        tables = {layer: RecordTable(geometry.num_experts) for layer in layouts}
        none_on_device = np.zeros((len(layouts), geometry.num_experts), dtype=bool)
        self.resident = ResidentExperts(tables, layouts, none_on_device)
        self._first = 0
        self.rotate()

    def rotate(self) -> None:
        """Give every expert another record, so that the next use finds none in a cache."""
        for place, (layer, expert) in enumerate(self._keys):
            bank = self._banks[self.resident.layouts[layer]]
            self.resident.tables[layer].set(expert, bank[(self._first + place) % len(bank)])
        self._first += max(1, len(self._keys) // 3)


def _banks(layouts: Mapping[int, ExpertLayout], experts: int) -> dict[ExpertLayout, list[Tensor]]:
    kinds = set(layouts.values())
    banks = {}
    for layout in kinds:
        count = max(2, min(COLD_BYTES // len(kinds) // layout.nbytes, experts))
        record = sample_record(layout, layout.nbytes)
        banks[layout] = [record.clone() for _ in range(count)]
    return banks
