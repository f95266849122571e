"""Recognises a failed memory allocation, reported by the system, Python, torch or CUDA.

Each of them raises a different error; callers need one test and one typed error.
"""

from __future__ import annotations

import errno

import torch

from coterie.core.errors import WeightsError

# texts of a RuntimeError from torch's allocators, or from a thread that has no memory for its stack
_MESSAGES = ("can't allocate memory", "out of memory", "can't start new thread")


class MemoryShortage(WeightsError):
    """An allocation failed. A smaller one may still succeed."""


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryShortage | MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _MESSAGES)
