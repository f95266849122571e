"""Computes one layer's waves: on the device, on the host, or on both at once.

Rows that the host computed are copied to the device. This module chooses nothing.
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
from coterie.moe.runtime.usage import LayerSpan, LayerTally, seconds_outside

if TYPE_CHECKING:
    from coterie.kernels.cpu.expert_mlp import RecordTable
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.moe.dispatch.base import Wave
    from coterie.moe.runtime.step import ExpertStep
    from coterie.moe.runtime.tiers import DeviceTier, HostEntry, HostTier
    from coterie.moe.runtime.transfer import TierTransfer
    from coterie.moe.store.base import Key


class LayerExecutor:
    def __init__(self, host: HostTier, device: DeviceTier, transfer: TierTransfer) -> None:
        self._host, self._device, self._transfer = host, device, transfer
        self._host_side = HostSide(host, transfer)
        self._helper = ThreadPoolExecutor(1, "experts-host")
        self.kernel: Kernel = run_experts

    def run(self, job: LayerJob, waves: Sequence[Wave]) -> None:
        """The caller has started the loads of the first wave."""
        if len(waves) == 1 and self._run_resident(job, waves[0]):
            return
        host = tuple(expert for wave in waves for expert in wave.host)
        if not any(wave.device or wave.load for wave in waves):
            self._copy_rows_to_host(job)
            self._host_side.run(job, host)
            self._copy_rows_back(job, host)
        elif not host:
            self._run_device(job, waves)
        else:
            self._run_both(job, waves, host)

    def _run_resident(self, job: LayerJob, wave: Wave) -> bool:
        """The common case: all bytes are in one memory already, so one call computes everything.
        False when they are not, and nothing was computed."""
        # on CUDA a slot whose copy was not yet swept is not ordered before what runs now
        unordered = job.out.is_cuda and bool(self._device.pending)
        if wave.load or unordered or not self._device.holds(job.layer, wave.device):
            return False
        if not wave.host:
            self._run_kernel(job, self._device.tables[job.layer], "device")
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
            self._run_kernel(job, records, "host")
        finally:
            self._host.release(*entries)
        return True

    def _run_kernel(self, job: LayerJob, records: Records, side: str) -> None:
        step, begin = job.step, time.perf_counter()
        self.kernel(job.layout, step.hidden, step.topk_ids, records, job.out)
        if job.exact and job.out.is_cuda:
            torch.cuda.current_stream(job.out.device).synchronize()
        job.worked[side].append((begin, time.perf_counter()))

    def _run_both(self, job: LayerJob, waves: Sequence[Wave], host: tuple[int, ...]) -> None:
        self._split_threads(job)
        self._copy_rows_to_host(job)
        future = self._helper.submit(self._host_in_helper, job, host)
        try:
            self._run_device(job, waves)
        except BaseException:
            wait([future])
            raise
        future.result()
        self._copy_rows_back(job, host)

    def _host_in_helper(self, job: LayerJob, host: tuple[int, ...]) -> None:
        with torch.inference_mode():
            self._host_side.run(job, host)

    def _split_threads(self, job: LayerJob) -> None:
        """In proportion to rows, where both sides run on the same cores."""
        threads = torch.get_num_threads()
        if not job.out.is_cuda and threads > 1:
            job.host_threads = min(threads - 1, max(1, round(threads * job.host_share())))
            job.device_threads = threads - job.host_threads

    def _copy_rows_to_host(self, job: LayerJob) -> None:
        if job.out.is_cuda:
            job.host_x = job.step.hidden.to("cpu", torch.float32)
            job.host_out = torch.empty(job.out.shape, dtype=torch.float32)

    def _copy_rows_back(self, job: LayerJob, host: tuple[int, ...]) -> None:
        """Copy the rows that the host computed to where the others are."""
        if job.host_out is job.out:
            return
        flat = job.step.topk_ids.reshape(-1)
        picked = torch.isin(flat, torch.tensor(host, dtype=flat.dtype)).nonzero()[:, 0]
        job.out[picked.to(job.out.device)] = job.host_out[picked].to(job.out.device)

    def _run_device(self, job: LayerJob, waves: Sequence[Wave]) -> None:
        side = DeviceSide(self._device, self._transfer, job, waves[0])
        for index, wave in enumerate(waves):
            side.run(wave, waves[index + 1] if index + 1 < len(waves) else None)

    def close(self) -> None:
        self._helper.shutdown()


class DeviceSide:
    """One layer's waves on the device."""

    def __init__(
        self, device: DeviceTier, transfer: TierTransfer, job: LayerJob, first: Wave
    ) -> None:
        self._device, self._transfer, self._job = device, transfer, job
        # loads of the next wave that were started before it runs
        self._started: set[tuple[Key, int]] = set(first.load)
        self._done: SimpleQueue[ExpertLoad] = SimpleQueue()
        self._waiting: set[Key] = set()
        self._ready: list[int] = []
        # slots whose experts this wave has still to compute
        self._busy: set[int] = set()

    def run(self, wave: Wave, following: Wave | None) -> None:
        for key, slot in wave.load:
            if (key, slot) not in self._started:
                self._transfer.start(key, slot, self._job.tally)
        self._started = set()
        self._busy = set()
        self._sort(wave.device)
        while self._ready or self._waiting:
            self._start_early(following)
            if self._ready:
                self._compute()
            else:
                begin = time.perf_counter()
                load = self._done.get()
                self._job.tally.waited(begin, disk=not load.host_hit)
                self._take(load)
            self._collect()

    def _sort(self, experts: Sequence[int]) -> None:
        """Separate the experts whose bytes are here from those that are still loading."""
        for expert in experts:
            key = (self._job.layer, expert)
            slot = self._device.slot_of(key)
            if slot is None:
                raise InternalError(f"expert {key} was to run from a slot and lies in none")
            self._busy.add(slot)
            load = self._device.pending.get(slot)
            if load is None:
                self._ready.append(expert)
                continue
            self._waiting.add(key)
            self._transfer.hurry(load)
            load.notify(self._done)

    def _start_early(self, following: Wave | None) -> None:
        """Start the next wave's loads whose slots are free by now."""
        for key, slot in following.load if following else ():
            if slot in self._busy or (key, slot) in self._started:
                continue
            pending = self._device.pending.get(slot)
            if pending is None or pending.done:
                self._transfer.start(key, slot, self._job.tally)
                self._started.add((key, slot))

    def _compute(self) -> None:
        layer = self._job.layer
        self._job.compute_device(self._device.tables[layer], self._ready)
        for expert in self._ready:
            slot = self._device.slot_of((layer, expert))
            self._busy.discard(-1 if slot is None else slot)
        self._ready = []

    def _take(self, load: ExpertLoad) -> None:
        self._transfer.retire(load, self._job.tally)
        if load.error is not None:
            raise load.error
        self._waiting.discard(load.key)
        self._ready.append(load.key[1])

    def _collect(self) -> None:
        try:
            while True:
                self._take(self._done.get_nowait())
        except Empty:
            return


