"""The layout of one expert: panels ready for the kernels, the same on disk, in RAM and on a device.

A record is the parts one after another, each at a multiple of 64 bytes. Its length is a multiple of
4,096, so that it can be read with direct I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

PANEL, GROUP, PAGE = 16, 32, 4096

# kinds of a matrix; q4_k and q6_k are GGUF's blocks, row after row, as stored
KINDS = ("fp32", "bf16", "int8", "int4", "q4_k", "q6_k")


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
            size = matrix_bytes(kind, rows, columns)
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


def matrix_bytes(kind: str, rows: int, columns: int) -> int:
    panels, groups = -(-rows // PANEL), columns // GROUP
    if kind == "fp32":
        return panels * PANEL * _up(columns, 4) * 4
    if kind == "bf16":
        return panels * PANEL * _up(columns, 32) * 2
    if kind == "int8":
        return panels * groups * (PANEL * GROUP + 2 * PANEL)
    if kind == "int4":
        return panels * groups * (PANEL * GROUP // 2 + 4 * PANEL)
    return rows * (columns // 256) * {"q4_k": 144, "q6_k": 210}[kind]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
