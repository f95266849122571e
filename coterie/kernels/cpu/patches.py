"""Patches as the native kernels read them: a C table per stack, made once, and a step's rows.

`stack.tables["cpu"]` keeps the table for as long as the stack lives. Checks what C trusts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.core.errors import InternalError
from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import native
from coterie.kernels.patch import PARTS

if TYPE_CHECKING:
    from coterie.kernels.decoder import DecoderShape
    from coterie.kernels.patch import Patch, PatchStack, Segment

SegmentArray = ctypes.Array[abi.Segment]

_BACKEND = "cpu"
_TYPES = (torch.float32, torch.bfloat16)


class _Table(NamedTuple):
    patches: ctypes.Array[abi.Patch]  # [layers * len(PARTS)]
    address: int
    most_ranks: int


class PatchSites:
    """The matrices of one decoder that stacks can be for."""

    def __init__(self, shape: DecoderShape, num_layers: int) -> None:
        hidden, inner = shape.hidden, shape.intermediate
        q, kv = shape.q_size, shape.kv_size
        self._num_layers = num_layers
        # [in, out], as PARTS
        self._sizes = (
            (hidden, q),
            (hidden, kv),
            (hidden, kv),
            (q, hidden),
            (hidden, inner),
            (hidden, inner),
            (inner, hidden),
        )

    def segments(self, patches: Sequence[Segment]) -> SegmentArray:
        """The C view of a step's segments. Their stacks must outlive it."""
        rows = (abi.Segment * len(patches))()
        for row, (first, last, stack) in zip(rows, patches, strict=True):
            table = stack.tables.get(_BACKEND) or self._table(stack)
            row.first, row.last = first, last
            row.patches, row.most_ranks = table.address, table.most_ranks
        return rows

    def _table(self, stack: PatchStack) -> _Table:
        rows = (abi.Patch * (self._num_layers * len(PARTS)))()
        places = {part: (at, *self._sizes[at]) for at, part in enumerate(PARTS)}
        most = 0
        for (layer, part), patch in stack.patches.items():
            if part not in places:
                continue  # walked in Python
            if not 0 <= layer < self._num_layers:
                raise InternalError(f"a patch is for layer {layer} of {self._num_layers}")
            at, width, height = places[part]
            row = _row(patch, width, height)
            rows[layer * len(PARTS) + at] = row
            most = max(most, row.rank)
        table = _Table(rows, ctypes.addressof(rows), most)
        stack.tables[_BACKEND] = table
        return table


def _row(patch: Patch, width: int, height: int) -> abi.Patch:
    """The C view of a patch of a matrix [height, width]."""
    a = b = None
    rank, dtype = 0, None
    if patch.a is not None and patch.b is not None:
        rank, dtype = patch.a.shape[0], patch.a.dtype
        a, b = _pointer(patch.a, (rank, width)), _pointer(patch.b, (rank, height))
        if dtype != patch.b.dtype:
            raise InternalError(f"a patch has {dtype} before {patch.b.dtype}")
    vectors = (patch.in_scale, width), (patch.out_scale, height), (patch.shift, height)
    pointers = (None if tensor is None else _vector(tensor, size) for tensor, size in vectors)
    return abi.Patch(a, b, *pointers, rank, dtype == torch.bfloat16, 1)


def _vector(tensor: Tensor, size: int) -> int:
    if tensor.dtype != torch.float32:
        raise InternalError(f"scales and shifts of patches are fp32, not {tensor.dtype}")
    return _pointer(tensor, (size,))


def _pointer(tensor: Tensor, shape: tuple[int, ...]) -> int:
    # each asked once: hundreds of patches stand between a new stack and its first step
    if (
        tensor.is_cpu
        and tensor.shape == shape
        and tensor.dtype in _TYPES
        and tensor.is_contiguous()
    ):
        return tensor.data_ptr()
    have = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
    raise InternalError(f"a patch has {have} where {shape} belongs, contiguous, for native kernels")


def add(work: Sequence[tuple[slice, slice, Patch]], x: Tensor, y: Tensor) -> None:
    """y [T, out] in place, for (rows, columns, patch): out_scale * y + shift + (x a^T) b.

    Twin of patched.add; y is fp32 and contiguous.
    """
    library = native()
    if library is None:
        raise InternalError("native patches without native kernels")
    x, width = x.float().contiguous(), x.shape[1]
    patches = (abi.Patch * len(work))()
    pieces = (abi.Piece * len(work))()
    size = ctypes.sizeof(abi.Patch)
    for at, (rows, columns, patch) in enumerate(work):
        height = columns.stop - columns.start
        patches[at] = _row(patch, width, height)
        where = ctypes.addressof(patches) + at * size
        count = rows.stop - rows.start
        pieces[at] = abi.Piece(where, rows.start, count, columns.start, height, 0)
    library.call.ct_patches(
        pieces, len(work), x.data_ptr(), width, y.data_ptr(), y.shape[1], torch.get_num_threads()
    )
