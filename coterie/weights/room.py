"""How many bytes of memory are free for a model on this machine: RAM, or that of a GPU.

Needs neither torch nor another program, so that it can be asked before a model is fetched. In a
container, the cgroup's limit counts as the machine's limit.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

# the rest is for keys and values, activations and this process
WEIGHTS_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class ModelRoom:
    """The memory that weights would lie in."""

    free_bytes: int
    is_gpu: bool

    @property
    def weight_bytes(self) -> int:
        """The largest model that leaves room for keys and values."""
        return int(self.free_bytes * WEIGHTS_SHARE)

    def __str__(self) -> str:
        return f"{self.free_bytes / 1e9:.1f} GB of {'GPU memory' if self.is_gpu else 'RAM'} free"


def model_room(device: str = "auto") -> ModelRoom:
    """The GPU's memory where there is one and `device` does not exclude it, otherwise RAM."""
    gpu = 0 if device == "cpu" else gpu_free_bytes()
    return ModelRoom(gpu or available_bytes(), is_gpu=gpu > 0)


def available_bytes() -> int:
    """Memory that can be used without swapping."""
    free = _meminfo_available() or _physical() // 2
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpu_free_bytes() -> int:
    """Free memory of the first visible NVIDIA GPU; 0 without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible.startswith(("GPU-", "MIG-")):
        # named by its UUID: cards of one machine are mostly alike
        visible = "0"
    if not visible.isdigit():
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return 0
        try:
            return _free_bytes(nvml, int(visible))
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        # no driver, or one of another kind
        return 0


def _free_bytes(nvml: ctypes.CDLL, index: int) -> int:
    device, memory = ctypes.c_void_p(), _NvmlMemory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return 0
    failed = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return 0 if failed else int(memory.free)
