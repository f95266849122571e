"""A composed stack as one run of bytes, and the patches that read it wherever it lies.

One run, so that it reaches a device in one copy. Knows no pool and no kind of adapter.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.kernels.patch import Patch, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coterie.adapters.compose import Composed

ALIGN = 64
FIELDS = ("a", "b", "in_scale", "out_scale", "shift")


class Part(NamedTuple):
    """Where one tensor lies in the run; the soft table has no site."""

    site: Site | None
    field: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int


class Image:
    """Immutable, in this machine's memory."""

    def __init__(self, composed: Composed) -> None:
        self._parts: list[Part] = []
        tensors = []
        self.nbytes = 0
        for site, field, tensor in _tensors(composed):
            tensors.append(tensor.contiguous())
            self._parts.append(Part(site, field, tensor.dtype, tensor.shape, self.nbytes))
            self.nbytes += -(-tensor.nbytes // ALIGN) * ALIGN
        self.bytes = torch.empty(self.nbytes, dtype=torch.uint8)
        base = self.bytes.data_ptr()
        for part, tensor in zip(self._parts, tensors, strict=True):
            ctypes.memmove(base + part.offset, tensor.data_ptr(), tensor.nbytes)

    def write(self, target: Tensor, begin: int = 0) -> None:
        """Bytes `begin` .. `begin + len(target)`, into this machine's memory."""
        count = min(target.numel(), self.nbytes - begin)
        # ctypes lets other threads run meanwhile, and starts no threads of its own
        ctypes.memmove(target.data_ptr(), self.bytes.data_ptr() + begin, count)

    def views(self, source: Tensor) -> tuple[dict[Site, Patch], Tensor | None]:
        """The patches and the soft table in written bytes, on whatever device they are."""
        typed = {dtype: source.view(dtype) for dtype in {part.dtype for part in self._parts}}
        fields: dict[Site, dict[str, Tensor]] = {}
        soft = None
        for site, field, dtype, shape, offset in self._parts:
            whole = typed[dtype]
            begin = whole.storage_offset() + offset // dtype.itemsize
            view = whole.as_strided(shape, _strides(shape), begin)
            if site is None:
                soft = view
            else:
                fields.setdefault(site, {})[field] = view
        return {site: Patch(**parts) for site, parts in fields.items()}, soft


def _tensors(composed: Composed) -> Iterator[tuple[Site | None, str, Tensor]]:
    for site, patch in composed.patches.items():
        for field in FIELDS:
            tensor = getattr(patch, field)
            if tensor is not None:
                yield site, field, tensor
    if composed.soft is not None:
        yield None, "soft", composed.soft


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of vectors and matrices, row by row."""
    return (1,) if len(shape) == 1 else (shape[1], 1)