class HostSide:
    def __init__(self, host: HostTier, transfer: TierTransfer) -> None:
        self._host, self._transfer = host, transfer

    def run(self, job: LayerJob, experts: tuple[int, ...]) -> None:
        layer = _HostLayerRun(self._host, self._transfer, job)
        try:
            layer.run(experts)
        finally:
            layer.release()


class _HostLayerRun:
    """The host entries of one layer: ready to compute, or still being read."""

    def __init__(self, host: HostTier, transfer: TierTransfer, job: LayerJob) -> None:
        self._host, self._transfer, self._job = host, transfer, job
        self._ready: list[HostEntry] = []
        self._loading: dict[Key, HostEntry] = {}
        # reads that this layer started
        self._own_reads: set[Key] = set()
        self._done: SimpleQueue[ExpertLoad] = SimpleQueue()

    def run(self, experts: tuple[int, ...]) -> None:
        # pin those that are here before a read can evict them
        missing = [key for key in self._keys(experts) if not self._find(key)]
        missing.reverse()
        while self._ready or self._loading or missing:
            self._start_reads(missing)
            if self._ready:
                self._compute()
            elif self._loading:
                self._await()
            self._collect()

    def _keys(self, experts: tuple[int, ...]) -> list[Key]:
        return [(self._job.layer, expert) for expert in experts]

    def _find(self, key: Key) -> bool:
        entry = self._host.find(key)
        if entry is None:
            return False
        self._ready.append(entry)
        self._job.tally.host_hits += 1
        return True

    def _start_reads(self, missing: list[Key]) -> None:
        """Start as many reads as there is room for. Wait for room only when there is nothing else
        to do."""
        while missing:
            own_read = ExpertLoad(missing[-1])
            block = not (self._ready or self._loading)
            entry = self._host.acquire(missing[-1], own_read, block=block)
            if entry is None:
                return
            missing.pop()
            load = entry.load
            if load is None:
                self._ready.append(entry)
                self._job.tally.host_hits += 1
                continue
            self._loading[entry.key] = entry
            load.notify(self._done)
            if load is own_read:
                self._own_reads.add(entry.key)
                self._transfer.to_host(entry)

    def _compute(self) -> None:
        experts = [entry.key[1] for entry in self._ready]
        self._job.compute_host(self._host.tables[self._job.layer], experts)
        done, self._ready = self._ready, []
        self._host.release(*done)

    def _await(self) -> None:
        begin = time.perf_counter()
        load = self._done.get()
        self._job.tally.waited(begin, disk=True)
        self._take(load)

    def _collect(self) -> None:
        try:
            while True:
                self._take(self._done.get_nowait())
        except Empty:
            return

    def _take(self, load: ExpertLoad) -> None:
        if load.error is not None:
            raise load.error
        self._ready.append(self._loading.pop(load.key))
        if load.key in self._own_reads:
            self._job.count_read(load)
        else:
            self._job.tally.host_hits += 1

    def release(self) -> None:
        for entry in self._loading.values():
            load = entry.load
            if load is not None:
                load.settle()  # its bytes are being written: the place is not free yet
        self._host.release(*self._ready, *self._loading.values())


