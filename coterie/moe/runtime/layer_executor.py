"""Carries out one layer's waves on both sides at once, or on the one that has work.

Rows of host experts come back to where the others are. Chooses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from coterie.kernels.expert_mlp import Records, run_experts
from coterie.moe.runtime.device_side import DeviceSide
from coterie.moe.runtime.host_side import HostSide

if TYPE_CHECKING:
    from coterie.moe.dispatch.base import Wave
    from coterie.moe.runtime.layer_job import Kernel, LayerJob
    from coterie.moe.runtime.pending_loads import Loads
    from coterie.moe.runtime.tiers import HostTier
    from coterie.moe.runtime.transfer import Transfer


class Executor:
    def __init__(self, host: HostTier, loads: Loads, transfer: Transfer) -> None:
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
