"""Measures this machine for experts: memory, disk, link, kernels, and the runtime's own overhead.

It takes a few seconds, once; machine.py stores the result. It uses the real store, kernels and
runtime, so that the results are valid for them.
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
from coterie.moe.planner import machine as machine_file
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.machine import (
    Machine,
    MachineIdentity,
    RecordProfile,
    TransferCost,
)
from coterie.moe.runtime.device_pool import ResidentExperts
from coterie.moe.runtime.heatmap import Heatmap
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
# roughly the time that measuring takes, for the message to the user
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
    target: ComputeTarget,
    *,
    again: bool = False,
    say: Say | None = None,
    more_s: float = 0.0,
) -> Machine:
    """This machine with a profile of `store`'s records: from the file, or measured now. `more_s`:
    how long the caller will measure after this."""
    say = say or _quiet
    machine_id = identity(target)
    known = None if again else machine_file.load(machine_id)
    name = profile_name(store, target)
    if known is not None and name in known.profiles:
        return known
    say(f"measuring this machine, once, about {SECONDS + more_s:.0f} s")
    if known is None:
        known = measure_machine(machine_id, target)
    known = known.with_profile(name, measure_profile(store, target))
    machine_file.save(known)
    return known


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


def measure_machine(machine_id: MachineIdentity, target: ComputeTarget) -> Machine:
    dram = read_bandwidth("cpu", target)
    device = read_bandwidth(target.device, target) if target.is_cuda else dram
    spent = measure_overhead(target.device)
    return Machine(machine_id, time.time(), dram, device, **asdict(spent))


def measure_profile(store: ExpertStore, target: ComputeTarget) -> RecordProfile:
    layout = store.layout(store.geometry.layers[0])
    size = store.slot_bytes
    count = max(2, min(COLD_BYTES // size, store.geometry.total))
    record = sample_record(layout, size)
    bank = [record.clone() for _ in range(count)]
    read = measure_reads(store, bank)
    for slot in bank:
        slot.copy_(record)
    host, host_call = measure_runs(layout, bank, ComputeTarget("cpu", target.threads))
    link = measure_link(bank, target)
    on_device = (host, host_call)
    if target.is_cuda:
        on_device = measure_runs(layout, [r.to(target.device) for r in bank], target)
    del bank
    load_s = _load_s(layout, target, link)
    return RecordProfile(size, read, link, host, on_device[0], host_call, on_device[1], load_s)


def _load_s(layout: ExpertLayout, target: ComputeTarget, link: TransferCost) -> float:
    """0 for records that are too large to measure: their transfer takes much longer than this."""
    experts = min(COLD_BYTES // layout.nbytes, 64) // 8 * 8
    if not experts:
        return 0.0
    copying = link.each_s if target.is_cuda else link.core_s / target.threads
    return max(0.0, measure_load(target.device, layout, experts) - copying)


def read_bandwidth(device: str, target: ComputeTarget) -> float:
    """Bytes per second of reading an array that is larger than every cache: the best of five."""
    data = torch.ones(_DRAM_BYTES // 4, dtype=torch.float32, device=device)
    return _DRAM_BYTES / min(_times(data.sum, target, 5))


def measure_reads(store: ExpertStore, bank: Sequence[Tensor]) -> TransferCost:
    """Random experts into slots, at the runtime's queue depth and one at a time."""
    keys = store.geometry.keys()
    stride = max(1, len(keys) // 48)
    picked = keys[::stride][:48]
    for key in picked[:DEPTH]:
        store.read(key, bank[0])  # the first read of a record also verifies its checksum
    slots = [bank[i % len(bank)] for i in range(len(picked))]
    if len(bank) < len(picked):
        picked, slots = picked[: len(bank)], slots[: len(bank)]
    with ThreadPoolExecutor(DEPTH) as pool:
        for _ in pool.map(store.read, picked, slots):
            pass
        spent, started = time.process_time(), time.perf_counter()
        for _ in pool.map(store.read, picked, slots):
            pass
        wall, core = time.perf_counter() - started, time.process_time() - spent
    alone = [_timed(partial(store.read, key, bank[0])) for key in picked[:8]]
    return TransferCost(wall / len(picked), lower_quartile(alone), core / len(picked))


def measure_link(bank: Sequence[Tensor], target: ComputeTarget) -> TransferCost:
    """Host memory to device slots: copies by threads on a CPU, copies from pinned memory on
    CUDA."""
    half = len(bank) // 2
    sources, slots = list(bank[:half]), list(bank[half : 2 * half])
    if target.is_cuda:
        sources = [record.pin_memory() for record in sources]
        slots = [record.to(target.device) for record in slots]
    copy = _copy_to_cuda if target.is_cuda else _copy_in_ram
    with ThreadPoolExecutor(DEPTH) as pool:

        def copy_all() -> None:
            for _ in pool.map(copy, slots, sources):
                pass

        copy_all()
        spent = time.process_time()
        wall = _times(copy_all, target, 3)
        core = 0.0 if target.is_cuda else (time.process_time() - spent) / 4
    alone = _times(partial(copy, slots[0], sources[1]), target, 5)
    return TransferCost(lower_quartile(wall) / half, lower_quartile(alone), core / half)


def _copy_in_ram(target: Tensor, source: Tensor) -> None:
    # as the runtime does: other threads can run meanwhile
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def _copy_to_cuda(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def measure_runs(
    layout: ExpertLayout, bank: Sequence[Tensor], target: ComputeTarget
) -> tuple[CostCurve, float]:
    """Seconds per expert by rows, and the fixed seconds of a call. Every call uses the next experts
    of the bank, so that their bytes come from memory and not from a cache, as in a model."""
    taken = _Cycle(bank)
    many = min(_EXPERTS_PER_CALL, len(bank))
    seconds = []
    call_s = 0.0
    for rows in ROWS:
        repeats = 9 if rows < 64 else 3
        several = _run_s(layout, taken, many, rows, target, repeats)
        if rows == 1 and many > 1:
            single = _run_s(layout, taken, 1, rows, target, repeats)
            each = (several - single) / (many - 1)
            # a disturbed measurement must not make the rest negative
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
    layout: ExpertLayout,
    taken: _Cycle,
    experts: int,
    rows: int,
    target: ComputeTarget,
    repeats: int,
) -> float:
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    # a decoded token uses all of them, each token of a prompt uses two
    picks = experts if rows == 1 else min(2, experts)
    tokens = rows * experts // picks
    hidden = torch.randn(tokens, layout.hidden).to(target.device, dtype)
    ids = torch.arange(tokens * picks, dtype=torch.int32).view(tokens, picks) % experts
    out = torch.empty(tokens * picks, layout.hidden, device=target.device)

    def run() -> None:
        threads = None if target.is_cuda else target.threads
        run_experts(layout, hidden, ids, taken.take(experts), out, threads)

    return lower_quartile(_times(run, target, repeats))


def _times(run: Callable[[], object], target: ComputeTarget, repeats: int) -> list[float]:
    run()
    target.wait()

    def once() -> None:
        run()
        target.wait()

    return [_timed(once) for _ in range(repeats)]


def lower_quartile(times: Sequence[float]) -> float:
    """Not the mean: other processes make some of the times too long."""
    return sorted(times)[(len(times) - 1) // 4]


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


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
_BLOCKS = ("q4_k", "q6_k")


def sample_record(layout: ExpertLayout, size: int) -> Tensor:
    """One expert of small random weights, in the layout of the kernels."""
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


_EXPERTS, _TOP_K, _HIDDEN = 16, 4, 64
_TINY_LAYOUT = ExpertLayout(_HIDDEN, 32, True, ("fp32", "fp32", "fp32"))
_REPEATS = 48
# roughly the cache that the experts of a layer use
_CACHE_BYTES = 4 << 20


class ZeroExpertStore:
    """A store of experts that are all zeros and are not read from disk; tiny by default."""

    fingerprint = "zero experts"
    lineage = ("zero experts",)
    staging_bytes = 0

    def __init__(self, layout: ExpertLayout = _TINY_LAYOUT, experts: int = _EXPERTS) -> None:
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
    """Seconds per MoE layer when all experts are resident; and the seconds that are added by each
    load that the layer waits for, by running experts on host and device, and by any other load."""

    layer_s: float
    load_s: float
    both_s: float
    beside_s: float


def measure_overhead(device: str) -> RuntimeOverhead:
    resident = _layer_s(device, ZeroExpertStore(), "lru", slots=_EXPERTS)
    shared = _layer_s(device, ZeroExpertStore(), "hot_cached_static", slots=_EXPERTS // 2)
    # all experts are loaded, few of them are used
    through = _layer_s(device, ZeroExpertStore(), "chunked", slots=_EXPERTS)
    load_s = measure_load(device)
    beside_s = (through - resident - _TOP_K * load_s) / (_EXPERTS - _TOP_K)
    shared_s = max(0.0, shared - resident)
    return RuntimeOverhead(resident, load_s, shared_s, min(max(0.0, beside_s), load_s))


def measure_load(
    device: str, layout: ExpertLayout = _TINY_LAYOUT, experts: int = _EXPERTS
) -> float:
    """The seconds that a load from host memory adds to a layer that waits for it."""
    resident = _layer_s(device, ZeroExpertStore(layout, experts), "lru", slots=experts)
    missing = _layer_s(device, ZeroExpertStore(layout, experts), "lru", slots=_TOP_K)
    return max(0.0, missing - resident) / _TOP_K


def _layer_s(device: str, store: ZeroExpertStore, strategy: str, slots: int) -> float:
    """Consecutive steps use different experts: with few slots every one is a miss. Half of every
    step's experts are hot."""
    experts = store.geometry.num_experts
    # with all of them in RAM a GPU's kernels read them there, and no layer is asked
    share = f"{100 * (experts - 1) / experts}%" if device != "cpu" else "100%"
    settings = MoeSettings(strategy, cache_capacity=slots, host_budget=share, predict="off")
    hot = np.tile([1.0, 0.0], experts // 2)[None]
    heatmap = Heatmap(store.geometry, hot)
    runtime = open_experts(store, settings, device=device, heatmap=heatmap)
    try:
        width = store.layout(0).hidden
        steps = [_step(device, first, width) for first in range(0, experts, _TOP_K)]
        banks, times = torch.ones(8, _CACHE_BYTES // 4), []
        for index in range(len(steps) * 2 + _REPEATS):
            banks[index % 8].sum()
            times.append(_overhead_run_s(runtime, steps[index % len(steps)]))
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
