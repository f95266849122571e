"""How many bytes and cores an engine may use on this machine, and what kind of cores.

In a container, the cgroup's limit counts as the machine's limit.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from coterie.weights.room import available_bytes

__all__ = ["auto_kv_bytes", "available_bytes", "cores", "cpu_name"]

MAX_AUTO_KV_BYTES = 2 * 10**9
AUTO_KV_SHARE = 0.25
AUTO_KV_SHARE_GPU = 0.8


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The same for equal processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # ARM's have no name, but numbers
    wanted = ("model name", "CPU implementer", "CPU part")
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    known = [facts[key] for key in wanted if key in facts]
    return " ".join([platform.machine(), *(known or [platform.processor()])])


def auto_kv_bytes(device: str, *, beside_experts: bool = False, reserved: int = 0) -> int:
    """The KV budget if none is configured: a share of the free memory. `beside_experts`: not all
    weights are loaded yet; `reserved`: bytes of a GPU that others will take."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(
            max(0, free - reserved) * (AUTO_KV_SHARE if beside_experts else AUTO_KV_SHARE_GPU)
        )
    return min(MAX_AUTO_KV_BYTES, int(available_bytes() * AUTO_KV_SHARE))
