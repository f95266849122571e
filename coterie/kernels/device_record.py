"""The layout of one expert in a device's memory: whole rows, as the GPU's kernels read them.

A store's record has panels for the CPU's kernels (`expert_layout`). On its way into a slot of the
device it is arranged once: gate above up [2 * intermediate, hidden], then down [hidden,
intermediate], then the scales of both. It never grows: a slot for the one has room for the other.

int4: in each group of 32 columns, word i (0 to 3) has column 4 * j + i in its nibble j (0 to 7), so
that four words are one load of 16 bytes and nibble j of them meets four neighbouring columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.kernels.cpu.expert_record import unpack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.weights.kinds import GROUP
from coterie.weights.quantize import (
    DenseWeight,
    GgufBlocks,
    Int4Weight,
    Int8Weight,
    Weight,
    split,
)

# offsets of experts count in these: the widest load
UNIT_BYTES = 16

_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Places in bytes from the beginning of a record; the scales of fp32 and bf16 are empty."""

    kind: str
    hidden: int
    intermediate: int

    @property
    def gate_up_bytes(self) -> int:
        return self._matrix_bytes(2 * self.intermediate * self.hidden)

    @property
    def down_at(self) -> int:
        return self.gate_up_bytes

    @property
    def gate_up_scales_at(self) -> int:
        return self.down_at + self._matrix_bytes(self.hidden * self.intermediate)

    @property
    def down_scales_at(self) -> int:
        return self.gate_up_scales_at + self._scale_bytes(2 * self.intermediate * self.hidden)

    @property
    def nbytes(self) -> int:
        return self.down_scales_at + self._scale_bytes(self.hidden * self.intermediate)

    def _matrix_bytes(self, elements: int) -> int:
        return elements * {"fp32": 8, "bf16": 4, "int8": 2, "int4": 1}[self.kind] // 2

    def _scale_bytes(self, elements: int) -> int:
        return elements // GROUP * {"int8": 2, "int4": 4}.get(self.kind, 0)


def device_record(layout: ExpertLayout) -> DeviceRecord | None:
    """None where the GPU's kernels do not support the layout: such experts run in torch."""
    kind, *others = layout.kinds
    whole = layout.hidden % GROUP == 0 and layout.intermediate % GROUP == 0
    supported = kind in ("fp32", "bf16", "int8", "int4") and all(each == kind for each in others)
    if not (layout.gated and whole and supported):
        return None
    return DeviceRecord(kind, layout.hidden, layout.intermediate)


def arrange(layout: ExpertLayout, record: Tensor, out: Tensor) -> None:
    """Write a store's record (uint8, on any device) into out[: DeviceRecord.nbytes]."""
    target = device_record(layout)
    assert target is not None
    parts = unpack_record(layout, record)
    gate, up, down = (_weight(parts[name]) for name in ("gate", "up", "down"))
    middle = target.gate_up_bytes // 2
    _put(out, 0, _values(gate))
    _put(out, middle, _values(up))
    _put(out, target.down_at, _values(down))
    if not isinstance(gate, DenseWeight):
        half = (target.down_scales_at - target.gate_up_scales_at) // 2
        _put(out, target.gate_up_scales_at, _scales(gate))
        _put(out, target.gate_up_scales_at + half, _scales(up))
        _put(out, target.down_scales_at, _scales(down))


def arranged_parts(
    layout: ExpertLayout, record: Tensor, dtype: torch.dtype
) -> dict[str, Tensor] | None:
    """gate, up and down of a record on a device, without a copy where it has `dtype` already. None:
    the layout is one that is not arranged."""
    target = device_record(layout)
    if target is None:
        return None
    if _DENSE.get(target.kind) is dtype:
        values = record[: target.nbytes].view(dtype)
        middle = 2 * target.intermediate * target.hidden
        gate_up = values[:middle].view(-1, target.hidden)
        down = values[middle:].view(target.hidden, -1)
    else:
        gate_up, down = (part.to(dtype) for part in dense_matrices(target, record))
    gate, up = gate_up.chunk(2)
    return {"gate": gate, "up": up, "down": down}


def packed_matrix(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """One matrix as the kernels read it, and its scales (int4: a word has scale and minimum)."""
    known = _weight(weight)
    if isinstance(known, DenseWeight):
        return known.tensor, None
    scales = _scales(known).contiguous()
    paired = scales.view(torch.int32).squeeze(-1) if isinstance(known, Int4Weight) else scales
    return _values(known).contiguous(), paired


def dense_matrices(target: DeviceRecord, record: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 gate and up [2 * intermediate, hidden] and down [hidden, intermediate] of an arranged
    record: what the kernels compute with, for their plain twins."""
    hidden, inner = target.hidden, target.intermediate
    places = (
        (0, target.down_at, target.gate_up_scales_at, target.down_scales_at, 2 * inner, hidden),
        (target.down_at, target.gate_up_scales_at, target.down_scales_at, target.nbytes, hidden,
         inner),
    )  # fmt: skip
    first, second = (
        _widened(target.kind, record[begin:end], record[scales:last], rows, columns)
        for begin, end, scales, last, rows, columns in places
    )
    return first, second


def _weight(part: Weight | Tensor) -> DenseWeight | Int8Weight | Int4Weight:
    known = split(part) if isinstance(part, GgufBlocks) else part
    assert isinstance(known, DenseWeight | Int8Weight | Int4Weight)
    return known


def _put(out: Tensor, at: int, values: Tensor) -> None:
    raw = values.contiguous().view(-1).view(torch.uint8)
    out[at : at + len(raw)].copy_(raw)


def _values(weight: DenseWeight | Int8Weight | Int4Weight) -> Tensor:
    if isinstance(weight, DenseWeight):
        return weight.tensor
    return weight.q if isinstance(weight, Int8Weight) else _words(weight.q)


def _scales(weight: DenseWeight | Int8Weight | Int4Weight) -> Tensor:
    """fp16 [rows, groups], of int4 [rows, groups, 2] with the minimum second."""
    assert not isinstance(weight, DenseWeight)
    if isinstance(weight, Int8Weight):
        return weight.scale
    return torch.stack((weight.scale, weight.minimum), dim=-1)


def _words(q: Tensor) -> Tensor:
    """[rows, columns / 8] int32 from bytes of which byte j has element j and j + 16 of a group."""
    bytes_ = q.view(len(q), -1, 16).int()
    nibbles = torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)
    # column 4 * j + i -> [j, i]
    shifts = torch.arange(0, 32, 4, device=q.device, dtype=torch.int32)[:, None]
    placed = nibbles.view(len(q), -1, 8, 4) << shifts
    # nibbles do not overlap: the sum is the word, also where its sign bit is set
    return placed.sum(dim=2, dtype=torch.int32).view(len(q), -1)


def _widened(kind: str, raw: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    if kind in _DENSE:
        return raw.view(_DENSE[kind]).view(rows, columns).float()
    if kind == "int8":
        q = raw.view(torch.int8).view(rows, -1, GROUP).float()
        return (q * scales.view(torch.float16).view(rows, -1, 1).float()).view(rows, columns)
    words = raw.view(torch.int32).view(rows, -1, 1, 4)
    shifts = torch.arange(0, 32, 4, device=raw.device, dtype=torch.int32)[:, None]
    q = ((words >> shifts) & 15).reshape(rows, -1, GROUP).float()
    pair = scales.view(torch.float16).view(rows, -1, 2).float()
    return (q * pair[..., :1] + pair[..., 1:]).view(rows, columns)
