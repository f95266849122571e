"""One thread for each native library of the gateway, which waits for others and computes little.

A pool per library costs memory, and threads that spin take the cores from the workers. Workers get
the environment as it was: their threads are `engine.threads`.
"""

from __future__ import annotations

import os

VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)
_before: dict[str, str | None] = {}


def pin() -> None:
    """To be called before any of them is loaded: they read their variable once."""
    for name in VARIABLES:
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = "1"


def unpinned() -> dict[str, str]:
    """This process's environment as it was before `pin`."""
    found = dict(os.environ)
    for name, value in _before.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found
