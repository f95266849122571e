"""The device and the threads that a setting names, checked before anything is loaded."""

from __future__ import annotations

import re

import torch

from coterie.core.config import MAX_THREADS
from coterie.core.errors import ConfigError


def device_of(setting: str) -> str:
    """`auto` is a GPU where there is one."""
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", setting)
    if found is None:
        raise ConfigError(f"engine.device is {setting!r}; it is auto, cpu, cuda or cuda:N")
    if setting == "cpu":
        return setting
    if not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {setting!r} and there is no CUDA device here")
    if (count := torch.cuda.device_count()) <= int(found[1] or 0):
        raise ConfigError(f"engine.device is {setting!r} and the last one here is cuda:{count - 1}")
    return setting


def use_threads(count: int) -> None:
    """For all that this process computes."""
    if not 0 < count <= MAX_THREADS:
        raise ConfigError(f"engine.threads is {count}; it must be 1 to {MAX_THREADS}")
    torch.set_num_threads(count)
