"""The limits of this machine, measured in the same run as the results."""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

PAGE = 4096


def best_of(
    run: Callable[[], object], repeats: int = 7, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median seconds of a run, after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        begin = clock()
        run()
        times.append(clock() - begin)
    return statistics.median(times)


def read_bandwidth(
    num_bytes: int = 1 << 30, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes per second that all threads read: a sum over more bytes than all caches."""
    buffer = torch.ones(num_bytes // 4)
    return num_bytes / best_of(buffer.sum, clock=clock)


def matmul_rate(dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Floating-point operations per second of torch's matrix product."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_of(lambda: a @ b)


def disk_bandwidth(
    files: Sequence[Path], chunk_bytes: int, depth: int = 8, total_bytes: int = 1 << 30
) -> float:
    """Bytes per second of direct reads of `chunk_bytes` at random offsets in `files`, `depth` at a
    time: the speed at which experts of that size can be read. Bypasses the page cache if the file
    system allows it, otherwise drops the cache before."""
    chunk_bytes = -(-chunk_bytes // PAGE) * PAGE
    draw = random.Random(0)
    usable = [file for file in files if file.stat().st_size >= chunk_bytes]
    opened = [_open_direct(file) for file in usable]
    jobs = []
    for _ in range(max(depth, total_bytes // chunk_bytes)):
        which = draw.randrange(len(usable))
        last = (usable[which].stat().st_size - chunk_bytes) // PAGE
        jobs.append((opened[which], draw.randint(0, last) * PAGE))
    buffers = [mmap.mmap(-1, chunk_bytes) for _ in range(depth)]

    def lane(number: int) -> int:
        return sum(os.preadv(fd, [buffers[number]], at) for fd, at in jobs[number::depth])

    try:
        with ThreadPoolExecutor(depth) as pool:
            begin = time.perf_counter()
            read = sum(pool.map(lane, range(depth)))
            return read / (time.perf_counter() - begin)
    finally:
        for fd in opened:
            os.close(fd)


def _open_direct(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return fd
