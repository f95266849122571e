"""Native products: equal to the torch twin, and bit for bit the same in every batch."""

from __future__ import annotations

import pytest
import torch

from coterie.core.errors import InternalError
from coterie.kernels.cpu import layers as cpu
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.reference import layers as reference
from coterie.weights.quantize import DenseWeight, dense
from tests.helpers.kernels.kernel_inputs import ALL_KINDS, KINDS, fitting, weight

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

# AMX rounds activations to bf16 for bf16 weights; quantised activations have 15 bits per group.
TOLERANCE = {"fp32": 3e-6, "bf16": 3e-6}


def tolerance(kind: str) -> float:
    library = native()
    assert library is not None, "a compiler is here, but the native kernels did not build"
    return 5e-3 if kind == "bf16" and "amx" in library.isa else TOLERANCE.get(kind, 1e-4)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("rows,width", [(1, 32), (17, 64), (50, 96), (576, 576), (100, 1536)])
def test_equals_reference(kind: str, rows: int, width: int) -> None:
    torch.manual_seed(rows * width)
    width = fitting(kind, width)
    stored = weight(kind, rows, width)
    x = torch.randn(37, width)
    x[:, ::7] *= 30  # outliers: groups must not spoil each other
    want = (x.double() @ dense(stored).double().T).float()
    got = cpu.PackedLinear([stored])(x)
    scale = x.norm(dim=1, keepdim=True) * dense(stored).norm(dim=1)[None, :]
    assert ((got - want).abs() / scale.clamp_min(1e-9)).max() < tolerance(kind)
    assert torch.allclose(reference.linear(x, stored), want, atol=1e-3 * float(scale.max()))


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_any_width(kind: str) -> None:
    torch.manual_seed(1)
    for rows, width in ((5, 1), (33, 53), (16, 6), (40, 1031)):
        stored = weight(kind, rows, width)
        x = torch.randn(9, width)
        assert torch.allclose(
            cpu.PackedLinear([stored])(x), reference.linear(x, stored), atol=20 * tolerance(kind)
        )


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_do_not_depend_on_the_batch(kind: str) -> None:
    torch.manual_seed(2)
    for rows, least in ((70, 96), (300, 1312)):
        width = fitting(kind, least)
        product = cpu.PackedLinear([weight(kind, rows, width)])
        x = torch.randn(140, width)
        whole = product(x)
        for start, count in ((0, 1), (3, 1), (2, 2), (5, 3), (7, 4), (1, 8), (30, 13), (10, 65)):
            assert torch.equal(product(x[start : start + count]), whole[start : start + count])


def test_threads_do_not_change_bits() -> None:
    torch.manual_seed(3)
    before = torch.get_num_threads()
    product = cpu.PackedLinear([weight("int4", 200, 256), weight("bf16", 50, 256)])
    x = torch.randn(6, 256)
    try:
        cpu.set_threads(1)
        alone = product(x)
        cpu.set_threads(3)
        assert torch.equal(product(x), alone)
    finally:
        cpu.set_threads(before)


def test_mixed_parts_keep_their_order() -> None:
    torch.manual_seed(4)
    parts = [weight(kind, rows, 64) for kind, rows in zip(KINDS, (20, 16, 7, 33), strict=True)]
    product = cpu.PackedLinear(parts)
    x = torch.randn(3, 64)
    want = torch.cat([reference.linear(x, part) for part in parts], dim=1)
    assert (product.out_features, product.in_features) == (76, 64)
    assert torch.allclose(product(x), want, atol=2e-2)
    assert product(x[0]).shape == (76,)


def test_widths_must_agree() -> None:
    with pytest.raises(InternalError):
        cpu.PackedLinear([weight("fp32", 4, 32), weight("fp32", 4, 64)])


def test_packed_size_is_the_stored_size() -> None:
    bits = {"fp32": 32, "bf16": 16, "int8": 8.5, "int4": 5, "q5_0": 5.5, "q5_1": 6, "q6_k": 6.5625}
    # six-bit scales take a byte each
    bits |= {"q4_k": 4.5 + 0.125, "q5_k": 5.5 + 0.125}
    for kind in ALL_KINDS:
        assert cpu.PackedLinear([weight(kind, 64, 256)]).nbytes == 64 * 256 * bits[kind] / 8


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_of_a_product_are_the_weights_own(kind: str) -> None:
    """Bit for bit, so that an embedding can be its head's rows."""
    torch.manual_seed(7)
    stored = weight(kind, 50, fitting(kind, 320))
    product, index = cpu.PackedLinear([stored]), torch.tensor([[0, 49, 17], [17, 15, 16]])
    assert torch.equal(product.rows(index), dense(stored)[index])
    for wrong in (-1, 50):
        with pytest.raises(InternalError):
            product.rows(torch.tensor([wrong]))


def test_zero_and_huge_activations() -> None:
    torch.manual_seed(5)
    stored = weight("int8", 32, 64)
    x = torch.zeros(2, 64)
    x[1, 3] = 1e30
    got = cpu.PackedLinear([stored])(x)
    assert torch.equal(got[0], torch.zeros(32))
    assert torch.allclose(got[1], dense(stored)[:, 3] * 1e30, rtol=1e-3)


def test_fp16_is_widened_exactly() -> None:
    torch.manual_seed(6)
    stored = torch.randn(16, 32).half()
    x = torch.eye(32)
    assert torch.equal(cpu.PackedLinear([DenseWeight(stored)])(x), stored.float().T)
