"""GGUF's block types: their values, bit for bit ggml's, and their bits in the order of a panel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.weights.formats.gguf import TENSOR_TYPES

# type -> elements and bytes of one block
BLOCK_SIZES = {name: (elements, nbytes) for name, elements, nbytes in TENSOR_TYPES.values()}

# rows are expanded in slices of about this many elements, to limit temporary memory
_SLICE_ELEMENTS = 1 << 22


# of the higher byte of fp16: all bits are set in numbers that are not finite
_EXPONENT = 0x7C

# where a block has fp16 factors
_FACTORS_AT = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}


class NotFinite(WeightsError):
    def __init__(self, where: str = "") -> None:
        super().__init__(f"{where}a scale is not a finite number: damaged. Fetch the file again.")


class NotHeld(WeightsError):
    """Scales of Q4_0 so large that int4 has no minimum for them."""

    def __init__(self, part: str = "") -> None:
        super().__init__(f"{part}: a scale is too large for int4. Use --dtype fp32 or bf16.")
        self.part = part


def expand(blocks: Tensor, kind: str) -> Tensor:
    """uint8 [rows, blocks per row, bytes per block] -> fp32 [rows, elements], any block type."""
    rows, per_row, _ = blocks.shape
    elements, _ = BLOCK_SIZES[kind]
    out = torch.empty(rows, per_row * elements, dtype=torch.float32, device=blocks.device)
    step = max(1, _SLICE_ELEMENTS // out.shape[1])
    for first in range(0, rows, step):
        part = blocks[first : first + step]
        flat = part.reshape(-1, part.shape[-1])
        out[first : first + step] = _EXPANDERS[kind](flat).view(part.shape[0], -1)
    return out


def check_factors(blocks: Tensor, kind: str) -> None:
    """Raises NotFinite unless every fp16 factor of [rows, blocks per row, bytes per block], on the
    CPU, is finite. Reads one byte of each."""
    for at in _FACTORS_AT[kind]:
        highest = blocks.numpy()[..., at + 1]
        if ((highest & _EXPONENT) == _EXPONENT).any():
            raise NotFinite


def scales(raw: Tensor) -> Tensor:
    """As `halves`, of values that must be finite."""
    values = halves(raw)
    if not bool(torch.isfinite(values).all()):
        raise NotFinite
    return values


def halves(raw: Tensor) -> Tensor:
    """uint8 [..., 2] -> fp16 [...]."""
    return raw.contiguous().view(torch.float16).squeeze(-1)


# Expanders: uint8 [n, bytes per block] -> fp32 [n, elements per block]. The order of operations is
# ggml's, so that results agree bit for bit.


def _factor(blocks: Tensor, at: int) -> Tensor:
    return halves(blocks[:, at : at + 2]).float().unsqueeze(-1)


def _low_high(packed: Tensor) -> Tensor:
    """[..., k] bytes -> [..., 2k] nibbles: the low ones of all bytes, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """[n, k] bytes -> [n, 8k] bits, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


# Integers: uint8 [n, bytes per block] -> uint8 [n, groups, 32] of columns in order, and back into
# the places of a block.


def _read_q4_k(blocks: Tensor) -> Tensor:
    return _low_high(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)


def _write_q4_k(q: Tensor, blocks: Tensor) -> None:
    blocks[:, 16:] = (q[:, 0::2] | (q[:, 1::2] << 4)).flatten(1)


def _read_q5_k(blocks: Tensor) -> Tensor:
    low = _low_high(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = (blocks[:, 16:48].unsqueeze(1) >> _shifts(8, blocks).view(8, 1)) & 1
    return low | (high << 4)


def _write_q5_k(q: Tensor, blocks: Tensor) -> None:
    low, high = q & 15, (q >> 4).transpose(1, 2)
    blocks[:, 16:48] = _or(high << _shifts(8, q))
    blocks[:, 48:] = (low[:, 0::2] | (low[:, 1::2] << 4)).flatten(1)


def _read_q6_k(blocks: Tensor) -> Tensor:
    low = _low_high(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> (2 * _shifts(4, blocks)).view(4, 1)
    return low | ((high & 3).view(-1, 8, 32) << 4)


def _write_q6_k(q: Tensor, blocks: Tensor) -> None:
    low, high = (q & 15).view(-1, 2, 2, 64), (q >> 4).view(-1, 2, 4, 32).transpose(2, 3)
    blocks[:, :128] = (low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1)
    blocks[:, 128:192] = _or(high << (2 * _shifts(4, q))).flatten(1)


def _shifts(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


def _or(parts: Tensor) -> Tensor:
    """Along the last axis, of values that share no bit."""
    return parts.sum(-1, dtype=torch.uint8)


def _pairs(nibbles: Tensor) -> Tensor:
    """[..., 32] nibbles -> [..., 16] bytes: column i low, column i + 16 high."""
    return nibbles[..., :16] | (nibbles[..., 16:] << 4)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes hold eight 6-bit scales and eight 6-bit minima: [n, 12] -> two [n, 8]."""
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([scale & 63, (rest & 15) | ((scale >> 2) & 48)], dim=1)
    minima = torch.cat([minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)], dim=1)
    return scales, minima


