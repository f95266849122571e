"""Native rounding to int8 and int4 against the torch twin, on fresh random weights."""

from __future__ import annotations

import pytest
import torch

from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.cpu.expert_record import rounded
from coterie.weights.quantize import DenseWeight, Int4Weight, Int8Weight, convert, dense

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def matrices() -> list[torch.Tensor]:
    torch.manual_seed(11)
    plain = torch.randn(96, 256)
    flat = torch.full((16, 64), 0.37)
    tiny = torch.randn(16, 64) * 1e-7  # scales are subnormal in fp16
    spiky = torch.randn(32, 128)
    spiky[::3, 5] = 40.0
    return [plain, plain.bfloat16(), plain.half(), flat, tiny, spiky, torch.zeros(16, 32)]


@pytest.mark.parametrize("index", range(7))
def test_int8_has_the_same_bits(index: int) -> None:
    weight = DenseWeight(matrices()[index])
    got, expected = rounded(weight, "int8"), convert(weight, "int8")
    assert isinstance(got, Int8Weight) and isinstance(expected, Int8Weight)
    assert torch.equal(got.scale, expected.scale)
    assert torch.equal(got.q, expected.q)


@pytest.mark.parametrize("index", range(7))
def test_int4_is_as_near(index: int) -> None:
    weight = DenseWeight(matrices()[index])
    got, expected = rounded(weight, "int4"), convert(weight, "int4")
    assert isinstance(got, Int4Weight) and isinstance(expected, Int4Weight)
    values = weight.tensor.float()
    error, twin = ((dense(each) - values).square().sum() for each in (got, expected))
    assert error <= twin * 1.001 + 1e-12
    same = (got.q == expected.q).float().mean()
    assert same > 0.995


def test_threads_change_nothing_and_odd_rows_stay_dense() -> None:
    weight = DenseWeight(torch.randn(300, 512))
    one, two = rounded(weight, "int4", 1), rounded(weight, "int4", 2)
    assert isinstance(one, Int4Weight) and isinstance(two, Int4Weight)
    assert torch.equal(one.q, two.q) and torch.equal(one.minimum, two.minimum)
    assert isinstance(rounded(DenseWeight(torch.randn(4, 40)), "int4"), DenseWeight)
