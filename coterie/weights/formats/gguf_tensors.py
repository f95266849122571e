"""The tensors of a GGUF file as weights.

Q8_0, Q4_0 and Q4_1 keep their bits and only change layout (int8 and int4); F32, F16 and BF16 are
views of the mapped file, and so are the blocks of Q5 and K types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.weights.formats.gguf import GGUFFile, TensorInfo
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES, expand, scales
from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Int4Weight, Int8Weight, Weight

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
    """The weight in `raw` (uint8, flat), which is stored as `kind`. Plain types are views of `raw`
    if it is aligned; so are matrices of Q5 and K types."""
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        aligned = raw.data_ptr() % dtype.itemsize == 0 == raw.storage_offset() % dtype.itemsize
        return DenseWeight((raw if aligned else raw.clone()).view(dtype).view(shape))
    elements, nbytes = BLOCK_SIZES[kind]
    rows = raw.numel() // nbytes * elements // shape[-1]
    # [rows, blocks per row, bytes per block]
    blocks = raw.view(rows, shape[-1] // elements, nbytes)
    if len(shape) == 2 and kind.lower() in BLOCK_KINDS:
        return GgufBlocks(kind.lower(), blocks.view(rows, -1))
    if len(shape) == 2 and kind in _KEPT:
        weight = _KEPT[kind](blocks)
        if weight is not None:
            return weight
    return DenseWeight(expand(blocks, kind).view(shape))


def _keep_q8_0(blocks: Tensor) -> Int8Weight:
    q = blocks[..., 2:].reshape(blocks.shape[0], -1).view(torch.int8)
    return Int8Weight(q, scales(blocks[..., :2]))


def _keep_q4_0(blocks: Tensor) -> Int4Weight | None:
    scale = scales(blocks[..., :2])
    minimum = scale * -8
    if not bool(torch.isfinite(minimum).all()):
        return None  # 8 * scale exceeds fp16: only fp32 holds this tensor exactly
    return Int4Weight(blocks[..., 2:].reshape(blocks.shape[0], -1), scale, minimum)


def _keep_q4_1(blocks: Tensor) -> Int4Weight:
    q = blocks[..., 4:].reshape(blocks.shape[0], -1)
    return Int4Weight(q, scales(blocks[..., :2]), scales(blocks[..., 2:4]))


_KEPT: dict[str, Callable[[Tensor], Weight | None]] = {
    "Q8_0": _keep_q8_0,
    "Q4_0": _keep_q4_0,
    "Q4_1": _keep_q4_1,
}
