"""Products with a matrix that stays quantised on the device: int8 or int4 in groups of 32, or
GGUF's blocks.

Few rows: the kernels of `gemv`. More: tiles of the matrix are widened on their way to the tensor
cores. Many rows, as in prompts: the whole matrix is widened into a buffer for torch's product.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from coterie.kernels.device_blocks import block_rows
from coterie.kernels.device_record import packed_matrix
from coterie.kernels.triton.expert_tiles import TileSize, weight_tile
from coterie.kernels.triton.gemv import DeviceMatrix, product_add, scales_of
from coterie.kernels.triton.sizes import gemv_size
from coterie.kernels.triton.unpack import FIRST_BLOCK, KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Int8Weight, Weight

# by kind: up to this many rows take the kernels of `gemv`, which read other matrices than int4's
# for every row
GEMV_ROWS = {"int8": 1, "int4": 8}
# up to this many rows tiles are widened, of matrices that have at least so many rows: tiles of a
# smaller one leave a device idle (H200, 2048 x 4096 and 64 rows: 20 us, widened 16)
TILE_ROWS, TILE_COUNT = 256, 4096
# of blocks up to this many rows take tiles if the matrix is at least as high as wide, narrow ones
# where it has few rows (H200, q4_k and 8 rows, widened in brackets: 2048 x 2048 8.3 us (9.3),
# 8192 x 2048 13.5 us (19.1), but 2048 x 8192 25.4 us (20.7))
FEW_ROWS, NARROW_COUNT = 16, 8192


@triton.jit
def _tile_product(
    x, weight, scales, y, rows,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, X_ROWS: tl.constexpr,
):  # fmt: skip
    """y[t, n] = W[n] . x[t]. Grid: (tiles of rows of W, tiles of rows of x)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, live = row.to(tl.int64), row < COUNT
    at = tl.program_id(1) * X_ROWS + tl.arange(0, X_ROWS)
    used = at < rows
    source = x + at.to(tl.int64)[None, :] * WIDTH
    total = tl.zeros([BLOCK, X_ROWS], tl.float32)
    for k0 in range(0, WIDTH, COLUMNS):
        column = k0 + tl.arange(0, COLUMNS)
        inside = used[None, :] & (column < WIDTH)[:, None]
        own = tl.load(source + column[:, None], mask=inside, other=0)
        tile = weight_tile(weight, scales, place, live, k0, WIDTH, BLOCK, COLUMNS, KIND)
        total = tl.dot(tile.to(own.dtype), own, total, input_precision="ieee")
    target = y + at.to(tl.int64)[None, :] * COUNT + row[:, None]
    tl.store(target, total.to(y.dtype.element_ty), mask=used[None, :] & live[:, None])


