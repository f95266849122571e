"""Carries out one layer's waves on both sides at once, or on the one that has work.

Rows of host experts come back to where the others are. Chooses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.core.errors import InternalError
from coterie.kernels.cpu.expert_mlp import Records, run_experts
from coterie.moe.dispatch.base import Demand
from coterie.moe.runtime.step import DemandClasses
from coterie.moe.runtime.tiers import ExpertLoad
from coterie.moe.runtime.usage import LayerSpan, UsageTally, seconds_outside

if TYPE_CHECKING:
    from coterie.kernels.cpu.expert_mlp import RecordTable
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.moe.dispatch.base import Wave
    from coterie.moe.runtime.step import ExpertStep
    from coterie.moe.runtime.tiers import ExpertLoad, HostEntry, HostTier
    from coterie.moe.runtime.transfer import PendingLoads, TierTransfer
    from coterie.moe.store.base import Key


class LayerExecutor:
    def __init__(self, host: HostTier, loads: PendingLoads, transfer: TierTransfer) -> None:
        self._host, self._device, self._loads = host, loads.device, loads
        self._host_side = HostSide(host, transfer)
        self._helper = ThreadPoolExecutor(1, "experts-host")
        self.kernel: Kernel = run_experts

    def run(self, job: LayerJob, waves: Sequence[Wave]) -> None:
        if len(waves) == 1 and self._resident(job, waves[0]):
            return
        host = tuple(expert for wave in waves for expert in wave.host)
        if not any(wave.device or wave.load for wave in waves):
            self._on_host(job)
            self._host_side.run(job, host)
            self._bring(job, host)
        elif not host:
            self._waves(job, waves)
        else:
            self._both(job, waves, host)

    def _resident(self, job: LayerJob, wave: Wave) -> bool:
        """The common case: all bytes are in one memory already, so one call computes everything.
        Whether it was so."""
        if self._device.pending:
            self._loads.sweep()
        # on CUDA a slot whose copy was not yet swept is not ordered before what runs now
        unordered = job.out.is_cuda and bool(self._device.pending)
        if wave.load or unordered or not self._device.holds(job.layer, wave.device):
            return False
        if not wave.host:
            self._quick(job, self._device.tables[job.layer], "device")
            return True
        if job.out.is_cuda:
            return False
        entries = self._host.find_all(job.layer, wave.host)
        if entries is None:
            return False
        job.tally.host_hits += len(entries)
        records: Records = self._host.tables[job.layer]
        if wave.device:
            records = [(entry.key[1], entry.record) for entry in entries]
            records += self._device.tables[job.layer].pick(wave.device)
        try:
            self._quick(job, records, "host")
        finally:
            self._host.release(*entries)
        return True

    def _quick(self, job: LayerJob, records: Records, side: str) -> None:
        step, begin = job.step, time.perf_counter()
        self.kernel(job.layout, step.hidden, step.topk_ids, records, job.out)
        if job.exact and job.out.is_cuda:
            torch.cuda.current_stream(job.out.device).synchronize()
        job.worked[side].append((begin, time.perf_counter()))

    def _both(self, job: LayerJob, waves: Sequence[Wave], host: tuple[int, ...]) -> None:
        self._split_threads(job)
        self._on_host(job)
        future = self._helper.submit(self._host_in_helper, job, host)
        try:
            self._waves(job, waves)
        except BaseException:
            wait([future])
            raise
        future.result()
        self._bring(job, host)

    def _host_in_helper(self, job: LayerJob, host: tuple[int, ...]) -> None:
        with torch.inference_mode():
            self._host_side.run(job, host)

    def _split_threads(self, job: LayerJob) -> None:
        """In proportion to rows, where both sides run on the same cores."""
        threads = torch.get_num_threads()
        if not job.out.is_cuda and threads > 1:
            job.host_threads = min(threads - 1, max(1, round(threads * job.host_share())))
            job.device_threads = threads - job.host_threads

    def _on_host(self, job: LayerJob) -> None:
        if job.out.is_cuda:
            job.host_x = job.step.hidden.to("cpu", torch.float32)
            job.host_out = torch.empty(job.out.shape, dtype=torch.float32)

    def _bring(self, job: LayerJob, host: tuple[int, ...]) -> None:
        """Rows computed on the host, to where the others are."""
        if job.host_out is job.out:
            return
        flat = job.step.topk_ids.reshape(-1)
        picked = torch.isin(flat, torch.tensor(host, dtype=flat.dtype)).nonzero()[:, 0]
        job.out[picked.to(job.out.device)] = job.host_out[picked].to(job.out.device)

    def _waves(self, job: LayerJob, waves: Sequence[Wave]) -> None:
        turn = DeviceSide(self._loads, job)
        for index, wave in enumerate(waves):
            turn.run(wave, waves[index + 1] if index + 1 < len(waves) else None)

    def close(self) -> None:
        self._helper.shutdown()


class DeviceSide:
    """The device's side of a layer."""

    def __init__(self, loads: PendingLoads, job: LayerJob) -> None:
        self._loads, self._job = loads, job
        self._device = loads.device
        self._sink: SimpleQueue[ExpertLoad] = SimpleQueue()
        self._started: set[tuple[Key, int]] = set()
        self._waiting: set[Key] = set()
        self._ready: list[int] = []
        # slots whose experts this wave has still to compute
        self._busy: set[int] = set()

    def run(self, wave: Wave, ahead: Wave | None) -> None:
        for key, slot in wave.load:
            if (key, slot) not in self._started:
                self._load(key, slot)
        self._started = set()
        self._busy = set()
        self._sort(wave.device)
        while self._ready or self._waiting:
            self._look_ahead(ahead)
            if self._ready:
                self._compute()
            else:
                begin = time.perf_counter()
                arrival = self._sink.get()
                self._job.waited(begin)
                self._take(arrival)
            self._collect()

    def _load(self, key: Key, slot: int) -> None:
        begin = time.perf_counter()
        pending = self._device.pending.get(slot)
        self._loads.start(key, slot, self._job.tally)
        if pending is not None:
            self._job.waited(begin)

    def _sort(self, experts: Sequence[int]) -> None:
        for expert in experts:
            key = (self._job.layer, expert)
            slot = self._device.slot_of(key)
            if slot is None:
                raise InternalError(f"expert {key} was to run from a slot and lies in none")
            self._busy.add(slot)
            arrival = self._device.pending.get(slot)
            if arrival is None:
                self._ready.append(expert)
                continue
            self._waiting.add(key)
            self._loads.hurry(arrival)
            arrival.tell(self._sink)

    def _look_ahead(self, ahead: Wave | None) -> None:
        """Start the next wave's loads whose slots are free by now."""
        for key, slot in ahead.load if ahead else ():
            if slot in self._busy or (key, slot) in self._started:
                continue
            pending = self._device.pending.get(slot)
            if pending is None or pending.done:
                self._load(key, slot)
                self._started.add((key, slot))

    def _compute(self) -> None:
        layer = self._job.layer
        self._job.compute_device(self._device.tables[layer], self._ready)
        for expert in self._ready:
            slot = self._device.slot_of((layer, expert))
            self._busy.discard(-1 if slot is None else slot)
        self._ready = []

    def _take(self, arrival: ExpertLoad) -> None:
        self._loads.retire(arrival, self._job.tally)
        if arrival.error is not None:
            raise arrival.error
        self._waiting.discard(arrival.key)
        self._ready.append(arrival.key[1])

    def _collect(self) -> None:
        try:
            while True:
                self._take(self._sink.get_nowait())
        except Empty:
            return


