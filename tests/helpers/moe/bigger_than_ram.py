"""A model whose experts are 8x the RAM budget, run from disk in a process of its own.

    python -m tests.helpers.moe.bigger_than_ram [STRATEGY]

Prints as JSON what the process and the kernel say: memory that is not file pages, pages of the
model's file that came into the page cache, bytes read from the disk, and what the runtime counted.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

from tests.helpers.moe.dispatched_model import PROMPTS, DispatchedModel, Setting
from tests.helpers.moe.tiny_moe import checkpoint_of

# experts of 768 KiB in fp32: 96 MiB in all, of which 12 MiB may be in RAM
INNER, EXPERTS, SHARE = 1024, 64, 8


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cached_bytes(path: Path) -> int:
    """Of the file's pages, what the page cache holds."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    seen = ctypes.create_string_buffer(pages)
    with path.open("rb") as file:
        at = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        library.mincore(at, size, seen)
        library.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
    return sum(byte & 1 for byte in seen.raw) * mmap.PAGESIZE


def read_ahead_bytes(path: Path) -> int:
    """What the kernel reads around a page of this file that is touched; 0 if it does not say."""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    setting = Path("/sys/class/bdi") / name / "read_ahead_kb"
    return 1024 * int(setting.read_text()) if setting.exists() else 0


def measure(strategy: str) -> dict[str, Any]:
    path = checkpoint_of(
        "qwen3_moe", num_experts=EXPERTS, moe_intermediate_size=INNER, num_hidden_layers=2
    )
    file = path / "model.safetensors"
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # the kernel need not take the advice for every page
    cached = cached_bytes(file)
    slots = 2 * EXPERTS // SHARE
    on_host = strategy == "cpu_only"
    warm = Setting(checkpoint_of("qwen3_moe"), strategy, 3, "13%")
    with DispatchedModel(warm) as small:  # kernels, threads and torch's own pools
        small.generate(PROMPTS, 16)
    before = status_bytes("RssAnon")
    setting = Setting(path, strategy, slots, "12.5%" if on_host else "0")
    with DispatchedModel(setting) as dispatched:
        # strategies may have loaded at start
        read, counted = disk_bytes(), dispatched.runtime.report()["total"]["read_bytes"]
        peak = 0
        for prompt in PROMPTS:
            dispatched.generate([prompt], 7)
            peak = max(peak, status_bytes("RssAnon"))
        dispatched.runtime.check()
        report = dispatched.runtime.report()
        tiers = report["tiers"]
        return {
            "strategy": strategy,
            "direct": dispatched.disk.is_direct(file),
            "expert_bytes": report["expert_bytes"],
            "budget_bytes": tiers["device"]["budget_bytes"] + tiers["host"]["budget_bytes"],
            "grown_bytes": peak - before,
            "cached_bytes": cached_bytes(file) - cached,
            "read_ahead_bytes": read_ahead_bytes(file),
            "file_bytes": file.stat().st_size,
            "read_bytes": report["total"]["read_bytes"] - counted,
            "kernel_read_bytes": disk_bytes() - read,
            "misses": report["total"]["host_misses"],
        }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1] if len(sys.argv) > 1 else "lru")))
