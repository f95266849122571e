"""Packs experts into records and unpacks them: the bytes of `expert_layout`, from weights and back.

Packing is native where possible; the torch version gives the same bytes. Every process writes int8
with its own offset (`weight_offset`); `rebias` converts a record from one offset to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.errors import InternalError
from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import native
from coterie.kernels.expert_layout import GROUP, PANEL, ExpertLayout, PartPlace
from coterie.weights.quantize import (
    DTYPES,
    DenseWeight,
    GgufBlocks,
    Int4Weight,
    Int8Weight,
    Weight,
    convert,
    dense,
)

# int8 and int4: bytes of q, then fp16 scales (and minima) of one group of one panel
_Q_BYTES = {"int8": 512, "int4": 256}
# bytes of one group of one panel
_GROUP_BYTES = {"int8": 544, "int4": 320}
_DENSE = {"fp32": (torch.float32, 4), "bf16": (torch.bfloat16, 32)}

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
            part.view(-1, _GROUP_BYTES["int8"])[:, : _Q_BYTES["int8"]].bitwise_xor_(128)


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
    if isinstance(weight, GgufBlocks):
        out.copy_(weight.data.reshape(-1))
    elif not _write_native(place, weight, out):
        write_panels(place, weight, out)


def _kind(weight: Weight) -> str:
    match weight:
        case Int8Weight():
            return "int8"
        case Int4Weight():
            return "int4"
        case GgufBlocks(kind):
            return kind
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
        stored,  # cpu is importable only with the rest of the module
    )

    kind, *tensors = stored(weight)
    pointers = [0 if part is None else part.data_ptr() for part in tensors]
    # one thread: the caller is already one of several load threads
    library.call.ct_pack(kind, place.rows, place.columns, *pointers, out.data_ptr(), 1)
    return True


def write_panels(place: PartPlace, weight: Weight, out: Tensor) -> None:
    """The same as `ct_pack`, in torch."""
    if isinstance(weight, DenseWeight):
        dtype, step = _DENSE[place.kind]
        values = _padded(weight.tensor.to(dtype), step)
        inner = 2 if place.kind == "bf16" else 1
        panels = values.view(-1, PANEL, values.shape[1] // inner, inner).transpose(1, 2)
        out.view(dtype).view(panels.shape).copy_(panels)
        return
    if isinstance(weight, GgufBlocks):
        raise InternalError("blocks are copied, not packed")
    groups = place.columns // GROUP
    records = out.view(-1, groups, _GROUP_BYTES[place.kind])
    size = _Q_BYTES[place.kind]
    q = _padded(weight.q, 1).view(torch.uint8)
    if isinstance(weight, Int8Weight):
        q = q + weight_offset()
    q = q.view(-1, PANEL, groups, size // 64, 4).permute(0, 2, 3, 1, 4)
    records[..., :size].view(q.shape).copy_(q)
    tails = (weight.scale,) if isinstance(weight, Int8Weight) else (weight.scale, weight.minimum)
    for index, tail in enumerate(tails):
        at = size + 2 * PANEL * index
        halves = _padded(tail.half(), 1).view(-1, PANEL, groups).transpose(1, 2)
        records[..., at : at + 2 * PANEL].copy_(halves.contiguous().view(torch.uint8))


def _padded(values: Tensor, step: int) -> Tensor:
    """Pad rows to whole panels and columns to a multiple of `step`, with zeros."""
    rows, columns = values.shape
    return functional.pad(values, (0, -columns % step, 0, -rows % PANEL)).contiguous()


def read_part(place: PartPlace, raw: Tensor) -> Weight | Tensor:
    """One part of a record, whose bytes are `raw`."""
    if place.columns == 0:
        return raw.view(torch.float32)
    if place.kind in _DENSE:
        return DenseWeight(_read_dense(place, raw))
    if place.kind not in _Q_BYTES:
        return GgufBlocks(place.kind, raw.view(place.rows, -1))
    groups, size = place.columns // GROUP, _Q_BYTES[place.kind]
    records = raw.view(-1, groups, _GROUP_BYTES[place.kind])
    q = records[..., :size].reshape(-1, groups, size // 64, PANEL, 4).permute(0, 3, 1, 2, 4)
    q = q.reshape(-1, place.columns * size // 512)[: place.rows]
    scale = _read_halves(place, records, size)
    if place.kind == "int8":
        return Int8Weight((q - weight_offset()).view(torch.int8), scale)
    return Int4Weight(q, scale, _read_halves(place, records, size + 2 * PANEL))


def _read_dense(place: PartPlace, raw: Tensor) -> Tensor:
    dtype, step = _DENSE[place.kind]
    inner = 2 if place.kind == "bf16" else 1
    width = -(-place.columns // step) * step
    panels = raw.view(dtype).view(-1, width // inner, PANEL, inner).transpose(1, 2)
    return panels.reshape(-1, width)[: place.rows, : place.columns]


def _read_halves(place: PartPlace, records: Tensor, at: int) -> Tensor:
    halves = records[..., at : at + 2 * PANEL].contiguous().view(torch.float16)
    return halves.transpose(1, 2).reshape(-1, records.shape[1])[: place.rows]


def dense_parts(layout: ExpertLayout, record: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every part widened (or rounded) to `dtype`, on the record's device."""
    return {
        name: part.to(dtype) if isinstance(part, Tensor) else dense(part, dtype)
        for name, part in unpack_record(layout, record).items()
    }


_KINDS = {"int8": abi.KIND_INT8, "int4": abi.KIND_INT4}


def rounded(weight: Weight, dtype: str, threads: int = 1) -> Weight:
    """`convert(weight, dtype)`, fast for dense matrices on the CPU."""
    kind, library = _KINDS.get(dtype), native()
    if kind is None or library is None or not isinstance(weight, DenseWeight):
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
        kind,
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