class HostSide:
    def __init__(self, host: HostTier, transfer: TierTransfer) -> None:
        self._host, self._transfer = host, transfer

    def run(self, job: LayerJob, experts: tuple[int, ...]) -> None:
        turn = _HostLayerRun(self._host, self._transfer, job)
        try:
            turn.run(experts)
        finally:
            turn.let_go()


class _HostLayerRun:
    """Entries held, read and still to come while one layer is computed."""

    def __init__(self, host: HostTier, transfer: TierTransfer, job: LayerJob) -> None:
        self._host, self._transfer, self._job = host, transfer, job
        self._ready: list[HostEntry] = []
        self._loading: dict[Key, HostEntry] = {}
        # reads that nobody else had asked for
        self._mine: set[Key] = set()
        self._sink: SimpleQueue[ExpertLoad] = SimpleQueue()

    def run(self, experts: tuple[int, ...]) -> None:
        # those that are here are pinned before any read can push them out
        missing = [key for key in self._keys(experts) if not self._found(key)]
        missing.reverse()
        while self._ready or self._loading or missing:
            self._ask(missing)
            if self._ready:
                self._compute()
            elif self._loading:
                self._await()
            self._collect()

    def _keys(self, experts: tuple[int, ...]) -> list[Key]:
        return [(self._job.layer, expert) for expert in experts]

    def _found(self, key: Key) -> bool:
        entry = self._host.find(key)
        if entry is None:
            return False
        self._ready.append(entry)
        self._job.tally.host_hits += 1
        return True

    def _ask(self, missing: list[Key]) -> None:
        """Start as many reads as there is room for; wait for room only when idle otherwise."""
        while missing:
            mine = ExpertLoad(missing[-1])
            block = not (self._ready or self._loading)
            entry = self._host.acquire(missing[-1], mine, block=block)
            if entry is None:
                return
            missing.pop()
            arrival = entry.arrival
            if arrival is None:
                self._ready.append(entry)
                self._job.tally.host_hits += 1
                continue
            self._loading[entry.key] = entry
            arrival.tell(self._sink)
            if arrival is mine:
                self._mine.add(entry.key)
                self._transfer.to_host(entry)

    def _compute(self) -> None:
        experts = [entry.key[1] for entry in self._ready]
        self._job.compute_host(self._host.tables[self._job.layer], experts)
        done, self._ready = self._ready, []
        self._host.release(*done)

    def _await(self) -> None:
        begin = time.perf_counter()
        arrival = self._sink.get()
        self._job.waited(begin)
        self._take(arrival)

    def _collect(self) -> None:
        try:
            while True:
                self._take(self._sink.get_nowait())
        except Empty:
            return

    def _take(self, arrival: ExpertLoad) -> None:
        if arrival.error is not None:
            raise arrival.error
        self._ready.append(self._loading.pop(arrival.key))
        if arrival.key in self._mine:
            self._job.host_read(arrival)
        else:
            self._job.tally.host_hits += 1

    def let_go(self) -> None:
        for entry in self._loading.values():
            arrival = entry.arrival
            if arrival is not None:
                arrival.settle()  # its bytes are being written: the place is not free yet
        self._host.release(*self._ready, *self._loading.values())


