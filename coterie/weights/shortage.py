"""Memory that could not be had, whoever says so: the system, Python, torch or CUDA.

Each of them raises an error of its own; callers want one question and one typed answer.
"""

from __future__ import annotations

import errno

import torch

from coterie.core.errors import WeightsError

# what torch's allocators and a thread that finds no room for its stack say in a RuntimeError
_SAYINGS = ("can't allocate memory", "out of memory", "can't start new thread")


class MemoryShortage(WeightsError):
    """An allocation failed. Less may still fit."""


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryShortage | MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)
