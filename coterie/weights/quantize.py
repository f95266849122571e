"""Weights as stored, and conversion from one precision to another.

Defines a weight's parts (dense; int8 and int4: groups of 32 along a row; GGUF's other blocks as
stored) and converts between them. A weight that already has the requested bits or fewer is not
rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.weights.formats.gguf_blocks import BLOCK_SIZES, expand, scales
from coterie.weights.kinds import GROUP, KEPT_AS, SPLIT_TYPES

DTYPES = ("auto", "fp32", "bf16", "int8", "int4")

# rows are quantised in slices of about this many elements, to limit temporary memory
_SLICE_ELEMENTS = 1 << 22

# iterations of least squares for an int4 group; after four the error hardly falls
_REFINEMENTS = 4


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """tensor: [N, K] or [K]; fp32, bf16 or fp16."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """w = q * scale. q: int8 [N, K]; scale: fp16 [N, K/32]."""

    q: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """w = q * scale + minimum, q in 0..15. scale, minimum: fp16 [N, K/32].

    q: uint8 [N, K/2]. Byte j of a group's 16 holds element j in its low and element j + 16 in its
    high nibble, the order of GGUF's Q4 blocks.
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.q.shape[0], self.q.shape[1] * 2)

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes + self.minimum.nbytes


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Blocks of a GGUF file as stored. `type`: one of BLOCK_SIZES; data: uint8 [N, bytes of a
    row]."""

    type: str
    data: Tensor

    @property
    def kind(self) -> str:
        """The kind of matrix that keeps them."""
        return KEPT_AS[self.type]

    @property
    def shape(self) -> tuple[int, ...]:
        elements, nbytes = BLOCK_SIZES[self.type]
        return (self.data.shape[0], self.data.shape[1] // nbytes * elements)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def blocks(self) -> Tensor:
        """[N, blocks of a row, bytes of a block]."""
        return self.data.view(self.data.shape[0], -1, BLOCK_SIZES[self.type][1])


Weight = DenseWeight | Int8Weight | Int4Weight | GgufBlocks


def dense(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values, computed in fp32 and then rounded to `dtype` (the stored tensor if it already has
    it)."""
    if isinstance(weight, DenseWeight):
        return weight.tensor.to(dtype)
    rows, columns = weight.shape
    if isinstance(weight, GgufBlocks):
        return expand(weight.blocks(), weight.type).to(dtype)
    groups = columns // GROUP
    scale = weight.scale.float().unsqueeze(-1)
    if isinstance(weight, Int8Weight):
        values = weight.q.view(rows, groups, GROUP).float() * scale
    else:
        values = _nibbles(weight.q, groups).float() * scale
        values += weight.minimum.float().unsqueeze(-1)
    return values.view(rows, columns).to(dtype)


def convert(weight: Weight, dtype: str) -> Weight:
    """`weight` in the requested precision.

    auto: as stored (fp16 becomes fp32, which holds it exactly). fp32, bf16: dense. int8, int4:
    matrices are rounded, except that int8 and int4 stay as they are, and so do vectors and rows
    whose length is not a multiple of 32.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    if dtype == "fp32":
        return DenseWeight(dense(weight))
    if dtype == "bf16":
        return DenseWeight(dense(weight, torch.bfloat16))
    if isinstance(weight, GgufBlocks) and dtype != "auto" and weight.type not in SPLIT_TYPES:
        weight = DenseWeight(dense(weight))
    if not isinstance(weight, DenseWeight):
        return weight
    tensor = weight.tensor
    groupable = tensor.ndim == 2 and tensor.shape[1] % GROUP == 0 and tensor.numel() > 0
    if dtype == "auto" or not groupable:
        return DenseWeight(tensor.float()) if tensor.dtype == torch.float16 else weight
    return quantize_int8(tensor) if dtype == "int8" else quantize_int4(tensor)


def split(weight: Weight) -> Weight:
    """Blocks of SPLIT_TYPES as their parts; fp32 where the parts cannot hold them. Others stay."""
    if not isinstance(weight, GgufBlocks) or weight.type not in SPLIT_TYPES:
        return weight
    blocks = weight.blocks()
    rows, scale = len(blocks), scales(blocks[..., :2])
    if weight.type == "Q8_0":
        return Int8Weight(blocks[..., 2:].reshape(rows, -1).view(torch.int8), scale)
    if weight.type == "Q4_1":
        return Int4Weight(blocks[..., 4:].reshape(rows, -1), scale, scales(blocks[..., 2:4]))
    minimum = scale * -8
    if not bool(torch.isfinite(minimum).all()):
        return DenseWeight(dense(weight))
    return Int4Weight(blocks[..., 2:].reshape(rows, -1), scale, minimum)


def quantize_int8(tensor: Tensor) -> Int8Weight:
    """Symmetric: scale = absmax / 127 per group, rounded to fp16 before q is chosen."""
    parts = [_int8_rows(rows) for rows in _slices(tensor)]
    return Int8Weight(torch.cat([p.q for p in parts]), torch.cat([p.scale for p in parts]))


def quantize_int4(tensor: Tensor) -> Int4Weight:
    """Asymmetric: scale and minimum per group by least squares, started from the group's range."""
    parts = [_int4_rows(rows) for rows in _slices(tensor)]
    return Int4Weight(
        torch.cat([p.q for p in parts]),
        torch.cat([p.scale for p in parts]),
        torch.cat([p.minimum for p in parts]),
    )


