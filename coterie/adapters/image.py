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
    from coterie.adapters.compose import Composed

ALIGN = 64
FIELDS = ("a", "b", "in_scale", "out_scale", "shift")


class Part(NamedTuple):
    """One tensor of the stack; the soft table has no site."""

    site: Site | None
    field: str
    tensor: Tensor
    offset: int


class Image:
    """What goes where. Holds the composed tensors until they are written."""

    def __init__(self, composed: Composed) -> None:
        self.parts: list[Part] = []
        self.nbytes = 0
        for site, patch in composed.patches.items():
            for field in FIELDS:
                tensor = getattr(patch, field)
                if tensor is not None:
                    self._add(site, field, tensor)
        if composed.soft is not None:
            self._add(None, "soft", composed.soft)

    def _add(self, site: Site | None, field: str, tensor: Tensor) -> None:
        self.parts.append(Part(site, field, tensor.contiguous(), self.nbytes))
        self.nbytes += -(-tensor.nbytes // ALIGN) * ALIGN

    def write(self, target: Tensor, begin: int = 0) -> None:
        """Bytes `begin` .. `begin + len(target)` of the run, into this machine's memory."""
        base, end = target.data_ptr(), begin + target.numel()
        for part in self.parts:
            low = max(part.offset, begin)
            count = min(part.offset + part.tensor.nbytes, end) - low
            if count > 0:
                source = part.tensor.data_ptr() + low - part.offset
                # ctypes lets other threads run meanwhile, and starts no threads of its own
                ctypes.memmove(base + low - begin, source, count)

    def views(self, source: Tensor) -> tuple[dict[Site, Patch], Tensor | None]:
        """The patches and the soft table in written bytes, on whatever device they are."""
        typed: dict[torch.dtype, Tensor] = {}
        fields: dict[Site, dict[str, Tensor]] = {}
        soft = None
        for site, field, tensor, offset in self.parts:
            whole = typed.get(tensor.dtype)
            if whole is None:
                whole = typed[tensor.dtype] = source.view(tensor.dtype)
            begin = whole.storage_offset() + offset // tensor.itemsize
            view = whole.as_strided(tensor.shape, tensor.stride(), begin)
            if site is None:
                soft = view
            else:
                fields.setdefault(site, {})[field] = view
        return {site: Patch(**parts) for site, parts in fields.items()}, soft
