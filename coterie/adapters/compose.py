"""A weighted stack of adapters, folded into one patch per matrix and one table of soft tokens.

On the host, once per stack. Owns the order of wrapping and the checks against the model; the kinds'
files own what wrapping means.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from coterie.adapters.kinds.patch_builder import ModulePatchBuilder
from coterie.adapters.kinds.table import ADAPTERS
from coterie.core.errors import InvalidRequest, WeightsError
from coterie.kernels.patch import Patch, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from coterie.adapters.base import AdaptableModel, Adapter, ModuleChange, TargetModule
    from coterie.kernels.patch import Patch, Site


# relative; 4-bit weights keep row norms far better than this
_BASE_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class ComposedStack:
    patches: Mapping[Site, Patch]
    soft: Tensor | None  # [tokens, hidden] fp32
    nbytes: int


def compose(parts: Sequence[tuple[Adapter, float]], targets: AdaptableModel) -> ComposedStack:
    """The adapters in their order, each at its weight."""
    foldings: dict[str, ModulePatchBuilder] = {}
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
            if path not in foldings:
                foldings[path] = ModulePatchBuilder(targets.find(path))
            _check(path, change, foldings[path].target)
            assert wrap is not None
            wrap(foldings[path], change, weight)
    made = ((folding.target.site, folding.patch()) for folding in foldings.values())
    patches = {site: patch for site, patch in made if patch is not None}
    soft = torch.cat(tables) if tables else None
    nbytes = sum(patch.nbytes for patch in patches.values()) + (0 if soft is None else soft.nbytes)
    return ComposedStack(patches, soft, nbytes)


def _soft(table: Tensor, weight: float, hidden: int) -> Tensor:
    if table.shape[1] != hidden:
        raise WeightsError(
            f"the soft prompt is {table.shape[1]} wide, the model {hidden}: it is for another model"
        )
    return table.float() * weight


def _check(path: str, change: ModuleChange, target: TargetModule) -> None:
    """Shapes against the model's own."""
    wide, tall = target.in_features, target.out_features
    vector = wide if change.feedforward else tall
    for name, tensor, axis, wanted in (
        ("lora_A", change.a, 1, wide),
        ("lora_B", change.b, 0, tall),
        ("lora_magnitude_vector", change.magnitude, 0, tall),
        ("ia3_l", change.vector, 0, vector),
    ):
        if tensor is not None and tensor.shape[axis] != wanted:
            raise WeightsError(
                f"{path}: {name} is for {tensor.shape[axis]} features, the model has {wanted}: the "
                "adapter is for another model"
            )
    if change.base_norms is not None:
        _check_base(path, change.base_norms, target)


def _check_base(path: str, norms: Tensor, target: TargetModule) -> None:
    """A file that carries a base weight must carry the served one's, up to quantisation."""
    if len(norms) == target.out_features:
        own = target.row_norms_squared().sqrt().float()
        if float((norms - own).norm()) <= _BASE_TOLERANCE * float(own.norm()):
            return
    raise WeightsError(
        f"{path}: the adapter's file carries another base weight (a resized vocabulary, or another "
        "model). Remove its base_layer tensors if you know better."
    )


ALIGN = 64
FIELDS = ("a", "b", "in_scale", "out_scale", "shift")


class StackTensor(NamedTuple):
    """Where one tensor lies in the run; the soft table has no site."""

    site: Site | None
    field: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int


class StackImage:
    """Immutable, in this machine's memory."""

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


def _tensors(composed: ComposedStack) -> Iterator[tuple[Site | None, str, Tensor]]:
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


# pinned once at start; a larger stack goes in pieces
STAGING_BYTES = 32 << 20


class StackUpload(Protocol):
    def copy(self, image: StackImage, target: Tensor) -> Any:
        """Begin (and on a CPU end) filling `target`; what `arrived` must be given."""

    def arrived(self, event: Any) -> None:
        """Whatever is computed from now on waits for that copy. Computing thread only."""

    def fence(self) -> None:
        """Copies from now on wait for what was computed so far. Computing thread only."""

    def close(self) -> None:
        """Waits for the last copy."""


class HostUpload:
    def copy(self, image: StackImage, target: Tensor) -> None:
        image.write(target)

    def arrived(self, event: Any) -> None:
        """It has."""

    def fence(self) -> None:
        """A CPU has computed when it says so."""

    def close(self) -> None:
        """Nothing is under way."""


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
            # the staging is read until the copy before is over
            if self._last is not None:
                self._last.synchronize()
            piece = self._staging[: min(size, image.nbytes - begin)]
            image.write(piece, begin)
            with torch.cuda.stream(self._stream):
                target[begin : begin + piece.numel()].copy_(piece, non_blocking=True)
                self._last = self._stream.record_event()
        return self._last

    def arrived(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def fence(self) -> None:
        self._fence = torch.cuda.current_stream(self._device).record_event()

    def close(self) -> None:
        self._stream.synchronize()


def upload_for(device: torch.device, largest: int) -> StackUpload:
    return CudaUpload(device, largest) if device.type == "cuda" else HostUpload()
