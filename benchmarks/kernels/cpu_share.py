"""The CPU's part of a device's step alone: seconds of a job by the number of its experts.

    python3 -m benchmarks.kernels.cpu_share [--kinds int4 bf16] [--threads N] [--json FILE]

One row, whole experts of Qwen3-30B-A3B's shape in the device's layout, every job other ones out of
more bytes than all caches hold; numbers of experts interleaved, medians. A line through the medians
tells what a job costs before its first byte and behind its last, and the rate at which it reads
weights. The same jobs again, with all their experts named in a hint 40 us before. The limit is a
sum over memory on the same number of threads, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.limits import read_bandwidth
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.share import ShareBell, ShareCoordinator, ShareRecords
from coterie.kernels.device_record import DeviceRecord
from coterie.moe.runtime.cpu_share import SPARE_CORES
from coterie.moe.runtime.tiers import MemoryArena

SHAPE = (2048, 768)
COUNTS = (1, 2, 4, 6, 8)
FOOTPRINT_BYTES = 3 << 30
# from one job to the next, as in a step
AHEAD_S = 40e-6
KINDS = ("int4", "int8", "bf16")


def records_of(kind: str, shape: tuple[int, int], footprint: int) -> ShareRecords:
    """Equal records in memory as a bank has it, in an order that is not that of addresses."""
    record = DeviceRecord(kind, *shape)
    count = max(2 * COUNTS[-1], footprint // record.nbytes)
    one = torch.randint(0, 256, (record.nbytes,), dtype=torch.uint8)
    if kind == "bf16":
        one = (torch.randn(record.nbytes // 2) * 0.02).bfloat16().view(torch.uint8)
    else:
        scales = torch.full(((record.nbytes - record.gate_up_scales_at) // 2,), 1e-3).half()
        one[record.gate_up_scales_at :] = scales.view(torch.uint8)
    arena = MemoryArena(count * record.nbytes)
    rows = arena.view(0, count * record.nbytes).view(count, -1).copy_(one)
    return ShareRecords([rows[at] for at in torch.randperm(count).tolist()], record)


class JobTimer:
    def __init__(self, records: ShareRecords, threads: int) -> None:
        library = native()
        if library is None:
            raise SystemExit("this benchmark needs a C++ compiler")
        hidden, most = records.record.hidden, COUNTS[-1]
        memory = torch.zeros(ShareBell.nbytes(1, most, hidden), dtype=torch.uint8)
        self._bell = ShareBell(memory, 1, most, hidden)
        self._bell.x.normal_()
        self._records = records
        self._coordinator = ShareCoordinator(library, self._bell, [records], threads)
        self._number = self._next = 0

    def job(self, experts: int, is_hinted: bool) -> float:
        """Seconds of a job with so many experts, which a hint may have named before."""
        bell, weight = self._bell, int(torch.ones(1).view(torch.int32))
        inner, total = self._records.record.intermediate, len(self._records.records)
        rows = [[(self._next + at) % total, 0, inner, weight] for at in range(experts)]
        self._next += experts
        bell.pairs[:experts] = torch.tensor(rows, dtype=torch.int32)
        bell.job.copy_(torch.tensor([0, 1, experts]))
        self._number += 1
        begin = time.perf_counter()
        if is_hinted:
            told = [0, self._number, experts, *(row[0] for row in rows)]
            bell.hint[: len(told)] = torch.tensor(told, dtype=torch.int32)
        while time.perf_counter() < begin + AHEAD_S:
            pass
        before = self._coordinator.counts()
        bell.rung.fill_(self._number)
        deadline, answered = time.perf_counter() + 10, bell.answered.numpy()
        # who sees the answer sees the counts
        while answered[0] != self._number:
            if time.perf_counter() > deadline:
                raise SystemExit("a job was not answered")
        return (self._coordinator.counts().busy_ns - before.busy_ns) / 1e9

    def close(self) -> None:
        self._coordinator.close()


def measure(
    records: ShareRecords, threads: int, rounds: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Median seconds by the number of experts, without hints and with them."""
    timer = JobTimer(records, threads)
    try:
        found: dict[tuple[bool, int], list[float]]
        found = {(hinted, count): [] for count in COUNTS for hinted in (False, True)}
        for turn in range(rounds + 3):  # threads wake up, and see their memory
            for (hinted, count), taken in found.items():
                seconds = timer.job(count, hinted)
                if turn >= 3:
                    taken.append(seconds)
        plain, hinted_ones = (
            {count: statistics.median(found[hinted, count]) for count in COUNTS}
            for hinted in (False, True)
        )
        return plain, hinted_ones
    finally:
        timer.close()


def fitted(record_bytes: int, seconds: dict[int, float]) -> tuple[float, float]:
    """Seconds of a job without bytes, and bytes per second, of the line through the medians."""
    counts = np.array(list(seconds))
    slope, fixed = np.polyfit(counts * record_bytes, list(seconds.values()), 1)
    return float(fixed), float(1 / slope)


def limit_of(threads: int, footprint: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return read_bandwidth(max(footprint, 1 << 20))
    finally:
        torch.set_num_threads(before)


def report(
    kinds: Sequence[str], threads: int, rounds: int, shape: tuple[int, int], footprint: int
) -> dict[str, Any]:
    limit = limit_of(threads, footprint)
    told: dict[str, Any] = {"threads": threads, "limit_bytes_s": limit, "kinds": {}}
    print(f"{threads} threads; a sum over memory reads {limit / 1e9:.1f} GB/s")
    for kind in kinds:
        records = records_of(kind, shape, footprint)
        size = records.record.nbytes
        seconds, hinted = measure(records, threads, rounds)
        fixed, rate = fitted(size, seconds)
        told["kinds"][kind] = {
            "record_bytes": size, "fixed_s": fixed, "bytes_s": rate,
            "seconds": {str(count): taken for count, taken in seconds.items()},
            "hinted_seconds": {str(count): taken for count, taken in hinted.items()},
        }  # fmt: skip
        by_count = ", ".join(
            f"{count}: {taken * 1e6:.0f} us ({count * size / taken / 1e9:.1f} GB/s, "
            f"hinted {hinted[count] * 1e6:.0f})"
            for count, taken in seconds.items()
        )
        print(f"{kind}: {by_count}")
        share = rate / limit
        print(f"  {fixed * 1e6:.1f} us and {rate / 1e9:.1f} GB/s, {share:.0%} of the limit")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=max(1, cores - SPARE_CORES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--smoke", action="store_true", help="small experts, few jobs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    shape, footprint = ((256, 128), 1 << 22) if given.smoke else (SHAPE, FOOTPRINT_BYTES)
    rounds = 3 if given.smoke else given.rounds
    told = report(given.kinds, given.threads, rounds, shape, footprint)
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
