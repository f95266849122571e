"""The kernels of `narrow_rows` against torch on fresh random inputs, in bf16, in the interpreter of
tests/helpers/kernels/gluon_interpreter.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.kernels.gluon_interpreter import interpreted
from tests.helpers.kernels.patch_inputs import random_stack
from tests.helpers.kernels.triton_interpreter import relative

pytest.importorskip("triton")

from coterie.kernels.batch import PatchRows, places_of
from coterie.kernels.decoder import DecoderShape
from coterie.kernels.patch import PARTS, PatchStack, Segment
from coterie.kernels.triton import narrow_rows, row_products

# sizes that no step and no tile divides; the width of a row is cut into two parts of the depth
SHAPE = DecoderShape(2, 1, 40, 136, 344, 1e-6, 0.25)
# two tiles of rows
COUNT = 35


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.seed()
    found = interpreted(narrow_rows)
    monkeypatch.setattr(row_products, "narrow_rows", found)
    monkeypatch.setattr(row_products, "_LEAST_DEPTH", 64)
    monkeypatch.setattr(row_products, "CHUNK", 128)
    return row_products


@pytest.fixture
def stacks() -> list[PatchStack | None]:
    """Of the rows: several ranks and parts, and one row without an adapter."""
    half = torch.bfloat16
    one = random_stack(SHAPE, [0, 1], 16, half, ("low_rank",), PARTS)
    other = random_stack(SHAPE, [0], 3, half, ("low_rank",), ("q", "v", "o", "up"))
    return [one, None, other, other, one] * (COUNT // 5)


def table_of(stacks: list[PatchStack | None]) -> PatchRows:
    rows = PatchRows(len(stacks), 2, torch.device("cpu"), kind=0)
    cut = [Segment(at, at + 1, stack) for at, stack in enumerate(stacks) if stack is not None]
    rows.fill(places_of(cut, rows.device))
    return rows


def half(*size: int) -> Tensor:
    return torch.randn(size).bfloat16()


def low_rank(stacks: list[PatchStack | None], x: Tensor, part: str, height: int) -> Tensor:
    """What the patches of layer 0 add to a product."""
    added = torch.zeros(len(x), height)
    for at, stack in enumerate(stacks):
        patch = stack.patches.get((0, part)) if stack is not None else None
        if patch is not None and patch.a is not None and patch.b is not None:
            added[at] = x[at].float() @ patch.a.float().T @ patch.b.float()
    return added


def normed(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + SHAPE.eps) * gain.float()


# programs of 16 columns, and of 32
@pytest.mark.parametrize("most", [128, 0])
def test_products_behind_a_norm(kernels: Any, stacks: list[PatchStack | None], most: int) -> None:
    kernels.narrow_rows.MOST_PROGRAMS = most
    rows, x, gain = table_of(stacks), half(COUNT, SHAPE.hidden), half(SHAPE.hidden)
    norm = kernels.PatchedNorm(gain, SHAPE.eps, 0, ("q", "k", "v"))
    _, got, terms = kernels.norm_rows(rows, x, None, norm)
    want = normed(x, gain)
    assert relative(got, want) < 1e-2
    parts = (("q", SHAPE.q_size), ("k", SHAPE.kv_size), ("v", SHAPE.kv_size))
    total = SHAPE.q_size + 2 * SHAPE.kv_size
    weight, bias = half(total, SHAPE.hidden), half(total)
    y = kernels.product_rows(rows, got, weight, 0, parts, terms, bias)
    added = torch.cat([low_rank(stacks, want, part, height) for part, height in parts], 1)
    base = got.float() @ weight.float().T + bias.float()
    assert relative(y, base + added) < 1e-2
    plain = kernels.product_rows(None, got, weight, 0, parts, terms, bias)
    assert torch.equal(plain[1], y[1]) and not torch.equal(plain[0], y[0])
    # the patches alone, without the rounding of what they are added to
    none = kernels.product_rows(rows, torch.zeros_like(got), weight, 0, parts, terms)
    assert relative(none, added) < 1e-2
    gate_up = half(2 * SHAPE.intermediate, SHAPE.hidden) * 0.1
    norm = kernels.PatchedNorm(gain, SHAPE.eps, 0, ("gate", "up"))
    _, got, terms = kernels.norm_rows(rows, x, None, norm)
    acts, raw = kernels.gate_up_rows(rows, got, gate_up, 0, terms)
    gate, up = (got.float() @ gate_up.float().T).chunk(2, 1)
    gate = gate + low_rank(stacks, want, "gate", SHAPE.intermediate)
    up = up + low_rank(stacks, want, "up", SHAPE.intermediate)
    assert acts is raw and relative(acts, torch.nn.functional.silu(gate) * up) < 1e-2


@pytest.mark.parametrize("part", ["o", "down"])
def test_products_in_front_of_a_norm(
    kernels: Any, stacks: list[PatchStack | None], part: str
) -> None:
    rows, hidden = table_of(stacks), half(COUNT, SHAPE.hidden)
    width = SHAPE.q_size if part == "o" else SHAPE.intermediate
    x, weight, gain = half(COUNT, width), half(SHAPE.hidden, width) * 0.1, half(SHAPE.hidden)
    product = kernels.split_product_rows(rows, x, x, weight, 0, part)
    assert part == "o" or len(product.planes) > 1 < product.pieces.shape[1]
    assert relative(product.planes.sum(0), x.float() @ weight.float().T) < 1e-5
    norm = kernels.PatchedNorm(gain, SHAPE.eps, 1, ("q", "k", "v"))
    summed, got, terms = kernels.norm_rows(rows, hidden, product, norm)
    added = low_rank(stacks, x, part, SHAPE.hidden)
    want = hidden.float() + x.float() @ weight.float().T + added
    assert relative(summed, want) < 1e-2
    assert relative(summed.float() - hidden.float() - product.planes.sum(0), added) < 5e-2
    assert relative(got, normed(summed, gain)) < 1e-2
    # layer 1, which one of the two stacks does not have
    for at, stack in enumerate(stacks):
        for place, name in enumerate(("q", "k", "v")):
            patch = stack.patches.get((1, name)) if stack is not None else None
            if patch is None or patch.a is None:
                assert not terms[at, place].any()
            else:
                own = normed(summed[at : at + 1], gain) @ patch.a.float().T
                assert relative(terms[at : at + 1, place], own) < 1e-5
    last = kernels.norm_rows(rows, hidden, product, kernels.PatchedNorm(gain, SHAPE.eps)).normed
    assert torch.equal(last, got)
