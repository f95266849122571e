"""How many cores one thread's work may take, whatever the others take.

OpenMP keeps that number by thread, and torch has no word for it. Knows no kernel.
"""

from __future__ import annotations

import ctypes

import torch

from coterie.kernels.cpu.build import openmp_runtime


def use_threads_here(count: int) -> None:
    """For torch's operators and native calls that the calling thread begins from now on. Where
    torch runs without OpenMP nothing changes."""
    # torch gives a new thread its number at the first look
    torch.get_num_threads()
    try:
        ctypes.CDLL(openmp_runtime()).omp_set_num_threads(ctypes.c_int(count))
    except (OSError, AttributeError):
        return