def _packed_k_scales(scales: Tensor, minima: Tensor) -> Tensor:
    high = [part[:, :4] | ((part[:, 4:] >> 4) << 6) for part in (scales, minima)]
    return torch.cat([*high, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], dim=1)


def _expand_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _factor(blocks, 0)


def _expand_q4_0(blocks: Tensor) -> Tensor:
    return _factor(blocks, 0) * (_low_high(blocks[:, 2:]).float() - 8)


def _expand_q4_1(blocks: Tensor) -> Tensor:
    return _factor(blocks, 0) * _low_high(blocks[:, 4:]).float() + _factor(blocks, 2)


def _expand_q5_0(blocks: Tensor) -> Tensor:
    return _factor(blocks, 0) * (_BLOCKS["Q5_0"].read(blocks).flatten(1).float() - 16)


def _expand_q5_1(blocks: Tensor) -> Tensor:
    q = _BLOCKS["Q5_1"].read(blocks).flatten(1).float()
    return _factor(blocks, 0) * q + _factor(blocks, 2)


def _k_affine(blocks: Tensor, q: Tensor) -> Tensor:
    """q [n, 8, 32] -> values [n, 256]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_factor(blocks, 0) * scales.float()).unsqueeze(-1)
    minimum = (_factor(blocks, 2) * minima.float()).unsqueeze(-1)
    return (scale * q.float() - minimum).flatten(1)


def _expand_q4_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _read_q4_k(blocks))


def _expand_q5_k(blocks: Tensor) -> Tensor:
    return _k_affine(blocks, _read_q5_k(blocks))


def _expand_q6_k(blocks: Tensor) -> Tensor:
    q = _read_q6_k(blocks).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    scale = (_factor(blocks, 208) * scales).unsqueeze(-1)
    return (scale * q.reshape(-1, 16, 16)).flatten(1)


_EXPANDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _expand_q4_0,
    "Q4_1": _expand_q4_1,
    "Q5_0": _expand_q5_0,
    "Q5_1": _expand_q5_1,
    "Q8_0": _expand_q8_0,
    "Q4_K": _expand_q4_k,
    "Q5_K": _expand_q5_k,
    "Q6_K": _expand_q6_k,
}


@dataclass(frozen=True, slots=True)
class _Block:
    """The parts of a block: integers of `bits` bits, and the rest, its head, in a panel's order."""

    bits: int
    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], None]
    read_head: Callable[[Tensor], Tensor]
    write_head: Callable[[Tensor, Tensor], None]
    head_bytes: int
    # a panel has the head behind the integers
    is_tail: bool = False


def _q5(head_bytes: int) -> _Block:
    """Factors, fifth bits in four bytes, then sixteen bytes of nibbles."""
    at = head_bytes

    def read(blocks: Tensor) -> Tensor:
        q = _low_high(blocks[:, at + 4 :]) | (_bits(blocks[:, at : at + 4]) << 4)
        return q.unsqueeze(1)

    def write(q: Tensor, blocks: Tensor) -> None:
        blocks[:, at : at + 4] = _or((q >> 4).view(-1, 4, 8) << _shifts(8, q))
        blocks[:, at + 4 :] = _pairs(q & 15).squeeze(1)

    def write_head(head: Tensor, blocks: Tensor) -> None:
        blocks[:, :at] = head

    return _Block(5, read, write, lambda blocks: blocks[:, :at], write_head, at, is_tail=True)


