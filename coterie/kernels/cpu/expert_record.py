"""Packs experts into records and unpacks them: the bytes of `expert_layout`, from weights and back.

Packing is native where possible; the torch version gives the same bytes. Every process writes int8
with its own offset (`weight_offset`); `rebias` converts a record from one offset to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.errors import InternalError
from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import native
from coterie.kernels.expert_layout import ExpertLayout, PartPlace
from coterie.weights.formats.gguf_blocks import NotFinite, NotHeld, reordered, restored
from coterie.weights.kinds import BLOCK_KINDS, GROUP, KINDS, PANEL
from coterie.weights.quantize import (
    DTYPES,
    DenseWeight,
    GgufBlocks,
    Int4Weight,
    Int8Weight,
    Weight,
    convert,
    dense,
    split,
)

_DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}
# of int8 and int4: bytes of q in a group of one row
_Q_BYTES = {"int8": 32, "int4": 16}

Parts = Mapping[str, "Weight | Tensor"]


@cache
def weight_offset() -> int:
    """The offset that the kernels of this process add to int8 weights: 128 or 0."""
    library = native()
    return 0 if library is None else int(library.call.ct_weight_offset())


def pack_record(layout: ExpertLayout, parts: Parts, out: Tensor) -> None:
    """Fill out[: layout.nbytes] (uint8, contiguous). Biases are tensors, the rest weights; a weight
    of another precision than the layout's is converted."""
    end = 0
    for place in layout.parts():
        _zero(out, end, place.offset)
        end = place.offset + place.nbytes
        _write(place, parts[place.name], out[place.offset : end])
    _zero(out, end, layout.nbytes)


def unpack_record(layout: ExpertLayout, record: Tensor) -> dict[str, Weight | Tensor]:
    """The parts that `pack_record` packed, on the record's device."""
    return {
        place.name: read_part(place, record[place.offset : place.offset + place.nbytes])
        for place in layout.parts()
    }


def rebias(layout: ExpertLayout, record: Tensor) -> None:
    """Move int8 weights from offset 0 to 128 or back, in place."""
    for place in layout.parts():
        if place.kind == "int8":
            part = record[place.offset : place.offset + place.nbytes]
            group = part.view(-1, PANEL * KINDS["int8"].block_bytes)
            group[:, : PANEL * _Q_BYTES["int8"]].bitwise_xor_(128)


def _zero(out: Tensor, begin: int, end: int) -> None:
    if end > begin:
        out[begin:end].zero_()


def _write(place: PartPlace, value: Weight | Tensor, out: Tensor) -> None:
    if isinstance(value, Tensor):
        _expect(place, tuple(value.shape) == (place.rows,) and place.columns == 0)
        out.view(torch.float32).copy_(value)
        return
    _expect(place, value.shape == (place.rows, place.columns))
    weight = rounded(value, place.kind) if place.kind in DTYPES else value
    _expect(place, _kind(weight) == place.kind)
    if not _write_native(place, weight, out):
        write_panels(place, weight, out)


def _kind(weight: Weight) -> str:
    match weight:
        case Int8Weight():
            return "int8"
        case Int4Weight():
            return "int4"
        case GgufBlocks():
            return weight.kind
    return "bf16" if weight.tensor.dtype == torch.bfloat16 else "fp32"


def _expect(place: PartPlace, ok: bool) -> None:
    if not ok:
        raise InternalError(
            f"{place.name} does not fit its place: {place.kind} [{place.rows}, {place.columns}]"
        )


def _write_native(place: PartPlace, weight: Weight, out: Tensor) -> bool:
    library = native() if out.device.type == "cpu" else None
    if library is None:
        return False
    from coterie.kernels.cpu.layers import (
        packing_source,  # cpu is importable only with the rest of the module
    )

    # one thread: the caller is already one of several load threads
    status = packing_source(weight).pack(library.call, place.rows, place.columns, out, 1)
    if status == abi.NOT_HELD:
        raise NotHeld(place.name)
    if status == abi.NOT_FINITE:
        raise NotFinite(f"{place.name}: ")
    return True


def write_panels(place: PartPlace, weight: Weight, out: Tensor) -> None:
    """The same as `ct_pack`, in torch."""
    kind = KINDS[place.kind]
    rows = _row_blocks(place, weight)
    rows = functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % PANEL))
    # [panels, blocks, row, bytes of a block] -> item by item
    panels = rows.view(-1, PANEL, *rows.shape[1:]).transpose(1, 2)
    target, at = out.view(*panels.shape[:2], PANEL * kind.block_bytes), 0
    for item in kind.items:
        target[..., PANEL * at : PANEL * (at + item)] = panels[..., at : at + item].flatten(2)
        at += item


