"""Products with a matrix that stays quantised on the device: int8 or int4 in groups of 32.

Few rows: the kernels of `gemv`. More: tiles of the matrix are widened on their way to the tensor
cores. Many rows, as in prompts: the whole matrix is widened into a buffer for torch's product.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from coterie.kernels.device_record import packed_matrix
from coterie.kernels.triton.expert_tiles import weight_tile
from coterie.kernels.triton.gemv import KINDS, DeviceMatrix, product_add
from coterie.kernels.triton.sizes import gemv_size
from coterie.weights.quantize import Int4Weight, Int8Weight, Weight

# by kind: up to this many rows take the kernels of `gemv`, which read an int8 matrix for every row
GEMV_ROWS = (16, 1, 8)
# up to this many rows tiles are widened, of matrices that have at least so many rows: tiles of a
# smaller one leave a device idle (H200, 2048 x 4096 and 64 rows: 20 us, widened 16)
TILE_ROWS, TILE_COUNT = 256, 4096


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


@triton.jit
def _widen_rows(
    weight, scales, out,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = W. Grid: (tiles of rows, tiles of columns)."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live, k0 = row < COUNT, tl.program_id(1) * COLUMNS
    tile = weight_tile(weight, scales, row, live, k0, WIDTH, BLOCK, COLUMNS, KIND)
    column = k0 + tl.arange(0, COLUMNS)
    inside = live[:, None] & (column < WIDTH)[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], tile.to(out.dtype.element_ty), inside)


class QuantLinear:
    """A `Linear` of weights that are all int8 or all int4. x may be on another device."""

    def __init__(self, weights: Sequence[Weight], device: torch.device | str) -> None:
        parts = [packed_matrix(weight) for weight in weights]
        values = torch.cat([part.to(device) for part, _ in parts])
        scales = torch.cat([part.to(device) for _, part in parts if part is not None])
        count, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        kind = KINDS.index("int8" if isinstance(weights[0], Int8Weight) else "int4")
        self.matrix = DeviceMatrix(values, scales, count, width, kind)
        self.out_features, self.in_features = count, width

    @classmethod
    def joined(cls, products: Sequence[QuantLinear]) -> QuantLinear:
        """One product over the rows of several of one kind, whose matrices become parts of it."""
        parts = [product.matrix for product in products]
        values = torch.cat([part.weight for part in parts])
        scales = torch.cat([part.scales for part in parts if part.scales is not None])
        whole, first = cls.__new__(cls), 0
        whole.matrix = replace(parts[0], weight=values, scales=scales, count=len(values))
        whole.out_features, whole.in_features = len(values), parts[0].width
        for product in products:
            rows = slice(first, first + product.out_features)
            product.matrix = replace(product.matrix, weight=values[rows], scales=scales[rows])
            first += product.out_features
        return whole

    @staticmethod
    def supports(weights: Sequence[Weight]) -> bool:
        kinds = {type(weight) for weight in weights}
        return len(kinds) == 1 and kinds <= {Int8Weight, Int4Weight}

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, x.dtype)

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """As the call, with the result in `dtype`."""
        matrix = self.matrix
        x = x.to(matrix.weight.device).contiguous()
        few = len(x) <= GEMV_ROWS[matrix.kind]
        if not few and (len(x) > TILE_ROWS or matrix.count < TILE_COUNT):
            return functional.linear(x, self.widened(x.dtype)).to(dtype)
        y = torch.empty((len(x), matrix.count), dtype=dtype, device=x.device)
        if few:
            product_add(x, matrix, y, gemv_size(matrix), add=False)
        else:
            self._tiles(x, y)
        return y

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, [out, in]."""
        matrix = self.matrix
        out = torch.empty((matrix.count, matrix.width), dtype=dtype, device=matrix.weight.device)
        block, columns = 16, min(256, triton.next_power_of_2(matrix.width))
        _widen_rows[(triton.cdiv(matrix.count, block), triton.cdiv(matrix.width, columns))](
            matrix.weight, matrix.scales, out, COUNT=matrix.count, WIDTH=matrix.width,
            KIND=matrix.kind, BLOCK=block, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        return out

    def _tiles(self, x: Tensor, y: Tensor) -> None:
        matrix = self.matrix
        block, columns = 64, min(128, triton.next_power_of_2(matrix.width))
        each = min(64, max(16, triton.next_power_of_2(len(x))))
        _tile_product[(triton.cdiv(matrix.count, block), triton.cdiv(len(x), each))](
            x, matrix.weight, matrix.scales, y, len(x), COUNT=matrix.count, WIDTH=matrix.width,
            KIND=matrix.kind, BLOCK=block, COLUMNS=columns, X_ROWS=each, num_warps=4, num_stages=3,
        )  # fmt: skip