def _read_k_head(blocks: Tensor) -> Tensor:
    return torch.cat([_negated(blocks[:, :4]), *_k_scales(blocks[:, 4:16])], dim=1)


def _write_k_head(head: Tensor, blocks: Tensor) -> None:
    blocks[:, :4] = _negated(head[:, :4])
    blocks[:, 4:16] = _packed_k_scales(head[:, 4:12], head[:, 12:20])


def _negated(factors: Tensor) -> Tensor:
    """d and dmin -> d and -dmin, or back."""
    return factors ^ torch.tensor([0, 0, 0, 0x80], dtype=torch.uint8, device=factors.device)


def _read_q6_k_head(blocks: Tensor) -> Tensor:
    return torch.cat([blocks[:, 208:], blocks[:, 192:208]], dim=1)


def _write_q6_k_head(head: Tensor, blocks: Tensor) -> None:
    blocks[:, 208:], blocks[:, 192:208] = head[:, :2], head[:, 2:]


_BLOCKS = {
    "Q5_0": _q5(2),
    "Q5_1": _q5(4),
    "Q4_K": _Block(4, _read_q4_k, _write_q4_k, _read_k_head, _write_k_head, 20),
    "Q5_K": _Block(5, _read_q5_k, _write_q5_k, _read_k_head, _write_k_head, 20),
    "Q6_K": _Block(6, _read_q6_k, _write_q6_k, _read_q6_k_head, _write_q6_k_head, 18),
}


def parts(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """uint8 [n, bytes per block] -> the integers uint8 [n, groups, 32] of columns in order, and the
    rest [n, bytes] as `reordered` has it: fp16 factors (minima are added), then scales and minima
    of a byte."""
    block = _BLOCKS[kind]
    return block.read(blocks), block.read_head(blocks)


def reordered(blocks: Tensor, kind: str) -> Tensor:
    """uint8 [n, bytes per block] -> the same bits in the order in which a panel has a row's items
    (weights/kinds.py)."""
    block = _BLOCKS[kind]
    q, head = block.read(blocks), block.read_head(blocks)
    nibbles, high = _pairs(q & 15), q >> 4
    if block.bits == 5:
        planes = [_or(high.view(*q.shape[:2], 8, 4).transpose(2, 3) << _shifts(8, q))]
    elif block.bits == 6:
        halves = high.view(*q.shape[:2], 2, 4, 4).transpose(3, 4)
        planes = [_or(halves << (2 * _shifts(4, q))).flatten(2)]
    else:
        planes = []
    groups = torch.cat([nibbles, *planes], dim=2).flatten(1)
    return torch.cat([groups, head] if block.is_tail else [head, groups], dim=1)


def restored(rows: Tensor, kind: str) -> Tensor:
    """The inverse of `reordered`."""
    block, (elements, nbytes) = _BLOCKS[kind], BLOCK_SIZES[kind]
    width = rows.shape[1] - block.head_bytes
    groups, head = (
        (rows[:, :width], rows[:, width:])
        if block.is_tail
        else (rows[:, block.head_bytes :], rows[:, : block.head_bytes])
    )
    groups = groups.reshape(len(rows), elements // 32, -1)
    q, planes = _low_high(groups[..., :16]), groups[..., 16:]
    if block.bits == 5:
        bits = (planes.unsqueeze(2) >> _shifts(8, q).view(8, 1)) & 1
        q = q | (bits.flatten(2) << 4)
    elif block.bits == 6:
        halves = planes.view(*q.shape[:2], 2, 1, 4)
        q = q | (((halves >> (2 * _shifts(4, q)).view(4, 1)) & 3).flatten(2) << 4)
    out = torch.empty(len(rows), nbytes, dtype=torch.uint8, device=rows.device)
    block.write(q, out)
    block.write_head(head, out)
    return out
