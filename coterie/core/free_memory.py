"""Memory that was freed goes back to the system: the C library would keep it."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Takes milliseconds: after something large has ended. Only glibc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
