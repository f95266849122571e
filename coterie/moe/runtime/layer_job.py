"""One layer's rows on their way through the experts: what is computed, where to, and what it cost.

Both sides of a layer write to it, each to rows and lists of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.moe.dispatch.base import Demand
from coterie.moe.runtime.step import DemandClasses
from coterie.moe.runtime.usage import LayerSpan, UsageTally, seconds_outside

if TYPE_CHECKING:
    from coterie.kernels.cpu.expert_mlp import RecordTable
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.moe.runtime.load_workers import ExpertLoad
    from coterie.moe.runtime.step import ExpertStep

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
