"""Experts read in place from a checkpoint: safetensors or GGUF, no conversion on disk.

Each read takes an expert's bytes from the file, brings them to the precision asked for and packs
them, in the thread that reads; nothing of it stays. Knows no tier and no strategy.
"""

from __future__ import annotations

import threading
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.experts.disk import Disk, aligned_buffer, covering
from coterie.experts.geometry import Geometry, Key
from coterie.experts.store import ExpertNames, ExpertShape, Spent
from coterie.experts.tensors import Piece, fitting, kind_of, locate
from coterie.kernels.expert_layout import ExpertLayout
from coterie.kernels.expert_record import pack_record
from coterie.weights.pages import Extent
from coterie.weights.quantize import DTYPES, Dense, Weight, dense

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint


class CheckpointStore:
    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: Geometry,
        names: ExpertNames,
        shape: ExpertShape,
        dtype: str,
        disk: Disk,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}", param="dtype")
        self.geometry, self.disk, self.spent = geometry, disk, Spent()
        self._checkpoint = checkpoint
        self._pieces = locate(checkpoint, geometry, names, shape)
        self._layouts = {layer: self._layout(layer, shape, dtype) for layer in geometry.layers}
        sizes = {layer: layout.nbytes for layer, layout in self._layouts.items()}
        self.slot_bytes = max(sizes.values(), default=0)
        self.expert_bytes = sum(sizes[layer] for layer, _ in self._pieces)
        self.staging_bytes = max((self.read_bytes(key) for key in self._pieces), default=0)
        self._thread = threading.local()
        disk.open(self.files())

    @cached_property
    def fingerprint(self) -> str:
        return self._checkpoint.fingerprint()

    @property
    def lineage(self) -> tuple[str, ...]:
        return (self.fingerprint,)

    def layout(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def read_bytes(self, key: Key) -> int:
        ranges = _merged(self._pieces[key])
        return sum(covering(each.offset, each.nbytes).nbytes for each in ranges)

    def read(self, key: Key, out: Tensor) -> int:
        pieces, layout = self._expert(key), self._layouts[key[0]]
        staging, at = self._staging(), 0
        raw: dict[Extent, Tensor] = {}
        for each in _merged(pieces):
            raw[each] = self.disk.read(each.path, each.offset, each.nbytes, staging[at:])
            at += covering(each.offset, each.nbytes).nbytes
        started = time.perf_counter()
        parts: dict[str, Weight | Tensor] = {}
        kinds = {place.name: place.kind for place in layout.parts()}
        for piece in pieces:
            weight = piece.decode(_within(raw, piece.extent))
            kind = kinds[piece.part]
            _refuse_rounding(piece, weight, kind)
            is_bias = piece.part.endswith("_bias")
            parts[piece.part] = dense(weight) if is_bias else fitting(weight, kind)
        pack_record(layout, parts, out)
        self.spent.add(pack_s=time.perf_counter() - started)
        return at

    def tensors(self) -> frozenset[str]:
        return frozenset(piece.name for pieces in self._pieces.values() for piece in pieces)

    def files(self) -> frozenset[Path]:
        return frozenset(piece.extent.path for pieces in self._pieces.values() for piece in pieces)

    def close(self) -> None:
        self.disk.close()

    def _expert(self, key: Key) -> tuple[Piece, ...]:
        if key not in self._pieces:
            raise WeightsError(f"{self._checkpoint.path}: has no expert {key[1]} in layer {key[0]}")
        return self._pieces[key]

    def _layout(self, layer: int, shape: ExpertShape, dtype: str) -> ExpertLayout:
        """One for the whole layer: slots and kernels know no other."""
        kinds: tuple[str, ...] = ()
        for expert in self.geometry.present(layer):
            matrices = [p for p in self._pieces[layer, expert] if not p.part.endswith("_bias")]
            own = tuple(kind_of(piece, dtype) for piece in matrices)
            if kinds and own != kinds:
                raise WeightsError(
                    f"{self._checkpoint.path}: expert tensor {matrices[0].name!r} is stored as "
                    f"{', '.join(own)}, the layer's others as {', '.join(kinds)}. "
                    "Ask for one precision: --dtype bf16, int8 or int4."
                )
            kinds = own
        return ExpertLayout(shape.hidden, shape.intermediate, shape.gated, kinds)

    def _staging(self) -> Tensor:
        """This thread's buffer for raw bytes."""
        if not hasattr(self._thread, "buffer"):
            self._thread.buffer = aligned_buffer(self.staging_bytes)
        buffer: Tensor = self._thread.buffer
        return buffer


def _merged(pieces: tuple[Piece, ...]) -> list[Extent]:
    """As few reads as possible: pieces that touch the same or neighbouring pages come together."""
    merged: list[Extent] = []
    for piece in sorted(pieces, key=lambda p: (p.extent.path, p.extent.offset, p.extent.nbytes)):
        new, last = piece.extent, merged[-1] if merged else None
        span = covering(last.offset, last.nbytes) if last else None
        if last and span and new.path == last.path and new.offset <= span.offset + span.nbytes:
            end = max(last.offset + last.nbytes, new.offset + new.nbytes)
            merged[-1] = Extent(last.path, last.offset, end - last.offset)
        else:
            merged.append(new)
    return merged


def _within(raw: dict[Extent, Tensor], wanted: Extent) -> Tensor:
    """The bytes of `wanted` from the range that was read around it."""
    for extent, data in raw.items():
        start = wanted.offset - extent.offset
        if extent.path == wanted.path and 0 <= start <= extent.nbytes - wanted.nbytes:
            return data[start : start + wanted.nbytes]
    raise ValueError(f"{wanted} was not read")


def _refuse_rounding(piece: Piece, weight: Weight, kind: str) -> None:
    """Q4_0 scales beyond fp16's range do not fit int4; rounding them again would go unseen."""
    if piece.stored == "Q4_0" and kind == "int4" and isinstance(weight, Dense):
        raise WeightsError(
            f"{piece.extent.path}: expert tensor {piece.name!r} has scales that int4 cannot hold. "
            "Use --dtype fp32 or bf16."
        )
