"""Experts read directly from a checkpoint (safetensors or GGUF), without a conversion on disk.

Each read takes an expert's bytes from the file, converts them to the requested precision and packs
them, all in the calling thread. It keeps no copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.expert_record import pack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.store.base import (
    ExpertGeometry,
    ExpertNames,
    ExpertShape,
    ExpertStore,
    Key,
    StoreTimings,
)
from coterie.moe.store.disk import DiskReader, StagingBuffers, covering_pages
from coterie.moe.store.tensors import StoredPart, fit_to_kind, kind_of, locate_parts
from coterie.weights.files import FileExtent
from coterie.weights.formats.gguf_blocks import NotFinite, NotHeld
from coterie.weights.quantize import DTYPES, Weight, dense

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint


class CheckpointStore:
    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: ExpertGeometry,
        names: ExpertNames,
        shape: ExpertShape,
        dtype: str,
        disk: DiskReader,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}", param="dtype")
        self.geometry, self.disk, self.spent = geometry, disk, StoreTimings()
        self._checkpoint = checkpoint
        self._pieces = locate_parts(checkpoint, geometry, names, shape)
        self._layouts = {layer: self._layout(layer, shape, dtype) for layer in geometry.layers}
        self._targets = {layer: RecordTarget(layout) for layer, layout in self._layouts.items()}
        # each is made at its first use
        self._plans: dict[Key, ExpertReadPlan] = {}
        sizes = {layer: layout.nbytes for layer, layout in self._layouts.items()}
        self.slot_bytes = max(sizes.values(), default=0)
        self.expert_bytes = sum(sizes[layer] for layer, _ in self._pieces)
        self.staging_bytes = max((self.read_bytes(key) for key in self._pieces), default=0)
        self._staging = StagingBuffers(self.staging_bytes)
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
        return read_bytes(self._expert(key))

    def read(self, key: Key, out: Tensor) -> int:
        plan = self._plan(key)
        with self._staging.lent() as staging:
            for each in plan.ranges:
                self.disk.read(each.path, each.offset, each.nbytes, staging[each.at :])
            started = time.perf_counter()
            try:
                plan.pack(staging, out)
            except NotFinite:
                expert = f"expert {key[1]} of layer {key[0]}"
                raise NotFinite(f"{self._checkpoint.path}: {expert}: ") from None
        self.spent.add(pack_s=time.perf_counter() - started)
        return plan.nbytes

    def tensors(self) -> frozenset[str]:
        return frozenset(piece.name for pieces in self._pieces.values() for piece in pieces)

    def files(self) -> frozenset[Path]:
        return frozenset(piece.extent.path for pieces in self._pieces.values() for piece in pieces)

    def close(self) -> None:
        self.disk.close()

    def _expert(self, key: Key) -> tuple[StoredPart, ...]:
        if key not in self._pieces:
            raise WeightsError(f"{self._checkpoint.path}: has no expert {key[1]} in layer {key[0]}")
        return self._pieces[key]

    def _plan(self, key: Key) -> ExpertReadPlan:
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = ExpertReadPlan(self._expert(key), self._targets[key[0]])
        return plan

    def _layout(self, layer: int, shape: ExpertShape, dtype: str) -> ExpertLayout:
        """One layout for the whole layer, as slots and kernels need it."""
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


# (stored type, kind of the layout) where only the order of bytes differs
_SAME = frozenset({("BF16", "bf16"), ("F32", "fp32")})
_KINDS = {name: abi.KINDS[name] for name in ("bf16", "fp32")}


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Bytes of one file that are read together, and where in the staging buffer their pages go."""

    path: Path
    offset: int
    nbytes: int
    at: int


