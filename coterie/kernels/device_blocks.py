"""GGUF's blocks in a device's memory: each row of a matrix is planes of bytes, one behind another.

- words: int4's, see `device_record`: word i of a group of 32 columns has column 4 * j + i in its
  nibble j;
- high bits: for each word a byte (the fifth bits, column 4 * j + i at bit j) or two bytes (two bits
  of a column at bit 2 * j);
- scales: by group of 32 columns;
- factors: by 256 columns, where the scales are integers of a byte.

All bits of the file are kept, and values are computed in fp32: a product of a factor, a scale and
an integer has at most 23 bits, so that the only rounding is the file's own, of the minimum's sum.
Beside the file's bytes, six-bit scales take a byte, and rows are padded to 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.weights.formats.gguf_blocks import BLOCK_SIZES, NotFinite, halves, parts
from coterie.weights.kinds import BLOCK_KINDS, GROUP
from coterie.weights.quantize import GgufBlocks

# rows are aligned to the widest load
_ALIGNMENT = 16
# columns that share a factor
FACTOR_COLUMNS = 256
# rows are packed in slices of about this many elements, to limit temporary memory
_SLICE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What the planes of a kind have."""

    bits: int
    # subtracted from each integer
    offset: int
    # of 32 columns. 2: fp16, or with factors two bytes; 4: fp16 scale and minimum
    scale_bytes: int
    # of 256 columns. 0: none; 2: fp16 d, for signed scales of 16 columns each; 4: fp16 d and -dmin,
    # for a scale and a minimum
    factor_bytes: int

    def high_at(self, width: int) -> int:
        return width // 2

    def scales_at(self, width: int) -> int:
        return self.high_at(width) + width // 8 * (self.bits - 4)

    def factors_at(self, width: int) -> int:
        return self.scales_at(width) + width // GROUP * self.scale_bytes

    def row_bytes(self, width: int) -> int:
        used = self.factors_at(width) + width // FACTOR_COLUMNS * self.factor_bytes
        return -(-used // _ALIGNMENT) * _ALIGNMENT


FORMS = {
    "q5_0": BlockForm(5, 16, 2, 0),
    "q5_1": BlockForm(5, 0, 4, 0),
    "q4_k": BlockForm(4, 0, 2, 4),
    "q5_k": BlockForm(5, 0, 2, 4),
    "q6_k": BlockForm(6, 32, 2, 2),
}
assert tuple(FORMS) == BLOCK_KINDS


def block_rows(weight: GgufBlocks, device: torch.device | str) -> Tensor:
    """int32 [rows, row_bytes / 4] on the device, where the bits are put in order."""
    count, width = weight.shape
    form = FORMS[weight.kind]
    out = torch.zeros((count, form.row_bytes(width)), dtype=torch.uint8, device=device)
    step = max(1, _SLICE_ELEMENTS // width)
    for first in range(0, count, step):
        _pack(weight.kind, weight.data[first : first + step].to(device), out[first : first + step])
    return out.view(torch.int32)


def block_values(kind: str, rows: Tensor, width: int) -> Tensor:
    """fp32 [rows, width] of packed rows: the plain twin of what the kernels compute with."""
    form, raw = FORMS[kind], rows.view(torch.uint8)
    count, groups = len(raw), width // GROUP
    shifts = torch.arange(8, device=raw.device, dtype=torch.int32)[:, None]
    q = (_plane(raw, 0, width // 2, torch.int32).view(count, groups, 1, 4) >> (4 * shifts)) & 15
    if form.bits > 4:
        bits = form.bits - 4
        taken = torch.uint8 if bits == 1 else torch.int16
        high = _plane(raw, form.high_at(width), width // 8 * bits, taken).int()
        q = q | (((high.view(count, groups, 1, 4) >> (bits * shifts)) & (2**bits - 1)) << 4)
    values = (q.float() - form.offset).reshape(count, groups, GROUP)
    at, nbytes = form.scales_at(width), groups * form.scale_bytes
    if not form.factor_bytes:
        scales = _plane(raw, at, nbytes, torch.float16).float().view(count, groups, -1)
        values = values * scales[..., :1]
        return (values + scales[..., 1:] if form.scale_bytes == 4 else values).flatten(1)
    taken = torch.int8 if form.factor_bytes == 2 else torch.uint8
    scales = _plane(raw, at, nbytes, taken).float().view(count, -1, 8, 2)
    factor_bytes = width // FACTOR_COLUMNS * form.factor_bytes
    factors = _plane(raw, form.factors_at(width), factor_bytes, torch.float16).float()
    scales = (scales * factors.view(count, scales.shape[1], 1, -1)).view(count, groups, 2, 1)
    if form.factor_bytes == 2:
        return (values.view(count, groups, 2, 16) * scales).flatten(1)
    return (values * scales[:, :, 0] + scales[:, :, 1]).flatten(1)


def _pack(kind: str, data: Tensor, out: Tensor) -> None:
    form, (elements, nbytes) = FORMS[kind], BLOCK_SIZES[kind.upper()]
    count, width = len(data), data.shape[1] // nbytes * elements
    q, head = parts(data.view(-1, nbytes), kind.upper())
    factors = 4 if form.factor_bytes == 4 or form.scale_bytes == 4 else 2
    if not bool(torch.isfinite(halves(head[:, :factors].reshape(len(head), -1, 2))).all()):
        raise NotFinite
    # column 4 * j + i -> [j, i]
    q = q.view(count, width // GROUP, 8, 4).int()
    shifts = torch.arange(8, device=q.device, dtype=torch.int32)[:, None]
    # bits do not overlap: the sum is the word, also where its sign bit is set
    planes = [((q & 15) << (4 * shifts)).sum(2, dtype=torch.int32)]
    if form.bits > 4:
        bits = form.bits - 4
        high = ((q >> 4) << (bits * shifts)).sum(2, dtype=torch.int32)
        planes.append(high.to(torch.uint8 if bits == 1 else torch.int16))
    if form.factor_bytes:
        scales = head[:, factors:]
        if factors == 4:
            scales = scales.view(-1, 2, 8).transpose(1, 2)
        planes += [scales, head[:, :factors]]
    else:
        planes.append(head)
    raw = [plane.reshape(count, -1).contiguous().view(torch.uint8) for plane in planes]
    joined = torch.cat(raw, dim=1)
    out[:, : joined.shape[1]] = joined


def _plane(raw: Tensor, at: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return raw[:, at : at + nbytes].contiguous().view(dtype)
