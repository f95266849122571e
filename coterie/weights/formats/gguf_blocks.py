"""GGUF's block types: expands each quantised block to fp32, bit for bit as ggml does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.weights.formats.gguf import TENSOR_TYPES

# type -> elements and bytes of one block
BLOCK_SIZES = {name: (elements, nbytes) for name, elements, nbytes in TENSOR_TYPES.values()}

# rows are expanded in slices of about this many elements, to limit temporary memory
_SLICE_ELEMENTS = 1 << 22


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


def _expand_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _factor(blocks, 0)


def _expand_q4_0(blocks: Tensor) -> Tensor:
    return _factor(blocks, 0) * (_low_high(blocks[:, 2:]).float() - 8)


def _expand_q4_1(blocks: Tensor) -> Tensor:
    return _factor(blocks, 0) * _low_high(blocks[:, 4:]).float() + _factor(blocks, 2)


def _expand_q5_0(blocks: Tensor) -> Tensor:
    q = _low_high(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return _factor(blocks, 0) * (q.float() - 16)


def _expand_q5_1(blocks: Tensor) -> Tensor:
    q = _low_high(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return _factor(blocks, 0) * q.float() + _factor(blocks, 2)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes hold eight 6-bit scales and eight 6-bit minima: [n, 12] -> two fp32 [n, 8]."""
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([scale & 63, (rest & 15) | ((scale >> 2) & 48)], dim=1)
    minima = torch.cat([minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)], dim=1)
    return scales.float(), minima.float()


def _k_affine(blocks: Tensor, q: Tensor) -> Tensor:
    """q [n, 8, 32] -> values [n, 256]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_factor(blocks, 0) * scales).unsqueeze(-1)
    minimum = (_factor(blocks, 2) * minima).unsqueeze(-1)
    return (scale * q.float() - minimum).flatten(1)


def _expand_q4_k(blocks: Tensor) -> Tensor:
    q = _low_high(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _k_affine(blocks, q)


def _expand_q5_k(blocks: Tensor) -> Tensor:
    low = _low_high(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _k_affine(blocks, low | (high << 4))


def _expand_q6_k(blocks: Tensor) -> Tensor:
    low = _low_high(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    q = (low | (high << 4)).float() - 32
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
