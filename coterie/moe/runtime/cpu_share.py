"""The CPU computes a part of the experts that a step would read over the link.

Both begin with the same experts at the same time: the device reads channels of them from the bank,
and the CPU computes the others where they lie. How many channels each gets follows from the rates
of both, which are measured at start and then from the steps themselves.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import Unavailable
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.share import ShareBell, ShareCoordinator, ShareRecords, next_number
from coterie.moe.runtime.tiers import MemoryArena
from coterie.weights.kinds import GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coterie.kernels.cpu.build import NativeLibrary
    from coterie.kernels.device_record import DeviceRecord
    from coterie.kernels.triton.cpu_share import ShareState
    from coterie.moe.runtime.host_bank import HostBank
    from coterie.moe.store.base import ExpertGeometry

# pairs of a step that may be shared; rows follow from the experts of each
MAX_PAIRS = 256
# cores that the CPU's share leaves to everything else
SPARE_CORES = 2
# a step waits so long for an answer, by the device's clock
LIMIT_NS = 400_000_000
# what a job costs beside the time in which the CPU is busy with it, and the device without misses
_JOB_S, _LAYER_S = 6e-6, 12e-6
# less than this is not worth a job
_LEAST_GAIN_S = 10e-6
# jobs from which rates are taken, the weight of a new rate, and the change from which on the device
# gets a new table
_JOBS, _NEW, _CHANGE = 96, 0.5, 0.03
# a device that waits longer than this part of its own time
_LONG_WAIT = 0.1
# steps without jobs behind which the CPU is measured again, the first time and at most
_QUIET_STEPS, _MAX_QUIET_STEPS = 1000, 64_000
# rates of steps, relative to those at start
_SLOWEST, _FASTEST = 16, 1.5
# jobs of the measurement at start, those of them that do not count, and experts in each
_MEASURED_JOBS, _FIRST_JOBS, _MEASURED_EXPERTS = 24, 4, 4
# a measurement while requests wait for their next step begins no job after so long
_BESIDE_REQUESTS_S = 0.05


@dataclass(frozen=True, slots=True)
class ShareRates:
    """Bytes per second of expert weights."""

    link: float
    cpu: float

    def table(self, experts: int, record: DeviceRecord) -> NDArray[np.int32]:
        """Channels for the CPU by the number of missing ones of so many experts, in groups: both
        end together, and earlier than the better one would alone."""
        channels = np.arange(experts * record.intermediate // GROUP + 1) * GROUP
        each = record.nbytes / record.intermediate
        by_link, by_cpu = each / self.link, each / self.cpu

        def seconds(own: NDArray[np.int64]) -> NDArray[np.float64]:
            link = (channels - own) * by_link + _LAYER_S
            return np.where(own > 0, np.maximum(link, own * by_cpu + _JOB_S), link)

        both = (channels * by_link + _LAYER_S - _JOB_S) / (by_link + by_cpu)
        below = np.clip(both, 0, None).astype(np.int64) // GROUP * GROUP
        tried = np.stack([np.minimum(own, channels) for own in (below, below + GROUP, channels)])
        best = tried[np.argmin([seconds(own) for own in tried], axis=0), np.arange(len(channels))]
        gain = seconds(np.zeros_like(channels)) - seconds(best)
        found: NDArray[np.int32] = np.where(gain >= _LEAST_GAIN_S, best, 0).astype(np.int32)
        return found


class CpuShare:
    """Only the engine's thread may call it."""

    def __init__(
        self, bank: HostBank, geometry: ExpertGeometry, record: DeviceRecord, library: NativeLibrary
    ) -> None:
        from coterie.kernels.triton.cpu_share import ShareState

        device, top_k = bank.device, geometry.top_k
        self.record, self.max_rows = record, MAX_PAIRS // top_k
        self.threads = max(1, len(os.sched_getaffinity(0)) - SPARE_CORES)
        sizes = self.max_rows, self.max_rows * top_k, record.hidden
        self._arena = MemoryArena(ShareBell.nbytes(*sizes), pinned=device.type == "cuda")
        self._bell = ShareBell(self._arena.view(0, ShareBell.nbytes(*sizes)), *sizes)
        channels = geometry.num_experts * record.intermediate
        self.state: ShareState = ShareState.new(self._bell, channels, device)
        layers = []
        for layer in geometry.layers:
            present = set(geometry.present(layer))
            every = range(geometry.num_experts)
            records = [bank.record(layer, e) if e in present else None for e in every]
            layers.append(ShareRecords(records, record))
        self._layers, self._geometry = layers, geometry
        self._coordinator = ShareCoordinator(library, self._bell, layers, self.threads)
        # at start, when nothing else runs; and now
        self.measured = self.rates = ShareRates(float("inf"), 0.0)
        # rates of which the device has the table
        self._sent: ShareRates | None = None
        # whether that table gives the CPU anything; the steps since the last rates, and how many of
        # them are waited for
        self._gives, self._quiet, self._patience = False, 0, _QUIET_STEPS
        self._taken: dict[tuple[int, ...], Tensor] = {}
        self._sums, self._waited_ns = [0] * len(self._bell.sums), 0
        self._counts = self._coordinator.counts()
        # of the bytes of missing experts, the CPU's part in the last steps
        self.part = 0.0
        # steps that failed, and whether the CPU gets nothing since
        self.failures, self._is_off, self._failed = 0, False, 0

    def start(self, link_rate: float) -> bool:
        """Measure the CPU. Returns whether its share could be worth anything, now or when the
        machine is less busy."""
        cpu_rate = self._measure()
        self.rates = self.measured = ShareRates(link_rate, cpu_rate)
        self._send()
        best = ShareRates(link_rate, max(cpu_rate, link_rate))
        return cpu_rate > 0 and bool(best.table(self._geometry.num_experts, self.record).any())

    @torch.inference_mode()
    def _measure(self, limit_s: float = float("inf")) -> float:
        """Bytes per second of the middle one of some jobs with whole experts, whatever interrupted
        others; 0 if one is not answered. No job begins after `limit_s`, but the first. No step may
        ring meanwhile."""
        bell, pairs = self._bell, self._bell.pairs
        number = int(bell.rung.numpy()[0])
        if not self._answered(number, 0.0):
            return 0.0
        bell.x.normal_()
        one = torch.ones(1).view(torch.int32)
        counts, begun, answered = [self._coordinator.counts()], time.perf_counter(), True
        for job in range(1, _MEASURED_JOBS + 1):
            row = job * 7 % len(self._layers)
            layer = self._geometry.layers[row]
            present = self._geometry.present(layer)
            for at in range(_MEASURED_EXPERTS):
                expert = present[(job * 5 + at * 11) % len(present)]
                pairs[at] = torch.tensor([expert, 0, self.record.intermediate, int(one)])
            bell.job.copy_(torch.tensor([row, 1, _MEASURED_EXPERTS]))
            number = next_number(number)
            bell.rung.fill_(number)
            answered = self._answered(number, LIMIT_NS / 1e9)
            counts.append(self._coordinator.counts())
            if not answered or time.perf_counter() - begun > limit_s:
                break
        # what the device rings next follows on these
        self.state.state[0] = number
        self._counts = counts[-1]
        if not answered:
            return 0.0
        # behind the first ones the threads are awake and have seen their memory
        late = counts[_FIRST_JOBS:] if len(counts) > _FIRST_JOBS + 1 else counts[-2:]
        return statistics.median(
            (now.nbytes - before.nbytes) / max(1.0, now.busy_ns - before.busy_ns) * 1e9
            for before, now in pairwise(late)
        )

    def _answered(self, number: int, seconds: float) -> bool:
        answered, end = self._bell.answered.numpy(), time.perf_counter() + seconds
        while answered[0] != number:
            if time.perf_counter() > end:
                return False
        return True

    @property
    def pinned(self) -> bool:
        """Whether the device sees the memory of its bell."""
        return self._arena.pinned

    @property
    def hint(self) -> Tensor:
        """Where the CPU looks for experts of which a job may come."""
        return self._bell.hint

    def room(self, shape: tuple[int, ...]) -> Tensor:
        """int32 zeros of this shape, always the same: what the CPU takes of each pair."""
        if shape not in self._taken:
            device = self.state.table.device
            self._taken[shape] = torch.zeros(shape, dtype=torch.int32, device=device)
        return self._taken[shape]

    def wake(self) -> None:
        """A step was launched."""
        self._coordinator.wake()

    def pause(self, paused: bool) -> None:
        """Stop answering: for tests."""
        self._coordinator.pause(paused)

    def check(self) -> None:
        """A step has ended: raises if it waited for the CPU in vain. Behind a failure the CPU gets
        nothing until it has answered."""
        failed = int(self._bell.failed.numpy()[0])
        if failed != self._failed:
            self._failed, self._is_off = failed, True
            self.failures += 1
            raise Unavailable(
                f"the CPU's part of this step's experts did not come within {LIMIT_NS / 1e9:g} s; "
                "the next steps run without it",
                retry_after_s=0.0,
            )
        answered, rung = self._bell.answered.numpy(), self._bell.rung.numpy()
        if self._is_off and answered[0] == rung[0]:
            with torch.inference_mode():
                self.state.state[2:3].zero_()
            self._is_off = False

    def follow(self) -> None:
        """Between steps: take the rates from the last ones, and send a table if they changed."""
        sums = self._bell.sums.tolist()
        jobs, device_ns, wait_ns, channels = (
            new - old for new, old in zip(sums, self._sums, strict=True)
        )
        if jobs < _JOBS:
            self._try_again()
            return
        self._quiet = 0
        counts = self._coordinator.counts()
        nbytes, busy_ns = counts.nbytes - self._counts.nbytes, counts.busy_ns - self._counts.busy_ns
        self._sums, self._counts = sums, counts
        link_ns = device_ns - jobs * _LAYER_S * 1e9
        link_bytes = channels * self.record.nbytes / self.record.intermediate
        self.part = nbytes / max(1.0, nbytes + link_bytes)
        if wait_ns > _LONG_WAIT * device_ns:
            # the CPU was late for whatever reason: its threads may not have run at all
            busy_ns = max(busy_ns, device_ns + wait_ns - int(jobs * _JOB_S * 1e9))
        link, cpu, start = self.rates.link, self.rates.cpu, self.measured
        if link_ns < jobs * _LAYER_S * 1e9:
            # the link had next to nothing to do, so its rate is not known
            link = _mixed(link, start.link)
        else:
            link = _mixed(link, _within(link_bytes / link_ns * 1e9, start.link))
        if busy_ns > 0 and nbytes > 0:
            cpu = _mixed(cpu, _within(nbytes / busy_ns * 1e9, start.cpu))
            if cpu > start.cpu:
                # the machine was busy when it was measured
                self.measured = ShareRates(start.link, cpu)
        self.rates, sent = ShareRates(link, cpu), self._sent
        if sent is None or _differ(sent.link, self.rates.link) or _differ(sent.cpu, self.rates.cpu):
            self._send()

    def _try_again(self) -> None:
        """Where the CPU was too slow to get anything, it is measured now and then, less and less
        often: without jobs nobody would notice that it is faster again."""
        self._quiet += 1
        if self._quiet < self._patience or self._gives:
            return
        cpu_rate, link_rate = self._measure(_BESIDE_REQUESTS_S), self.measured.link
        self._quiet, self._patience = 0, min(2 * self._patience, _MAX_QUIET_STEPS)
        if cpu_rate > 0:
            self.rates = self.measured = ShareRates(link_rate, cpu_rate)
            self._send()
        if self._gives:
            self._patience = _QUIET_STEPS

    @torch.inference_mode()
    def _send(self) -> None:
        """Behind all steps that were launched."""
        table = torch.zeros(len(self.state.table), dtype=torch.int32)
        if self.rates.cpu > 0:
            table = torch.from_numpy(self.rates.table(self._geometry.num_experts, self.record))
        self._gives = bool(table.any())
        if self.state.table.is_cuda:
            table = table.pin_memory()
        self.state.table.copy_(table, non_blocking=True)
        self._sent = self.rates

    def take_wait_s(self) -> float:
        """Seconds that the device waited for the CPU in steps since the last call."""
        before, self._waited_ns = self._waited_ns, self._bell.sums.tolist()[2]
        return max(0.0, (self._waited_ns - before) / 1e9)

    def report(self) -> Mapping[str, Any]:
        counts = self._coordinator.counts()
        return {
            "threads": self.threads,
            "link_rate": self.rates.link,
            "cpu_rate": self.rates.cpu,
            "measured_cpu_rate": self.measured.cpu,
            "part": self.part,
            "jobs": counts.jobs,
            "bytes": counts.nbytes,
            "busy_s": counts.busy_ns / 1e9,
            "hinted": counts.hinted,
            "repeated": counts.repeated,
            "wait_s": self._bell.sums.tolist()[2] / 1e9,
            "failures": self.failures,
        }

    def close(self) -> None:
        """No step runs any more."""
        self._coordinator.close()
        self._arena.close()


def open_share(
    bank: HostBank, geometry: ExpertGeometry, records: Mapping[int, DeviceRecord]
) -> CpuShare | None:
    """None without a compiler or pinned memory, and where layers have different experts."""
    library, (first, *others) = native(), records.values()
    same = all(each == first for each in others)
    if library is None or not same or bank.device.type != "cuda" or geometry.top_k > MAX_PAIRS:
        return None
    share = CpuShare(bank, geometry, first, library)
    if not share.pinned:
        share.close()
        return None
    return share


def _mixed(old: float, new: float) -> float:
    return (1 - _NEW) * old + _NEW * new


def _within(rate: float, measured: float) -> float:
    """A step that was interrupted, or compiled a kernel, tells nothing about rates."""
    return min(max(rate, measured / _SLOWEST), measured * _FASTEST)


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > _CHANGE * one
