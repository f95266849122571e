"""How one expert gets from a checkpoint's files into its record: worked out once, done often.

Pieces that are stored as the layout wants them are packed from the raw bytes, without tensors in
between: readers share the interpreter with whoever computes. Knows no tier and no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.kernels import abi
from coterie.kernels.build import native
from coterie.kernels.expert_layout import ExpertLayout
from coterie.kernels.expert_record import pack_record
from coterie.moe.store.disk import Disk, covering
from coterie.moe.store.tensors import Piece, fitting
from coterie.weights.pages import Extent
from coterie.weights.quantize import Dense, Weight, dense

# stored type and the layout's kind, where only the order of bytes differs
_SAME = frozenset({("BF16", "bf16"), ("F32", "fp32")})
_KINDS = {"bf16": abi.KIND_BF16, "fp32": abi.KIND_F32}


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file that are read together, and where in the staging buffer their pages go."""

    path: Path
    offset: int
    nbytes: int
    at: int


class Target:
    """What all records of one layout have in common."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout, self.places = layout, layout.parts()
        self.kinds = {place.name: place.kind for place in self.places}
        # what no part covers
        ends = [0, *(place.offset + place.nbytes for place in self.places)]
        begins = [*(place.offset for place in self.places), layout.nbytes]
        self.gaps = [(a, b) for a, b in zip(ends, begins, strict=True) if a < b]
        # kind, rows, columns and place of each native call
        self.calls = [
            (_KINDS[place.kind], place.rows, place.columns, place.offset)
            for place in self.places
            if place.columns and place.kind in _KINDS
        ]


class Reading:
    """One expert's way."""

    __slots__ = ("_pieces", "_plain", "_starts", "_target", "nbytes", "ranges")

    def __init__(self, pieces: Sequence[Piece], target: Target) -> None:
        self._pieces, self._target = pieces, target
        self.ranges, self.nbytes = _ranges(pieces)
        self._starts = tuple(_start(self.ranges, piece.extent) for piece in pieces)
        # every piece is stored as the layout wants it
        self._plain = len(target.calls) == len(pieces) and all(
            (piece.stored, target.kinds[piece.part]) in _SAME
            and piece.column is None
            and start % 4 == 0
            for piece, start in zip(pieces, self._starts, strict=True)
        )

    def fetch(self, disk: Disk, staging: Tensor) -> None:
        for each in self.ranges:
            disk.read(each.path, each.offset, each.nbytes, staging[each.at :])

    def pack(self, staging: Tensor, out: Tensor) -> None:
        library = native() if self._plain else None
        if library is None:
            pack_record(self._target.layout, self._decoded(staging), out)
            return
        source, target, pack = staging.data_ptr(), out.data_ptr(), library.call.ct_pack
        for (kind, rows, columns, offset), start in zip(
            self._target.calls, self._starts, strict=True
        ):
            # one thread: readers pack in a pool of their own
            pack(kind, rows, columns, source + start, 0, 0, target + offset, 1)
        for first, last in self._target.gaps:
            out[first:last].zero_()

    def _decoded(self, staging: Tensor) -> dict[str, Weight | Tensor]:
        parts: dict[str, Weight | Tensor] = {}
        for piece, start in zip(self._pieces, self._starts, strict=True):
            weight = piece.decode(staging[start : start + piece.extent.nbytes])
            kind = self._target.kinds[piece.part]
            _refuse_rounding(piece, weight, kind)
            is_bias = piece.part.endswith("_bias")
            parts[piece.part] = dense(weight) if is_bias else fitting(weight, kind)
        return parts


def read_bytes(pieces: Sequence[Piece]) -> int:
    """What one expert takes from the disk: whole pages."""
    return _ranges(pieces)[1]


def _ranges(pieces: Sequence[Piece]) -> tuple[tuple[Range, ...], int]:
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
    ranges, at = [], 0
    for each in merged:
        ranges.append(Range(each.path, each.offset, each.nbytes, at))
        at += covering(each.offset, each.nbytes).nbytes
    return tuple(ranges), at


def _start(ranges: Sequence[Range], wanted: Extent) -> int:
    """Where the bytes of `wanted` lie in the staging buffer."""
    for each in ranges:
        ahead = wanted.offset - each.offset
        if each.path == wanted.path and 0 <= ahead <= each.nbytes - wanted.nbytes:
            return each.at + covering(each.offset, each.nbytes).skip + ahead
    raise ValueError(f"{wanted} is not read")


def _refuse_rounding(piece: Piece, weight: Weight, kind: str) -> None:
    """Q4_0 scales beyond fp16's range do not fit int4; rounding them again would go unseen."""
    if piece.stored == "Q4_0" and kind == "int4" and isinstance(weight, Dense):
        raise WeightsError(
            f"{piece.extent.path}: expert tensor {piece.name!r} has scales that int4 cannot hold. "
            "Use --dtype fp32 or bf16."
        )
