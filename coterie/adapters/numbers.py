"""Tensors as plain words of memory: what loading does to every number, on the calling thread alone.

The engine computes on all cores meanwhile; torch's own operators would share the work among threads
that wait for it, and turn narrow matrices around element by element. Knows no adapter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# type -> words of its width, all bits but the sign, the exponent of infinity and NaN
_WORDS = {
    torch.float32: (torch.int32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
}
# stays in a core's cache
_CHUNK = 1 << 16


def is_finite(tensor: Tensor) -> bool:
    """Whether every value is a number; `tensor` is contiguous."""
    kind, magnitude, infinity = _WORDS[tensor.dtype]
    words = tensor.view(kind).numpy().reshape(-1)
    scratch = np.empty(min(_CHUNK, len(words)), words.dtype)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK]
        if np.bitwise_and(part, magnitude, out=scratch[: len(part)]).max() >= infinity:
            return False
    return True


def turned(matrix: Tensor) -> Tensor:
    """The transpose, row by row in memory of its own."""
    kind = _WORDS[matrix.dtype][0]
    columns = matrix.view(kind).numpy().T
    return torch.from_numpy(np.array(columns, order="C")).view(matrix.dtype)