Kernel = Callable[..., None]
Interval = tuple[float, float]

_NOTHING, _NONE = Demand(0, "decode", (), ()), DemandClasses()


class LayerJob:
    """One layer's rows, where results go, and what happened when."""

    def __init__(self, step: ExpertStep, layout: ExpertLayout, out: Tensor, kernel: Kernel) -> None:
        self.step, self.layout, self.layer, self.out = step, layout, step.layer, out
        self.tally = UsageTally()
        # what is asked for, and how it is met
        self.demand, self.classes = _NOTHING, _NONE
        self._kernel = kernel
        self.device_threads: int | None = None
        self.host_threads: int | None = None
        # what host experts read and write: another memory when hidden lies on an accelerator
        self.host_x, self.host_out = step.hidden, out
        # host experts that were read from disk
        self.late: list[int] = []
        self.worked: dict[str, list[Interval]] = {"device": [], "host": []}
        self.waits: list[Interval] = []
        # seconds on the device are only known by waiting for it
        self.exact = False

    def host_share(self) -> float:
        """Of all rows' work, what host experts do."""
        host = set(self.classes.host)
        rows = zip(self.demand.experts, self.demand.counts, strict=True)
        return sum(n for e, n in rows if e in host) / max(1, sum(self.demand.counts))

    def compute_host(self, table: RecordTable, experts: list[int]) -> None:
        begin = time.perf_counter()
        x, ids = self.host_x, self.step.topk_ids
        threads = self.host_threads
        self._kernel(self.layout, x, ids, table, self.host_out, threads, only=experts)
        self.worked["host"].append((begin, time.perf_counter()))

    def compute_device(self, table: RecordTable, experts: list[int]) -> None:
        begin = time.perf_counter()
        x, ids = self.step.hidden, self.step.topk_ids
        threads = self.device_threads
        self._kernel(self.layout, x, ids, table, self.out, threads, only=experts)
        if self.exact and x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        self.worked["device"].append((begin, time.perf_counter()))

    def waited(self, begin: float) -> None:
        self.waits.append((begin, time.perf_counter()))

    def host_read(self, arrival: ExpertLoad) -> None:
        self.late.append(arrival.key[1])
        self.tally.host_misses += 1
        self.tally.read_bytes += arrival.read_bytes
        self.tally.io_s += arrival.done_s - arrival.begun_s

    def close(self) -> None:
        """Add up."""
        tally, classes = self.tally, self.classes
        tally.device_hits, tally.prefetch_hits = len(classes.hits), len(classes.early)
        tally.device_misses, tally.host_runs = len(classes.misses), len(classes.host)
        work = self.worked["device"] + self.worked["host"]
        self.tally.compute_s += sum(end - begin for begin, end in work)
        if self.waits:
            self.tally.stall_s += seconds_outside(self.waits, work)

    def spans(self, begin: float, end: float) -> list[LayerSpan]:
        named = [(what, at) for what, times in self.worked.items() for at in times]
        named += [("wait", at) for at in self.waits]
        spans = [LayerSpan(self.layer, what, *at) for what, at in named]
        return [LayerSpan(self.layer, "layer", begin, end), *spans]