Kernel = Callable[..., None]
Interval = tuple[float, float]

_NOTHING, _NONE = Demand(0, "decode", (), ()), DemandClasses()


class LayerJob:
    """One layer's rows, where their results go, and when each part of the work was done."""

    def __init__(self, step: ExpertStep, layout: ExpertLayout, out: Tensor, kernel: Kernel) -> None:
        self.step, self.layout, self.layer, self.out = step, layout, step.layer, out
        self.tally = LayerTally()
        # the demanded experts, and how each demand is met
        self.demand, self.classes = _NOTHING, _NONE
        self._kernel = kernel
        self.device_threads: int | None = None
        self.host_threads: int | None = None
        # input and output of host experts: not the device's memory when that is an accelerator
        self.host_x, self.host_out = step.hidden, out
        # host experts that were read from disk
        self.read_now: list[int] = []
        self.worked: dict[str, list[Interval]] = {"device": [], "host": []}
        # wait for the device after each kernel, to know its seconds
        self.exact = False

    def host_share(self) -> float:
        """The share of all rows that host experts compute."""
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

    def count_read(self, load: ExpertLoad) -> None:
        self.read_now.append(load.key[1])
        self.tally.host_misses += 1
        self.tally.read_bytes += load.read_bytes
        self.tally.io_s += load.done_s - load.started_s

    def close(self) -> None:
        """Add up counts and seconds."""
        tally, classes = self.tally, self.classes
        tally.device_hits, tally.prefetch_hits = len(classes.hits), len(classes.early)
        tally.device_misses, tally.host_runs = len(classes.misses), len(classes.host)
        work = self.worked["device"] + self.worked["host"]
        self.tally.compute_s += sum(end - begin for begin, end in work)
        if tally.waits:
            tally.stall_s += seconds_outside(tally.waits, work)
            tally.disk_s += seconds_outside(tally.disk_waits, work)
        if self.host_out is not self.out:
            # the accelerator waits for what the CPU computes
            for_cpu = seconds_outside(self.worked["host"], self.worked["device"])
            tally.stall_s, tally.cpu_s = tally.stall_s + for_cpu, tally.cpu_s + for_cpu

    def spans(self, begin: float, end: float) -> list[LayerSpan]:
        named = [(what, at) for what, times in self.worked.items() for at in times]
        named += [("wait", at) for at in self.tally.waits]
        spans = [LayerSpan(self.layer, what, *at) for what, at in named]
        return [LayerSpan(self.layer, "layer", begin, end), *spans]
