"""The kernels of `int4_rows` against their torch twins on fresh random inputs, in bf16, in the
interpreter of tests/helpers/kernels/gluon_interpreter.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.kernels.gluon_interpreter import interpreted
from tests.helpers.kernels.triton_interpreter import relative

pytest.importorskip("triton")

from coterie.kernels.triton import expert_gemv, gemv, int4_rows
from tests.kernels.test_triton_quant import product, random_pool


def draw(*size: int, std: float = 0.2) -> Tensor:
    return torch.randn(size) * std


@pytest.fixture(scope="module")
def kernels() -> Any:
    torch.seed()
    return interpreted(int4_rows)


# whole tiles; rows and columns that are none; more than two steps
@pytest.mark.parametrize(("count", "width", "rows"), [(16, 2048, 1), (22, 288, 3), (9, 4160, 9)])
def test_product(kernels: Any, count: int, width: int, rows: int) -> None:
    linear, values = product("int4", (count,), width, draw)
    own = linear.matrix.weight, linear.matrix.scales
    x, y = draw(rows, width, std=1.0).bfloat16(), draw(rows, count)
    want = y + x.float() @ values.T
    kernels.int4_product(x, *own, y, add=True)
    assert relative(y, want) < 1e-5
    gain, bias = (1 + draw(width)).bfloat16(), draw(count).bfloat16()
    kernels.int4_product(x, *own, y, gain=gain, eps=1e-6, bias=bias)
    # x times the gain is rounded
    assert relative(y, gemv.norm_product_torch(x, gain, 1e-6, values, bias)) < 5e-3
    alone = torch.empty(1, count)
    kernels.int4_product(x[-1:], *own, alone, gain=gain, eps=1e-6, bias=bias)
    assert torch.equal(alone[0], y[-1])


@pytest.mark.parametrize(
    ("hidden", "inner", "top_k", "rows"), [(64, 32, 2, 2), (64, 544, 3, 1), (1056, 32, 1, 1)]
)
def test_experts(kernels: Any, hidden: int, inner: int, top_k: int, rows: int) -> None:
    pool = random_pool(4, hidden, inner, draw)
    x, gain = draw(rows, hidden, std=1.0).bfloat16(), (1 + draw(hidden)).bfloat16()
    routed = expert_gemv.RoutedRows.empty(rows, top_k, "cpu")
    routed.ids.copy_(torch.stack([torch.randperm(4)[:top_k] for _ in range(rows)]))
    routed.places.copy_(pool.places[routed.ids.long()])
    routed.weights.copy_(torch.rand(rows, top_k))
    routed.norms.copy_(torch.rsqrt(x.float().square().mean(-1) + 1e-6))
    acts = torch.empty(rows * top_k, inner, dtype=torch.bfloat16)
    y = draw(rows, hidden).bfloat16()
    normed = x.float() * routed.norms[:, None] * gain.float()
    want = y.float() + expert_gemv.experts_torch(normed, routed.ids, routed.weights, pool)
    words, places = pool.base.view(torch.int32), routed.places
    kernels.int4_pair_gate_up(x, places, words, pool.record, acts, (gain, routed.norms))
    kernels.int4_pair_down(acts, places, routed.weights, words, pool.record, y)
    assert relative(y, want) < 2e-2
    # channels that somebody else computes are neither read nor written
    taken = 32 * torch.randint(0, inner // 32 + 1, (rows, top_k), dtype=torch.int32)
    own = routed.ids, routed.weights, pool, taken
    y = draw(rows, hidden).bfloat16()
    want, acts = y.float() + expert_gemv.experts_torch(normed, *own), acts * float("nan")
    kernels.int4_pair_gate_up(
        x, places, words, pool.record, acts, (gain, routed.norms), taken=taken
    )
    kernels.int4_pair_down(acts, places, routed.weights, words, pool.record, y, taken=taken)
    assert relative(y, want) < 2e-2