def _row_blocks(place: PartPlace, weight: Weight) -> Tensor:
    """uint8 [rows, blocks of a row, bytes of one], in the order of `MatrixKind.items`."""
    blocks = -(-place.columns // KINDS[place.kind].columns)
    if isinstance(weight, DenseWeight):
        width = blocks * KINDS[place.kind].columns
        values = functional.pad(
            weight.tensor.to(_DENSE[place.kind]), (0, width - place.columns)
        ).contiguous()
        return values.view(torch.uint8).view(place.rows, blocks, -1)
    weight = split(weight)
    if isinstance(weight, DenseWeight):
        raise NotHeld(place.name)
    if isinstance(weight, GgufBlocks):
        data = weight.data.reshape(place.rows * blocks, -1)
        return reordered(data, weight.type).view(place.rows, blocks, -1)
    q = weight.q.contiguous().view(torch.uint8)
    if isinstance(weight, Int8Weight):
        q = q + weight_offset()
    tails = (weight.scale,) if isinstance(weight, Int8Weight) else (weight.scale, weight.minimum)
    halves = [part.half().contiguous().view(torch.uint8) for part in tails]
    return torch.cat([part.view(place.rows, blocks, -1) for part in (q, *halves)], dim=2)


def read_part(place: PartPlace, raw: Tensor) -> Weight | Tensor:
    """One part of a record, whose bytes are `raw`."""
    if place.columns == 0:
        return raw.view(torch.float32)
    rows = _read_row_blocks(place, raw)
    if place.kind in _DENSE:
        values = rows.flatten(1).view(_DENSE[place.kind])
        return DenseWeight(values[:, : place.columns].contiguous())
    if place.kind in BLOCK_KINDS:
        data = restored(rows.flatten(0, 1), place.kind.upper())
        return GgufBlocks(place.kind.upper(), data.view(place.rows, -1))
    size = _Q_BYTES[place.kind]
    q, *halves = torch.split(rows, [size] + [2] * ((rows.shape[2] - size) // 2), dim=2)
    scale, *minima = (part.contiguous().view(torch.float16).squeeze(-1) for part in halves)
    if place.kind == "int8":
        return Int8Weight((q.flatten(1) - weight_offset()).view(torch.int8), scale)
    return Int4Weight(q.flatten(1), scale, minima[0])


def _read_row_blocks(place: PartPlace, raw: Tensor) -> Tensor:
    """The inverse of `write_panels`, down to `_row_blocks`."""
    kind = KINDS[place.kind]
    blocks = -(-place.columns // kind.columns)
    panels = raw.view(-1, blocks, PANEL * kind.block_bytes)
    sizes = [PANEL * item for item in kind.items]
    items = [part.view(*panels.shape[:2], PANEL, -1) for part in _split(panels, sizes)]
    rows = torch.cat(items, dim=3).transpose(1, 2).reshape(-1, blocks, kind.block_bytes)
    return rows[: place.rows]


def _split(panels: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [part.contiguous() for part in torch.split(panels, list(sizes), dim=2)]


def dense_parts(layout: ExpertLayout, record: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every part widened (or rounded) to `dtype`, on the record's device."""
    return {
        name: part.to(dtype) if isinstance(part, Tensor) else dense(part, dtype)
        for name, part in unpack_record(layout, record).items()
    }


def rounded(weight: Weight, dtype: str, threads: int = 1) -> Weight:
    """`convert(weight, dtype)`, fast for dense matrices on the CPU."""
    library = native() if dtype in _Q_BYTES else None
    if library is None or not isinstance(weight, DenseWeight):
        return convert(weight, dtype)
    tensor = weight.tensor
    groupable = tensor.ndim == 2 and tensor.shape[1] % GROUP == 0 and tensor.numel() > 0
    if not groupable or tensor.device.type != "cpu":
        return convert(weight, dtype)
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        tensor = tensor.float()
    tensor = tensor.contiguous()
    rows, columns = tensor.shape
    scale = torch.empty(rows, columns // GROUP, dtype=torch.float16)
    minimum = torch.empty_like(scale) if dtype == "int4" else scale
    q = torch.empty(rows, columns // 2 if dtype == "int4" else columns, dtype=torch.uint8)
    library.call.ct_quantise(
        abi.KINDS[dtype],
        tensor.numel() // GROUP,
        tensor.data_ptr(),
        tensor.dtype == torch.bfloat16,
        q.data_ptr(),
        scale.data_ptr(),
        minimum.data_ptr(),
        threads,
    )
    return (
        Int4Weight(q, scale, minimum) if dtype == "int4" else Int8Weight(q.view(torch.int8), scale)
    )
