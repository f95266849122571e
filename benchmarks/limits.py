"""What this machine can do at best, measured in the same run as the claims it is set beside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def best_of(run: Callable[[], object], repeats: int = 7) -> float:
    """Seconds of a middling run: the median, after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def read_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes per second that all threads read from memory (a sum over a buffer past every cache)."""
    buffer = torch.ones(num_bytes // 4)
    return num_bytes / best_of(buffer.sum)


def matmul_rate(dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Floating-point operations per second of torch's own matrix product."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_of(lambda: a @ b)
