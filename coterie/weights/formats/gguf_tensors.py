"""The tensors of a GGUF file as weights: views of the mapped file, matrices as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.weights.formats.gguf import GGUFFile, TensorInfo
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES, expand
from coterie.weights.quantize import DenseWeight, GgufBlocks, Weight

Bytes = npt.NDArray[np.uint8]

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def map_files(file: GGUFFile) -> dict[Path, Bytes]:
    """Copy on write: torch uses the pages without a copy, and nothing is written to the files."""
    return {
        path: np.memmap(path, dtype=np.uint8, mode="c", shape=(size,))
        for path, size in file.sizes.items()
    }


def read_tensor(
    data: Mapping[Path, Bytes], info: TensorInfo, order: npt.NDArray[np.int64] | None
) -> Weight:
    """The tensor as stored. `order`: for each row of the result, the row in the file."""
    raw = data[info.path][info.offset : info.offset + info.nbytes]
    if order is not None:
        raw = raw.reshape(info.shape[0], -1)[order].reshape(-1)
    return decode(torch.from_numpy(raw), info.type, info.shape)


def decode(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Weight:
    """The weight in `raw` (uint8, flat), which is stored as `kind`. Matrices are views of `raw`, of
    plain types if it is aligned."""
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        aligned = raw.data_ptr() % dtype.itemsize == 0 == raw.storage_offset() % dtype.itemsize
        return DenseWeight((raw if aligned else raw.clone()).view(dtype).view(shape))
    elements, nbytes = BLOCK_SIZES[kind]
    rows = raw.numel() // nbytes * elements // shape[-1]
    # [rows, blocks per row, bytes per block]
    blocks = raw.view(rows, shape[-1] // elements, nbytes)
    if len(shape) == 2:
        return GgufBlocks(kind, blocks.view(rows, -1))
    return DenseWeight(expand(blocks, kind).view(shape))