class RecordTarget:
    """What all records of one layout share."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout, self.places = layout, layout.parts()
        self.kinds = {place.name: place.kind for place in self.places}
        # bytes that belong to no part
        ends = [0, *(place.offset + place.nbytes for place in self.places)]
        begins = [*(place.offset for place in self.places), layout.nbytes]
        self.gaps = [(a, b) for a, b in zip(ends, begins, strict=True) if a < b]
        # kind, rows, columns and place of each native call
        self.calls = [
            (_KINDS[place.kind], place.rows, place.columns, place.offset)
            for place in self.places
            if place.columns and place.kind in _KINDS
        ]


class ExpertReadPlan:
    """How one expert's bytes are read and packed into its record."""

    __slots__ = ("_pieces", "_plain", "_starts", "_target", "nbytes", "ranges")

    def __init__(self, pieces: Sequence[StoredPart], target: RecordTarget) -> None:
        self._pieces, self._target = pieces, target
        self.ranges, self.nbytes = _ranges(pieces)
        self._starts = tuple(_start(self.ranges, piece.extent) for piece in pieces)
        # every piece is stored in the type of the layout
        self._plain = len(target.calls) == len(pieces) and all(
            (piece.stored, target.kinds[piece.part]) in _SAME
            and piece.column is None
            and start % 4 == 0
            for piece, start in zip(pieces, self._starts, strict=True)
        )

    def pack(self, staging: Tensor, out: Tensor) -> None:
        library = native() if self._plain else None
        if library is None:
            try:
                pack_record(self._target.layout, self._decoded(staging), out)
            except NotHeld as error:
                raise self._beyond_int4(error.part) from None
            return
        source, target, pack = staging.data_ptr(), out.data_ptr(), library.call.ct_pack
        for (kind, rows, columns, offset), start in zip(
            self._target.calls, self._starts, strict=True
        ):
            # one thread: the caller is already one of several load threads
            pack(kind, rows, columns, source + start, 0, 0, target + offset, 1)
        for first, last in self._target.gaps:
            out[first:last].zero_()

    def _beyond_int4(self, part: str) -> WeightsError:
        """Of Q4_0 scales beyond fp16's range: int4 cannot store them exactly."""
        piece = next(piece for piece in self._pieces if piece.part == part)
        return WeightsError(
            f"{piece.extent.path}: expert tensor {piece.name!r} has scales that int4 cannot hold. "
            "Use --dtype fp32 or bf16."
        )

    def _decoded(self, staging: Tensor) -> dict[str, Weight | Tensor]:
        parts: dict[str, Weight | Tensor] = {}
        for piece, start in zip(self._pieces, self._starts, strict=True):
            weight = piece.decode(staging[start : start + piece.extent.nbytes])
            kind = self._target.kinds[piece.part]
            is_bias = piece.part.endswith("_bias")
            parts[piece.part] = dense(weight) if is_bias else fit_to_kind(weight, kind)
        return parts


def read_bytes(pieces: Sequence[StoredPart]) -> int:
    """The bytes that one expert takes from the disk: whole pages."""
    return _ranges(pieces)[1]


def _ranges(pieces: Sequence[StoredPart]) -> tuple[tuple[ReadRange, ...], int]:
    """As few reads as possible: pieces in the same or adjacent pages are read together."""
    merged: list[FileExtent] = []
    for piece in sorted(pieces, key=lambda p: (p.extent.path, p.extent.offset, p.extent.nbytes)):
        new, last = piece.extent, merged[-1] if merged else None
        span = covering_pages(last.offset, last.nbytes) if last else None
        if last and span and new.path == last.path and new.offset <= span.offset + span.nbytes:
            end = max(last.offset + last.nbytes, new.offset + new.nbytes)
            merged[-1] = FileExtent(last.path, last.offset, end - last.offset)
        else:
            merged.append(new)
    ranges, at = [], 0
    for each in merged:
        ranges.append(ReadRange(each.path, each.offset, each.nbytes, at))
        at += covering_pages(each.offset, each.nbytes).nbytes
    return tuple(ranges), at


def _start(ranges: Sequence[ReadRange], wanted: FileExtent) -> int:
    """The position of the bytes of `wanted` in the staging buffer."""
    for each in ranges:
        ahead = wanted.offset - each.offset
        if each.path == wanted.path and 0 <= ahead <= each.nbytes - wanted.nbytes:
            return each.at + covering_pages(each.offset, each.nbytes).skip + ahead
    raise ValueError(f"{wanted} is not read")


def open_store(
    checkpoint: Checkpoint,
    geometry: ExpertGeometry,
    names: ExpertNames,
    dtype: str,
    reads: str = "auto",
    *,
    hidden: int,
    intermediate: int,
    gated: bool,
) -> ExpertStore:
    """The experts of `checkpoint` at `dtype` (auto: as stored). Checks everything that can be
    checked without reading an expert."""
    from coterie.moe.store.disk import DiskReader
    from coterie.moe.store.packed import INDEX_FILE, expect_model, open_packed

    shape = ExpertShape(hidden, intermediate, gated)
    if (checkpoint.path / INDEX_FILE).exists():
        packed = open_packed(checkpoint.path, dtype, DiskReader(reads))
        expect_model(packed, geometry, shape)
        return packed
    return CheckpointStore(checkpoint, geometry, names, shape, dtype, DiskReader(reads))
