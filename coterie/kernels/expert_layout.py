"""The layout of one expert: panels ready for the kernels, the same on disk, in RAM and on a device.

A record is the parts one after another, each at a multiple of 64 bytes. Its length is a multiple of
4,096, so that it can be read with direct I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.weights.kinds import KINDS

PAGE = 4096


@dataclass(frozen=True, slots=True)
class PartPlace:
    name: str
    kind: str
    rows: int
    columns: int  # 0 for a bias (fp32 [rows])
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """gated: down(silu(gate(x)) * up(x)); otherwise fc2(gelu(fc1(x) + b1)) + b2."""

    hidden: int
    intermediate: int
    gated: bool
    # of gate, up, down; or of fc1, fc2
    kinds: tuple[str, ...]

    def parts(self) -> tuple[PartPlace, ...]:
        inner, outer = self.intermediate, self.hidden
        if self.gated:
            shapes = [("gate", inner, outer), ("up", inner, outer), ("down", outer, inner)]
        else:
            shapes = [("fc1", inner, outer), ("fc2", outer, inner)]
        places, offset = [], 0
        for (name, rows, columns), kind in zip(shapes, self.kinds, strict=True):
            size = KINDS[kind].nbytes(rows, columns)
            places.append(PartPlace(name, kind, rows, columns, offset, size))
            offset += _up(size, 64)
            if not self.gated:
                places.append(PartPlace(f"{name}_bias", "fp32", rows, 0, offset, rows * 4))
                offset += _up(rows * 4, 64)
        return tuple(places)

    @property
    def nbytes(self) -> int:
        last = self.parts()[-1]
        return _up(last.offset + last.nbytes, PAGE)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