def pack_nibbles(q: Tensor) -> Tensor:
    """[N, G, 32] values 0..15 -> uint8 [N, G * 16] in the order `Int4Weight` documents."""
    low, high = q[..., : GROUP // 2], q[..., GROUP // 2 :]
    return (low | (high << 4)).to(torch.uint8).flatten(1)


def _nibbles(q: Tensor, groups: int) -> Tensor:
    pairs = q.view(q.shape[0], groups, GROUP // 2)
    return torch.cat([pairs & 15, pairs >> 4], dim=-1)


def _slices(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, max(1, _SLICE_ELEMENTS // tensor.shape[1]))


def _int8_rows(tensor: Tensor) -> Int8Weight:
    values = tensor.float().reshape(tensor.shape[0], -1, GROUP)
    scale = (values.abs().amax(-1) / 127).half()
    q = (values * _inverse(scale.float())).round_().clamp_(-127, 127)
    return Int8Weight(q.to(torch.int8).flatten(1), scale)


def _int4_rows(tensor: Tensor) -> Int4Weight:
    values = tensor.float().reshape(tensor.shape[0], -1, GROUP)
    low, high = values.aminmax(dim=-1)
    scale, minimum = ((high - low) / 15).half(), low.half()
    q = _nearest(values, scale, minimum)
    error = _squared_error(values, q, scale, minimum)
    for _ in range(_REFINEMENTS):
        new_scale, new_minimum = _least_squares(values, q)
        new_q = _nearest(values, new_scale, new_minimum)
        new_error = _squared_error(values, new_q, new_scale, new_minimum)
        better = new_error < error
        scale = torch.where(better, new_scale, scale)
        minimum = torch.where(better, new_minimum, minimum)
        q = torch.where(better.unsqueeze(-1), new_q, q)
        error = torch.where(better, new_error, error)
    return Int4Weight(pack_nibbles(q.to(torch.uint8)), scale, minimum)


def _nearest(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    centred = values - minimum.float().unsqueeze(-1)
    return (centred * _inverse(scale.float())).round_().clamp_(0, 15)


def _squared_error(values: Tensor, q: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    got = q * scale.float().unsqueeze(-1) + minimum.float().unsqueeze(-1)
    return (got - values).square_().sum(-1)


def _least_squares(values: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum that fit `values` best for a fixed `q`, in fp16."""
    mean_q, mean_v = q.mean(-1), values.mean(-1)
    centred = q - mean_q.unsqueeze(-1)
    variance = centred.square().sum(-1)
    covariance = (centred * values).sum(-1)
    scale = (covariance / variance.clamp_min(1e-12)).half()
    return scale, (mean_v - scale.float() * mean_q).half()


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale with 0 for 0, [N, G] -> [N, G, 1]."""
    return torch.where(scale != 0, 1 / scale, 0.0).unsqueeze(-1)
