"""Composes a weighted stack of adapters into one patch per matrix and one table of soft tokens.

Runs on the host, once per stack. Defines the order of wrapping and checks against the model; the
files in kinds/ define what wrapping means.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.adapters.base import AdaptableModel, Adapter, TargetModule, check_sizes
from coterie.adapters.kinds.patch_builder import ModulePatchBuilder
from coterie.adapters.kinds.table import ADAPTERS
from coterie.core.errors import InvalidRequest, WeightsError
from coterie.kernels.patch import Patch, Site

# relative; 4-bit weights change row norms far less than this
_BASE_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class ComposedStack:
    patches: Mapping[Site, Patch]
    soft: Tensor | None  # [tokens, hidden] fp32
    nbytes: int


def compose(parts: Sequence[tuple[Adapter, float]], targets: AdaptableModel) -> ComposedStack:
    """The adapters in their order, each with its weight."""
    builders: dict[str, ModulePatchBuilder] = {}
    tables: list[Tensor] = []
    for adapter, weight in parts:
        if not math.isfinite(weight):
            raise InvalidRequest(
                f"an adapter's weight must be finite, not {weight}", param="weight"
            )
        if adapter.soft is not None:
            tables.append(_soft(adapter.soft, weight, targets.hidden))
        wrap = ADAPTERS[adapter.kind].apply
        for path, change in adapter.changes.items():
            if path not in builders:
                builders[path] = ModulePatchBuilder(targets.find(path))
            target = builders[path].target
            check_sizes(path, change, (target.in_features, target.out_features), "the model")
            assert wrap is not None
            wrap(builders[path], change, weight)
        if adapter.head_norms is not None:
            _check_head(adapter.head_norms, builders["lm_head"].target)
    site_patches = ((builder.target.site, builder.patch()) for builder in builders.values())
    patches = {site: patch for site, patch in site_patches if patch is not None}
    soft = torch.cat(tables) if tables else None
    nbytes = sum(patch.nbytes for patch in patches.values()) + (0 if soft is None else soft.nbytes)
    return ComposedStack(patches, soft, nbytes)


def _soft(table: Tensor, weight: float, hidden: int) -> Tensor:
    if table.shape[1] != hidden:
        raise WeightsError(
            f"the soft prompt is {table.shape[1]} wide, the model {hidden}: it is for another model"
        )
    return table.float() * weight


def _check_head(norms: Tensor, target: TargetModule) -> None:
    """A base weight in the file must be that of the served model, up to quantisation."""
    if len(norms) == target.out_features:
        own = target.row_norms_squared().sqrt().float()
        if float((norms - own).norm()) <= _BASE_TOLERANCE * float(own.norm()):
            return
    raise WeightsError(
        "lm_head: the adapter's file carries another base weight (a resized vocabulary, or another "
        "model). Remove its base_layer tensors if you know better."
    )


ALIGN = 64
FIELDS = ("a", "b", "in_scale", "out_scale", "shift")


class StackTensor(NamedTuple):
    """Where one tensor is in the image; the soft table has no site."""

    site: Site | None
    field: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int


class StackImage:
    """A composed stack as one run of bytes. Immutable, in host memory."""

    def __init__(self, composed: ComposedStack) -> None:
        self._parts: list[StackTensor] = []
        tensors = []
        self.nbytes = 0
        for site, field, tensor in _tensors(composed):
            tensors.append(tensor.contiguous())
            self._parts.append(StackTensor(site, field, tensor.dtype, tensor.shape, self.nbytes))
            self.nbytes += -(-tensor.nbytes // ALIGN) * ALIGN
        self.bytes = torch.empty(self.nbytes, dtype=torch.uint8)
        base = self.bytes.data_ptr()
        for part, tensor in zip(self._parts, tensors, strict=True):
            ctypes.memmove(base + part.offset, tensor.data_ptr(), tensor.nbytes)

    def write(self, target: Tensor, begin: int = 0) -> None:
        """Writes bytes `begin` .. `begin + len(target)` to host memory."""
        count = min(target.numel(), self.nbytes - begin)
        # ctypes releases the interpreter lock during the copy, and starts no threads itself
        ctypes.memmove(target.data_ptr(), self.bytes.data_ptr() + begin, count)

    def views(self, source: Tensor) -> tuple[dict[Site, Patch], Tensor | None]:
        """The patches and the soft table as views of written bytes, on any device."""
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


def _tensors(composed: ComposedStack) -> Iterator[tuple[Site | None, str, Tensor]]:
    for site, patch in composed.patches.items():
        for field in FIELDS:
            tensor = getattr(patch, field)
            if tensor is not None:
                yield site, field, tensor
    if composed.soft is not None:
        yield None, "soft", composed.soft


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """For vectors and matrices, row by row."""
    return (1,) if len(shape) == 1 else (shape[1], 1)


# pinned once at start; a larger stack is copied in pieces
STAGING_BYTES = 32 << 20


class StackUpload(Protocol):
    def copy(self, image: StackImage, target: Tensor) -> Any:
        """Starts (and on a CPU finishes) filling `target`; returns the argument of
        `wait_for_copy`."""

    def wait_for_copy(self, event: Any) -> None:
        """Later computations wait for that copy. Call it on the computing thread."""

    def fence(self) -> None:
        """Later copies wait for the computations so far. Call it on the computing thread."""

    def close(self) -> None:
        """Waits for the last copy."""


class HostUpload:
    def copy(self, image: StackImage, target: Tensor) -> None:
        image.write(target)

    def wait_for_copy(self, event: Any) -> None:
        """The copy has finished."""

    def fence(self) -> None:
        """A CPU computation has finished when it returns."""

    def close(self) -> None:
        """No copy is in progress."""


class CudaUpload:
    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        size = min(STAGING_BYTES, largest)
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._last: Any = None
        self._fence: Any = None

    def copy(self, image: StackImage, target: Tensor) -> Any:
        fence, size = self._fence, self._staging.numel()
        if fence is not None:
            self._stream.wait_event(fence)
        for begin in range(0, image.nbytes, size):
            # the staging buffer is in use until the previous copy has finished
            if self._last is not None:
                self._last.synchronize()
            piece = self._staging[: min(size, image.nbytes - begin)]
            image.write(piece, begin)
            with torch.cuda.stream(self._stream):
                target[begin : begin + piece.numel()].copy_(piece, non_blocking=True)
                self._last = self._stream.record_event()
        return self._last

    def wait_for_copy(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def fence(self) -> None:
        self._fence = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        self._stream.synchronize()


def upload_for(device: torch.device, largest: int) -> StackUpload:
    return CudaUpload(device, largest) if device.type == "cuda" else HostUpload()
