"""Weight layouts: exact expansion, one rounding at most, and an error within the format's step."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from coterie.weights.quantize import (
    DTYPES,
    DenseWeight,
    Int4Weight,
    Int8Weight,
    convert,
    dense,
    pack_nibbles,
    quantize_int4,
    quantize_int8,
)


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(48, 96, generator=torch.Generator().manual_seed(0)) * 0.05


def test_int4_nibble_order_is_low_half_then_high_half() -> None:
    q = torch.arange(32).remainder(16).view(1, 1, 32).to(torch.uint8)
    q[0, 0, 16:] = 15 - q[0, 0, 16:]
    packed = pack_nibbles(q)
    assert packed.tolist() == [[j | ((15 - j) << 4) for j in range(16)]]
    weight = Int4Weight(packed, torch.ones(1, 1).half(), torch.zeros(1, 1).half())
    assert dense(weight).tolist() == [q.flatten().tolist()]


def test_int8_is_as_close_as_the_gguf_quantiser(matrix: torch.Tensor) -> None:
    ours = (dense(quantize_int8(matrix)) - matrix).square().mean().item()
    assert ours <= _gguf_error(matrix, "Q8_0") * 1.02


def test_int4_is_closer_than_the_gguf_quantiser(matrix: torch.Tensor) -> None:
    ours = (dense(quantize_int4(matrix)) - matrix).square().mean().item()
    assert ours < _gguf_error(matrix, "Q4_1") * 0.95


def _gguf_error(matrix: torch.Tensor, kind: str) -> float:
    number = gguf.GGMLQuantizationType[kind]
    there = gguf.quants.quantize(matrix.numpy(), number)
    back = torch.from_numpy(gguf.quants.dequantize(there, number))
    return (back - matrix).square().mean().item()


def test_errors_stay_within_one_step(matrix: torch.Tensor) -> None:
    groups = matrix.view(48, 3, 32)
    step8 = groups.abs().amax(-1, keepdim=True) / 127
    error8 = (dense(quantize_int8(matrix)) - matrix).view(48, 3, 32).abs()
    assert (error8 <= step8 * 0.6).all()
    step4 = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
    error4 = (dense(quantize_int4(matrix)) - matrix).view(48, 3, 32).abs()
    assert (error4 <= step4 * 2).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_constant_groups_are_exact(value: float) -> None:
    constant = torch.full((2, 64), value)
    assert torch.equal(dense(quantize_int4(constant)), constant)
    assert torch.allclose(dense(quantize_int8(constant)), constant, rtol=1e-3)


def test_slicing_rows_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, matrix: torch.Tensor
) -> None:
    whole = quantize_int4(matrix)
    monkeypatch.setattr("coterie.weights.quantize._SLICE_ELEMENTS", 96 * 5)
    parts = quantize_int4(matrix)
    assert torch.equal(whole.q, parts.q)
    assert torch.equal(whole.minimum, parts.minimum)


def test_auto_keeps_what_is_stored(matrix: torch.Tensor) -> None:
    for stored in (DenseWeight(matrix), DenseWeight(matrix.bfloat16()), quantize_int8(matrix)):
        assert convert(stored, "auto") is stored
    half = convert(DenseWeight(matrix.half()), "auto")
    assert isinstance(half, DenseWeight)
    assert half.tensor.dtype == torch.float32
    assert torch.equal(half.tensor, matrix.half().float())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_nothing_is_rounded_twice(matrix: torch.Tensor, dtype: str) -> None:
    for stored in (quantize_int8(matrix), quantize_int4(matrix)):
        assert convert(stored, dtype) is stored


def test_conversions_have_the_asked_type(matrix: torch.Tensor) -> None:
    assert isinstance(convert(DenseWeight(matrix), "int8"), Int8Weight)
    assert isinstance(convert(DenseWeight(matrix), "int4"), Int4Weight)
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for stored in (DenseWeight(matrix), quantize_int8(matrix), quantize_int4(matrix)):
            got = convert(stored, dtype)
            assert isinstance(got, DenseWeight)
            assert got.tensor.dtype == expected
            assert torch.equal(got.tensor, dense(stored).to(expected))


@pytest.mark.parametrize("shape", [(7,), (5, 40), (0, 32)])
def test_what_has_no_groups_stays_dense(shape: tuple[int, ...]) -> None:
    for dtype in ("int8", "int4"):
        assert isinstance(convert(DenseWeight(torch.ones(shape)), dtype), DenseWeight)


def test_sizes_are_those_of_the_format(matrix: torch.Tensor) -> None:
    assert quantize_int8(matrix).nbytes * 8 == matrix.numel() * 8.5
    assert quantize_int4(matrix).nbytes * 8 == matrix.numel() * 5
    assert quantize_int4(matrix).shape == quantize_int8(matrix).shape == tuple(matrix.shape)


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="fp8"):
        convert(DenseWeight(torch.ones(1)), "fp8")
    assert set(DTYPES) == {"auto", "fp32", "bf16", "int8", "int4"}


def test_bf16_input_is_quantised_from_its_own_values(matrix: torch.Tensor) -> None:
    coarse = matrix.bfloat16()
    assert torch.equal(quantize_int8(coarse).q, quantize_int8(coarse.float()).q)
    assert np.isfinite(dense(quantize_int4(coarse)).numpy()).all()
