"""Sizes of the GPU's programs by shape: from the device's table, or a rule that is safe for shapes
that were not measured.

A new kind of size needs a function here: `tuned(its shape class, its default)`; `tune` measures it
if it has a case there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton

from coterie.kernels.device_record import DeviceRecord
from coterie.kernels.size_table import expert_shape, matrix_shape, tuned
from coterie.kernels.triton.expert_gemv import PairSizes
from coterie.kernels.triton.gemv import DeviceMatrix, GemvSize
from coterie.kernels.triton.unpack import KINDS

# elements of a dense matrix that one program has; programs that keep a large device busy
_TILE_ELEMENTS, _PROGRAMS = 16384, 256

# by precision
_PAIRS = {
    "fp32": PairSizes(4, 4, 4, 4, 128),
    "bf16": PairSizes(8, 4, 4, 4, 256),
    "int8": PairSizes(8, 4, 4, 4, 256),
    "int4": PairSizes(16, 8, 8, 8, 256),
}

# programs of attention that keep a large device busy
_ATTENTION_PROGRAMS = 512
# a context of at most this many tokens is split into 16 parts, a longer one into 32
LONG_CONTEXT = 2048


def gemv_size(matrix: DeviceMatrix) -> GemvSize:
    return _gemv_size(matrix.kind, matrix.count, matrix.width)


@cache
def _gemv_size(kind: int, count: int, width: int) -> GemvSize:
    return tuned(matrix_shape(KINDS[kind], count, width), default_gemv_size(kind, count, width))


def default_gemv_size(kind: int, count: int, width: int) -> GemvSize:
    padded = triton.next_power_of_2(width)
    tile = _TILE_ELEMENTS * (1, 2, 4)[min(kind, 2)]
    rows = max(1, min(tile // padded, triton.next_power_of_2(count // _PROGRAMS + 1)))
    return GemvSize(rows, 4 if rows * padded <= tile // 2 or rows == 1 else 8)


@cache
def pair_sizes(record: DeviceRecord) -> PairSizes:
    shape = expert_shape("pairs", record.kind, record.hidden, record.intermediate)
    return tuned(shape, default_pair_sizes(record))


def default_pair_sizes(record: DeviceRecord) -> PairSizes:
    """Measured at a width that is a multiple of the chunk; other widths get a smaller chunk, if
    that divides them: masks cost more."""
    sizes, inner = _PAIRS[record.kind], record.intermediate
    chunk = inner & -inner
    return sizes if chunk < 64 else replace(sizes, down_chunk=min(chunk, sizes.down_chunk))


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended: from Hopper on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def context_splits(max_context: int, rows: int, kv_heads: int) -> int:
    """Parts of the context of each row, a power of two: fewer where rows keep the device busy."""
    most = 32 if max_context > LONG_CONTEXT else 16
    wanted = max(1, _ATTENTION_PROGRAMS // (rows * kv_heads))
    return min(most, 1 << (wanted.bit_length() - 1))
