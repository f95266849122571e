"""Rounding a dense matrix to int8 or int4, natively where that is compiled.

The twin is `weights.quantize`; both choose the same groups, scales and minima up to near ties.
"""

from __future__ import annotations

import torch

from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import native
from coterie.weights.quantize import GROUP, Dense, Int4, Int8, Weight, convert

_KINDS = {"int8": abi.KIND_INT8, "int4": abi.KIND_INT4}


def rounded(weight: Weight, dtype: str, threads: int = 1) -> Weight:
    """`convert(weight, dtype)`, fast for dense matrices on the CPU."""
    kind, library = _KINDS.get(dtype), native()
    if kind is None or library is None or not isinstance(weight, Dense):
        return convert(weight, dtype)
    tensor = weight.tensor
    groupable = tensor.ndim == 2 and tensor.shape[1] % GROUP == 0 and tensor.numel() > 0
    if not groupable or tensor.device.type != "cpu":
        return convert(weight, dtype)
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        tensor = tensor.float()
    tensor = tensor.contiguous()
    rows, columns = tensor.shape
    scale = torch.empty(rows, columns // GROUP, dtype=torch.float16)
    minimum = torch.empty_like(scale) if dtype == "int4" else scale
    q = torch.empty(rows, columns // 2 if dtype == "int4" else columns, dtype=torch.uint8)
    library.call.ct_quantise(
        kind,
        tensor.numel() // GROUP,
        tensor.data_ptr(),
        tensor.dtype == torch.bfloat16,
        q.data_ptr(),
        scale.data_ptr(),
        minimum.data_ptr(),
        threads,
    )
    return Int4(q, scale, minimum) if dtype == "int4" else Int8(q.view(torch.int8), scale)