# a step's rows of an embedding: specialising on their number would compile while serving
@triton.jit(do_not_specialize=["count"])
def _widen_rows(
    weight, scales, index, out, count,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    INDEXED: tl.constexpr,
):  # fmt: skip
    """out[t] = W[t], or W[index[t]]. Grid: (tiles of rows, tiles of columns)."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live, k0 = row < count, tl.program_id(1) * COLUMNS
    own = row
    if INDEXED:
        own = tl.load(index + row, mask=live, other=0).to(tl.int64)
    tile = weight_tile(weight, scales, own, live, k0, WIDTH, BLOCK, COLUMNS, KIND)
    column = k0 + tl.arange(0, COLUMNS)
    inside = live[:, None] & (column < WIDTH)[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], tile.to(out.dtype.element_ty), inside)


class QuantLinear:
    """A `Linear` of weights that are quantised and of one kind. x may be on another device."""

    def __init__(self, weights: Sequence[Weight], device: torch.device | str) -> None:
        parts = [_packed(weight, device) for weight in weights]
        values = torch.cat([part for part, _ in parts])
        pairs = [part for _, part in parts if part is not None]
        scales = torch.cat(pairs) if pairs else None
        count, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        self.matrix = DeviceMatrix(values, scales, count, width, KINDS.index(_kind(weights[0])))
        self.out_features, self.in_features = count, width

    @classmethod
    def joined(cls, products: Sequence[QuantLinear]) -> QuantLinear:
        """One product over the rows of several of one kind, whose matrices become parts of it."""
        parts = [product.matrix for product in products]
        values = torch.cat([part.weight for part in parts])
        pairs = [part.scales for part in parts if part.scales is not None]
        scales = torch.cat(pairs) if pairs else None
        whole, first = cls.__new__(cls), 0
        whole.matrix = replace(parts[0], weight=values, scales=scales, count=len(values))
        whole.out_features, whole.in_features = len(values), parts[0].width
        for product in products:
            rows = slice(first, first + product.out_features)
            own = None if scales is None else scales[rows]
            product.matrix = replace(product.matrix, weight=values[rows], scales=own)
            first += product.out_features
        return whole

    @staticmethod
    def supports(weights: Sequence[Weight]) -> bool:
        dense = any(isinstance(weight, DenseWeight) for weight in weights)
        return not dense and len({_kind(weight) for weight in weights}) == 1

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, x.dtype)

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """As the call, with the result in `dtype`."""
        matrix = self.matrix
        x = x.to(matrix.weight.device).contiguous()
        few = len(x) <= GEMV_ROWS.get(KINDS[matrix.kind], 1)
        if not few and not _in_tiles(matrix, len(x)):
            return functional.linear(x, self.widened(x.dtype)).to(dtype)
        y = torch.empty((len(x), matrix.count), dtype=dtype, device=x.device)
        if few:
            product_add(x, matrix, y, gemv_size(matrix), add=False)
        else:
            self._tiles(x, y)
        return y

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, [out, in]."""
        return self._widened(None, dtype)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of the matrix [T, in], as an embedding reads them; `index` [T]."""
        return self._widened(index.to(self.matrix.weight.device).contiguous(), dtype)

    def _widened(self, index: Tensor | None, dtype: torch.dtype) -> Tensor:
        matrix = self.matrix
        count, width = matrix.count if index is None else len(index), matrix.width
        out = torch.empty((count, width), dtype=dtype, device=matrix.weight.device)
        block = 16 if index is None else 1
        columns = min(256, triton.next_power_of_2(width))
        _widen_rows[(triton.cdiv(count, block), triton.cdiv(width, columns))](
            matrix.weight, scales_of(matrix), matrix.weight if index is None else index, out, count,
            WIDTH=width, KIND=matrix.kind, BLOCK=block, COLUMNS=columns,
            INDEXED=index is not None, num_warps=4,
        )  # fmt: skip
        return out

    def _tiles(self, x: Tensor, y: Tensor) -> None:
        matrix = self.matrix
        size = tile_size(matrix, len(x))
        columns = min(size.columns, triton.next_power_of_2(matrix.width))
        each = min(64, max(16, triton.next_power_of_2(len(x))))
        _tile_product[(triton.cdiv(matrix.count, size.block), triton.cdiv(len(x), each))](
            x, matrix.weight, scales_of(matrix), y, len(x), COUNT=matrix.count,
            WIDTH=matrix.width, KIND=matrix.kind, BLOCK=size.block, COLUMNS=columns,
            X_ROWS=each, num_warps=size.warps, num_stages=size.stages,
        )  # fmt: skip


def _in_tiles(matrix: DeviceMatrix, rows: int) -> bool:
    few = FEW_ROWS if matrix.kind >= FIRST_BLOCK.value and matrix.count >= matrix.width else 0
    return rows <= few or (rows <= TILE_ROWS and matrix.count >= TILE_COUNT)


def tile_size(matrix: DeviceMatrix, rows: int) -> TileSize:
    if rows <= FEW_ROWS and matrix.kind >= FIRST_BLOCK.value and matrix.count < NARROW_COUNT:
        return TileSize(16, 256, 3, 2)
    return TileSize(64, 128, 3, 4)


class MixedLinear:
    """A `Linear` of quantised weights of several kinds: a product for each run of one kind."""

    def __init__(self, parts: Sequence[QuantLinear]) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.parts[0].matrix.weight.device)
        return torch.cat([part(x) for part in self.parts], dim=1)


def quantised(
    weights: Sequence[Weight], device: torch.device | str
) -> QuantLinear | MixedLinear | None:
    """The product of these weights as they are stored; None if one is dense."""
    runs = [list(run) for _, run in groupby(weights, _kind)]
    if not all(QuantLinear.supports(run) for run in runs):
        return None
    parts = [QuantLinear(run, device) for run in runs]
    return parts[0] if len(parts) == 1 else MixedLinear(parts)


def _kind(weight: Weight) -> str:
    if isinstance(weight, GgufBlocks):
        return weight.kind
    if isinstance(weight, DenseWeight):
        return "dense"
    return "int8" if isinstance(weight, Int8Weight) else "int4"


def _packed(weight: Weight, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, GgufBlocks):
        return block_rows(weight, device), None
    values, scales = packed_matrix(weight)
    return values.to(device), None if scales is None else scales.to(device)
