"""Tensors as plain words of memory: what loading does to every number, on the calling thread alone.

The engine computes on all cores meanwhile; torch's own operators would share the work among threads
that wait for it, and turn narrow matrices around element by element. Knows no adapter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.adapters import finite

_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def is_finite(tensor: Tensor) -> bool:
    """Whether every value is a number; `tensor` is contiguous."""
    words = tensor.view(_WORDS[tensor.dtype]).numpy().reshape(-1)
    return finite.is_finite(words, _NAMES[tensor.dtype])


def turned(matrix: Tensor) -> Tensor:
    """The transpose, row by row in memory of its own."""
    kind = _WORDS[matrix.dtype]
    columns = matrix.view(kind).numpy().T
    return torch.from_numpy(np.array(columns, order="C")).view(matrix.dtype)
