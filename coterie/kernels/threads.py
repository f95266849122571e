"""How many cores one thread's work may take, whatever the others take.

OpenMP keeps that number by thread, and torch has no word for it. Knows no kernel.
"""

from __future__ import annotations

import torch

from coterie.kernels.build import native


def use_threads_here(count: int) -> None:
    """For torch's operators and native calls that the calling thread begins from now on. Without
    native kernels nothing changes."""
    # torch gives a new thread its number at the first look
    torch.get_num_threads()
    library = native()
    if library is not None:
        library.call.ct_use_threads(count)
