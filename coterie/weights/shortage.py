"""Recognises a failed memory allocation, reported by the system, Python, torch or CUDA.

Each of them raises a different error; callers need one test and one typed error.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable

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


# what a thread gets before it runs: its stack, and room for Python's first objects in it
_STACK_BYTES, _FIRST_BYTES = 8 << 20, 2 << 20


def started(
    work: Callable[[], None], name: str, count: int, *, is_awaited: bool = False
) -> list[threading.Thread]:
    """Threads that run `work`: `count`, or as many as the system has memory for, at least one.
    `is_awaited`: the interpreter does not end before them."""
    threads: list[threading.Thread] = []
    for _ in range(count):
        thread = threading.Thread(target=work, name=name, daemon=not is_awaited)
        try:
            # Python waits for ever for a thread that dies of a shortage before its first line
            mmap.mmap(-1, (threading.stack_size() or _STACK_BYTES) + _FIRST_BYTES).close()
            thread.start()
        except (RuntimeError, OSError, OverflowError, ValueError) as error:
            if threads:
                break
            raise MemoryShortage(f"the system refused memory for a thread ({name})") from error
        threads.append(thread)
    return threads
