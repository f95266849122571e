"""Measures this machine for experts: memory, disk, link, kernels, and the runtime's own overhead.

Takes a few seconds, once; machine.py keeps the result. Uses the real store, the real kernels and
the real runtime, so that what it says holds for them.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coterie.core.moe import MoeSettings
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.expert_mlp import RecordTable, run_experts
from coterie.kernels.cpu.expert_record import pack_record
from coterie.kernels.expert_layout import ExpertLayout, matrix_bytes
from coterie.moe.planner import machine as kept
from coterie.moe.planner.machine import (
    CostCurve,
    Machine,
    MachineIdentity,
    RecordProfile,
    TransferCost,
)
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.resident import ResidentExperts
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.step import ExpertStep
from coterie.moe.runtime.transfer import DEPTH
from coterie.moe.store.base import ExpertGeometry, Key, StoreTimings
from coterie.moe.store.disk import DiskReader
from coterie.weights.quantize import DenseWeight, GgufBlocks, Weight, convert

if TYPE_CHECKING:
    from coterie.moe.store.base import ExpertStore

Say = Callable[[str], None]

ROWS = (1, 4, 16, 64)
# what measuring takes, roughly: told to whoever waits
SECONDS = 4.0
_DRAM_BYTES = 256 << 20
_EXPERTS_PER_CALL = 8


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
    place: ComputeTarget,
    *,
    again: bool = False,
    say: Say | None = None,
    more_s: float = 0.0,
) -> Machine:
    """This machine with a profile of `store`'s records: from the kept file, else measured now.
    `more_s`: what the caller is going to measure behind it."""
    say = say or _quiet
    who = identity(place)
    known = None if again else kept.load(who)
    name = profile_name(store, place)
    if known is not None and name in known.profiles:
        return known
    say(f"measuring this machine, once, about {SECONDS + more_s:.0f} s")
    if known is None:
        known = measure_machine(who, place)
    known = known.with_profile(name, measure_profile(store, place))
    kept.save(known)
    return known


def identity(place: ComputeTarget) -> MachineIdentity:
    library = native()
    device = torch.cuda.get_device_name(place.device) if place.is_cuda else "cpu"
    kernels = "torch" if library is None else f"{library.isa} {library.path.stem}"
    return MachineIdentity(_cpu_name(), place.threads, device, str(torch.__version__), kernels)


def profile_name(store: ExpertStore, place: ComputeTarget) -> str:
    """Layout, device and the store itself, since it lies on a disk of its own: what a record's cost
    depends on."""
    layout = store.layout(store.geometry.layers[0])
    shape = f"{'-'.join(layout.kinds)} {layout.hidden}x{layout.intermediate}"
    bank = "cold" if store.expert_bytes >= COLD_BYTES else f"{store.expert_bytes >> 20}MiB"
    return f"{shape} {type(store).__name__} {store.fingerprint[:16]} {place.device} {bank}"


def measure_machine(who: MachineIdentity, place: ComputeTarget) -> Machine:
    dram = read_bandwidth("cpu", place)
    device = read_bandwidth(place.device, place) if place.is_cuda else dram
    spent = measure_overhead(place.device)
    return Machine(who, time.time(), dram, device, **asdict(spent))


def measure_profile(store: ExpertStore, place: ComputeTarget) -> RecordProfile:
    layout = store.layout(store.geometry.layers[0])
    size = store.slot_bytes
    count = max(2, min(COLD_BYTES // size, store.geometry.total))
    record = sample_record(layout, size)
    bank = [record.clone() for _ in range(count)]
    read = measure_reads(store, bank)
    for slot in bank:
        slot.copy_(record)
    host, host_call = measure_runs(layout, bank, ComputeTarget("cpu", place.threads))
    link = measure_link(bank, place)
    on_device = (host, host_call)
    if place.is_cuda:
        on_device = measure_runs(layout, [r.to(place.device) for r in bank], place)
    del bank
    load_s = _load_s(layout, place, link)
    return RecordProfile(size, read, link, host, on_device[0], host_call, on_device[1], load_s)


def _load_s(layout: ExpertLayout, place: ComputeTarget, link: TransferCost) -> float:
    """Records too large for this take long enough to hide it."""
    experts = min(COLD_BYTES // layout.nbytes, 64) // 8 * 8
    if not experts:
        return 0.0
    copying = link.each_s if place.is_cuda else link.core_s / place.threads
    return max(0.0, measure_load(place.device, layout, experts) - copying)


def read_bandwidth(device: str, place: ComputeTarget) -> float:
    """Bytes per second of reading an array past every cache: the best of five."""
    data = torch.ones(_DRAM_BYTES // 4, dtype=torch.float32, device=device)
    return _DRAM_BYTES / min(_times(data.sum, place, 5))


def measure_reads(store: ExpertStore, bank: Sequence[Tensor]) -> TransferCost:
    """Random experts into slots, at the runtime's queue depth and one at a time."""
    keys = store.geometry.keys()
    stride = max(1, len(keys) // 48)
    picked = keys[::stride][:48]
    for key in picked[:DEPTH]:
        store.read(key, bank[0])  # a first read also checks the checksum
    slots = [bank[i % len(bank)] for i in range(len(picked))]
    if len(bank) < len(picked):
        picked, slots = picked[: len(bank)], slots[: len(bank)]
    with ThreadPoolExecutor(DEPTH) as pool:
        for _ in pool.map(store.read, picked, slots):
            pass
        spent, began = time.process_time(), time.perf_counter()
        for _ in pool.map(store.read, picked, slots):
            pass
        wall, core = time.perf_counter() - began, time.process_time() - spent
    alone = [_timed(partial(store.read, key, bank[0])) for key in picked[:8]]
    return TransferCost(wall / len(picked), lower_quartile(alone), core / len(picked))


def measure_link(bank: Sequence[Tensor], place: ComputeTarget) -> TransferCost:
    """Host memory to device slots: a copy by the pool on a CPU, a pinned copy on CUDA."""
    half = len(bank) // 2
    source, target = list(bank[:half]), list(bank[half : 2 * half])
    if place.is_cuda:
        source = [record.pin_memory() for record in source]
        target = [record.to(place.device) for record in target]
    copy = _copy_to_cuda if place.is_cuda else _copy_in_ram
    with ThreadPoolExecutor(DEPTH) as pool:

        def all_of_them() -> None:
            for _ in pool.map(copy, target, source):
                pass

        all_of_them()
        spent = time.process_time()
        wall = _times(all_of_them, place, 3)
        core = 0.0 if place.is_cuda else (time.process_time() - spent) / 4
    alone = _times(partial(copy, target[0], source[1]), place, 5)
    return TransferCost(lower_quartile(wall) / half, lower_quartile(alone), core / half)


def _copy_in_ram(target: Tensor, source: Tensor) -> None:
    # as the runtime does: other threads run meanwhile
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def _copy_to_cuda(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def measure_runs(
    layout: ExpertLayout, bank: Sequence[Tensor], place: ComputeTarget
) -> tuple[CostCurve, float]:
    """Seconds per expert by rows, and the fixed seconds of a call. Every call takes the next
    experts of the bank, so that their bytes come from memory as they do in a model."""
    taken = _Cycle(bank)
    many = min(_EXPERTS_PER_CALL, len(bank))
    seconds = []
    call_s = 0.0
    for rows in ROWS:
        repeats = 9 if rows < 64 else 3
        several = _run_s(layout, taken, many, rows, place, repeats)
        if rows == 1 and many > 1:
            single = _run_s(layout, taken, 1, rows, place, repeats)
            each = (several - single) / (many - 1)
            # a disturbed take must not make the rest negative
            call_s = min(max(0.0, single - each), several / 2)
        seconds.append((several - call_s) / many)
    return CostCurve(ROWS, tuple(seconds)), call_s


class _Cycle:
    def __init__(self, bank: Sequence[Tensor]) -> None:
        self.bank, self.next = bank, 0

    def take(self, count: int) -> list[tuple[int, Tensor]]:
        first, self.next = self.next, self.next + count
        return [(i, self.bank[(first + i) % len(self.bank)]) for i in range(count)]


def _run_s(
    layout: ExpertLayout, taken: _Cycle, experts: int, rows: int, place: ComputeTarget, repeats: int
) -> float:
    dtype = torch.bfloat16 if place.is_cuda else torch.float32
    # a decoded token goes to all of them, a prompt's tokens to two each
    picks = experts if rows == 1 else min(2, experts)
    tokens = rows * experts // picks
    hidden = torch.randn(tokens, layout.hidden).to(place.device, dtype)
    ids = torch.arange(tokens * picks, dtype=torch.int32).view(tokens, picks) % experts
    out = torch.empty(tokens * picks, layout.hidden, device=place.device)

    def run() -> None:
        threads = None if place.is_cuda else place.threads
        run_experts(layout, hidden, ids, taken.take(experts), out, threads)

    return lower_quartile(_times(run, place, repeats))


def _times(run: Callable[[], object], place: ComputeTarget, repeats: int) -> list[float]:
    run()
    place.wait()

    def once() -> None:
        run()
        place.wait()

    return [_timed(once) for _ in range(repeats)]


def lower_quartile(times: Sequence[float]) -> float:
    """The lower quartile: a neighbour's work is not this machine's speed."""
    return sorted(times)[(len(times) - 1) // 4]


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(_pair(line) for line in reversed(lines) if ":" in line)
    named = facts.get("model name") or " ".join(
        facts[key] for key in ("CPU implementer", "CPU part") if key in facts
    )
    return f"{platform.machine()} {named}".strip()


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _quiet(_: str) -> None:
    return None


# past every cache; a smaller set of experts than this is measured as it is
COLD_BYTES = 192 << 20
_BLOCKS = ("q4_k", "q6_k")


def sample_record(layout: ExpertLayout, size: int) -> Tensor:
    """One expert of small random weights, laid out as the kernels want it."""
    record = torch.zeros(size, dtype=torch.uint8)
    drawn = torch.Generator().manual_seed(0)
    parts: dict[str, Weight | Tensor] = {}
    for part in layout.parts():
        if part.kind in _BLOCKS:
            width = matrix_bytes(part.kind, 1, part.columns)
            parts[part.name] = GgufBlocks(
                part.kind, torch.zeros(part.rows, width, dtype=torch.uint8)
            )
            continue
        shape = (part.rows, part.columns) if part.columns else (part.rows,)
        values = torch.randn(shape, generator=drawn) * 0.02
        parts[part.name] = values if not part.columns else convert(DenseWeight(values), part.kind)
    pack_record(layout, parts, record)
    return record


class SyntheticResidents:
    """As if every expert of `store` were in memory."""

    def __init__(self, store: ExpertStore) -> None:
        geometry = store.geometry
        self._keys = geometry.keys()
        layouts = {layer: store.layout(layer) for layer in geometry.layers}
        self._banks = _banks(layouts, len(self._keys))
        tables = {layer: RecordTable(geometry.num_experts) for layer in layouts}
        nowhere = np.zeros((len(layouts), geometry.num_experts), dtype=bool)
        self.resident = ResidentExperts(tables, layouts, nowhere)
        self._first = 0
        self.turn()

    def turn(self) -> None:
        """Every expert lies elsewhere now: whoever is asked for again is not in a cache."""
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


_EXPERTS, _TOP_K, _HIDDEN = 16, 4, 64
_FEATHER = ExpertLayout(_HIDDEN, 32, True, ("fp32", "fp32", "fp32"))
_REPEATS = 48
# what the experts of a layer push out of the caches, roughly
_WASH_BYTES = 4 << 20


class ZeroExpertStore:
    """Experts that are all zeros, and are read from nowhere; tiny unless told otherwise."""

    fingerprint = "feather"
    lineage = ("feather",)
    staging_bytes = 0

    def __init__(self, layout: ExpertLayout = _FEATHER, experts: int = _EXPERTS) -> None:
        self.geometry = ExpertGeometry((0,), experts, _TOP_K)
        self._layout = layout
        self.slot_bytes = layout.nbytes
        self.expert_bytes = self.slot_bytes * experts
        self.disk, self.spent = DiskReader("buffered"), StoreTimings()

    def layout(self, layer: int) -> ExpertLayout:
        return self._layout

    def read_bytes(self, key: Key) -> int:
        return 0

    def read(self, key: Key, out: Tensor) -> int:
        out.zero_()
        return 0

    def tensors(self) -> frozenset[str]:
        return frozenset()

    def files(self) -> frozenset[Path]:
        return frozenset()

    def close(self) -> None:
        self.disk.close()


@dataclass(frozen=True, slots=True)
class RuntimeOverhead:
    """Seconds per MoE layer when all is resident; what each load adds that the layer waits for,
    what it adds that host and device both have experts to run, and what a load beside it adds."""

    layer_s: float
    load_s: float
    both_s: float
    beside_s: float


def measure_overhead(device: str) -> RuntimeOverhead:
    resident = _layer_s(device, ZeroExpertStore(), "lru", slots=_EXPERTS)
    shared = _layer_s(device, ZeroExpertStore(), "hot_cached_static", slots=_EXPERTS // 2)
    # all experts are loaded, few of them asked for
    through = _layer_s(device, ZeroExpertStore(), "chunked", slots=_EXPERTS)
    load_s = measure_load(device)
    beside_s = (through - resident - _TOP_K * load_s) / (_EXPERTS - _TOP_K)
    shared_s = max(0.0, shared - resident)
    return RuntimeOverhead(resident, load_s, shared_s, min(max(0.0, beside_s), load_s))


def measure_load(device: str, layout: ExpertLayout = _FEATHER, experts: int = _EXPERTS) -> float:
    """What a load out of host memory adds to a layer that waits for it."""
    resident = _layer_s(device, ZeroExpertStore(layout, experts), "lru", slots=experts)
    missing = _layer_s(device, ZeroExpertStore(layout, experts), "lru", slots=_TOP_K)
    return max(0.0, missing - resident) / _TOP_K


def _layer_s(device: str, store: ZeroExpertStore, strategy: str, slots: int) -> float:
    """Neighbouring steps ask for different experts: with few slots every one is a miss. Half of
    every step's experts are hot."""
    settings = MoeSettings(strategy, cache_capacity=slots, host_budget="100%", predict="off")
    experts = store.geometry.num_experts
    hot = np.tile([1.0, 0.0], experts // 2)[None]
    heatmap = Heatmap(store.geometry, hot)
    runtime = open_experts(store, settings, device=device, heatmap=heatmap)
    try:
        width = store.layout(0).hidden
        steps = [_step(device, first, width) for first in range(0, experts, _TOP_K)]
        banks, times = torch.ones(8, _WASH_BYTES // 4), []
        for turn in range(len(steps) * 2 + _REPEATS):
            banks[turn % 8].sum()
            times.append(_overhead_run_s(runtime, steps[turn % len(steps)]))
        settled = sorted(times[len(steps) * 2 :])
        return settled[len(settled) // 4]
    finally:
        runtime.close()


def _step(device: str, first: int, width: int) -> ExpertStep:
    ids = torch.arange(first, first + _TOP_K, dtype=torch.int32)[None]
    weights = torch.full((1, _TOP_K), 1.0 / _TOP_K, device=device)
    return ExpertStep(0, "decode", torch.zeros(1, width, device=device), ids, weights)


def _overhead_run_s(runtime: ExpertRuntime, step: ExpertStep) -> float:
    with torch.inference_mode():
        started = time.perf_counter()
        out = runtime.run(step)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        return time.perf_counter() - started
