"""Panels made of a GGUF file's blocks are those made of the blocks' parts."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from coterie.kernels.backend import make_linear
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.expert_record import write_panels
from coterie.kernels.cpu.layers import PackedLinear
from coterie.kernels.expert_layout import PartPlace
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES, NotFinite
from coterie.weights.quantize import GgufBlocks, Weight, dense, split

pytestmark = pytest.mark.skipif(native() is None, reason="needs the native kernels")

TYPES = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2}


def random_blocks(stored: str, rows: int, columns: int, halves: torch.Tensor) -> GgufBlocks:
    """Random bytes with factors drawn from `halves`."""
    elements, nbytes = BLOCK_SIZES[stored]
    generator = torch.Generator().manual_seed(rows)
    shape = rows, columns // elements, nbytes
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    count = TYPES[stored]
    drawn = torch.randint(0, len(halves), (*shape[:2], count), generator=generator)
    data[..., : 2 * count] = halves[drawn].view(torch.uint8)
    return GgufBlocks(stored, data.flatten(1))


def every_half(most: float) -> torch.Tensor:
    """Each fp16 number up to `most`, subnormal ones and both zeros included."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return halves[halves.abs() <= most]


def panels(weight: Weight) -> torch.Tensor:
    product = make_linear([weight], "cpu")
    assert isinstance(product, PackedLinear)
    return product._packed[0]


@pytest.mark.parametrize("rows", [16, 336])
@pytest.mark.parametrize("stored", TYPES)
def test_blocks_become_the_panels_of_their_parts(stored: str, rows: int) -> None:
    most = 8188.0 if stored == "Q4_0" else 65504.0
    weight = random_blocks(stored, rows, 7 * 32, every_half(most))
    found = panels(weight)
    assert torch.equal(found, panels(split(weight)))


@pytest.mark.parametrize("stored", TYPES)
def test_the_twin_writes_the_same_panels(stored: str) -> None:
    rows = 64
    weight = random_blocks(stored, rows, 7 * 32, every_half(8188.0))
    found = panels(weight)
    place = PartPlace("up", weight.kind, rows, 7 * 32, 0, found.nbytes)
    twin = torch.zeros_like(found)
    write_panels(place, weight, twin)
    assert torch.equal(found, twin)


@pytest.mark.parametrize("stored", TYPES)
def test_panels_have_the_values_of_the_oracle(stored: str) -> None:
    weight = random_blocks(stored, 43, 96, torch.tensor([0.01, -0.5, 0.0]).half())
    product = make_linear([weight], "cpu")
    assert isinstance(product, PackedLinear)
    number = gguf.GGMLQuantizationType[stored]
    expected = gguf.quants.dequantize(weight.data.numpy(), number)
    assert np.array_equal(product.rows(torch.arange(43)).numpy(), expected)


def test_a_scale_whose_minimum_no_half_holds_gives_fp32() -> None:
    weight = random_blocks("Q4_0", 32, 64, torch.tensor([20_000.0, 1.0]).half())
    product = make_linear([weight], "cpu")
    assert isinstance(product, PackedLinear)
    assert product.nbytes == 4 * 32 * 64
    assert torch.equal(product.rows(torch.arange(32)), dense(weight))


@pytest.mark.parametrize("factor", ["inf", "nan"])
@pytest.mark.parametrize("stored", TYPES)
def test_a_factor_that_is_no_number_is_refused(stored: str, factor: str) -> None:
    weight = random_blocks(stored, 32, 64, torch.tensor([1.0]).half())
    at = 2 * (TYPES[stored] - 1)
    weight.data[31, at : at + 2] = torch.tensor([float(factor)]).half().view(torch.uint8)
    with pytest.raises(NotFinite):
        make_linear([weight], "cpu")


def test_a_factor_that_is_no_number_is_refused_beside_scales_too_large() -> None:
    """Whichever thread finds its own first: fp32 would keep the other."""
    weight = random_blocks("Q4_0", 512, 256, torch.tensor([20_000.0]).half())
    weight.data[200, :2] = torch.tensor([float("nan")]).half().view(torch.uint8)
    for _ in range(200):
        with pytest.raises(NotFinite):
            make_linear([weight], "cpu")
