"""Products under patches in torch: the meaning itself, against dense matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie.kernels import patched
from coterie.kernels.decoder import DecoderShape
from coterie.kernels.linear import Linear, ReferenceLinear
from coterie.kernels.patch import Patch, PatchStack, Segment
from coterie.kernels.reference import layers as reference
from coterie.weights.quantize import DenseWeight
from tests.helpers.kernels.kernel_inputs import cache_for, decoder_layers, paged_batch, rope_tables
from tests.helpers.kernels.patch_inputs import FIELDS, random_patch, random_stack

SMALL = DecoderShape(6, 2, 32, 96, 160, 1e-6, 0.17)


class Biased:
    def __init__(self, product: Linear, bias: Tensor) -> None:
        self.product, self.bias = product, bias
        self.in_features, self.out_features = product.in_features, product.out_features
        self.nbytes = product.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) + self.bias.to(x.dtype)


def by_hand(weight: Tensor, patch: Patch, x: Tensor) -> Tensor:
    """The changed matrix, written out in fp64."""
    matrix, x = weight.double(), x.double()
    if patch.in_scale is not None:
        matrix = matrix * patch.in_scale
    if patch.out_scale is not None:
        matrix = matrix * patch.out_scale[:, None]
    if patch.a is not None and patch.b is not None:
        matrix = matrix + patch.b.double().T @ patch.a.double()
    y = x @ matrix.T
    return y if patch.shift is None else y + patch.shift


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("missing", [None, *FIELDS])
def test_equals_the_changed_matrix(missing: str | None, biased: bool) -> None:
    torch.manual_seed(21)
    weights = torch.randn(40, 24), torch.randn(16, 24)
    product: Linear = ReferenceLinear([DenseWeight(w) for w in weights])
    bias = torch.randn(56) if biased else torch.zeros(56)
    if biased:
        product = Biased(product, bias)
    fields = [name for name in FIELDS if name != missing]
    patches = [random_patch(24, height, 5, fields=fields) for height in (40, 16)]
    both = PatchStack("both", 0, {(3, "gate"): patches[0], (3, "up"): patches[1]})
    one = PatchStack("one", 1, {(3, "up"): patches[1], (2, "gate"): patches[0]})
    x = torch.randn(9, 24)
    parts = (("gate", 40), ("up", 16))
    where = (Segment(1, 4, both), Segment(6, 9, one))
    got = patched.linear(product, x, 3, parts, where) - bias
    assert torch.equal(got[[0, 4, 5]], product(x)[[0, 4, 5]] - bias)
    assert torch.equal(got[6:, :40], product(x)[6:, :40] - bias[:40])
    want = torch.cat([by_hand(w, p, x) for w, p in zip(weights, patches, strict=True)], 1)
    assert (got[1:4] - want[1:4]).abs().max() < 1e-4
    assert (got[6:, 40:] - want[6:, 40:]).abs().max() < 1e-4


def test_without_patches_it_is_the_product() -> None:
    torch.manual_seed(22)
    product = ReferenceLinear([DenseWeight(torch.randn(8, 4))])
    x = torch.randn(3, 4)
    other = PatchStack("other", 0, {(1, "o"): random_patch(4, 8, 2)})
    for patches in ((), (Segment(0, 2, other),)):
        assert torch.equal(patched.linear(product, x, 0, (("o", 8),), patches), product(x))


def test_pick_follows_rows() -> None:
    one, two = PatchStack("one", 0, {}), PatchStack("two", 1, {})
    patches = (Segment(2, 5, one), Segment(6, 8, two))
    picked = patched.pick(patches, torch.tensor([0, 3, 4, 5, 7, 6, 2]))
    assert picked == (Segment(1, 3, one), Segment(4, 6, two), Segment(6, 7, one))
    assert patched.pick((), torch.tensor([1])) == ()


def test_decoder_runs_layers_by_their_number() -> None:
    torch.manual_seed(23)
    layers = decoder_layers(SMALL, ["fp32"] * 2, ("reference",), extras=True)["reference"]
    batch = paged_batch([(3, 2), (0, 4)])
    cache = cache_for(batch, SMALL.num_kv_heads, SMALL.head_dim, torch.float32)
    tables, hidden = rope_tables(100, SMALL.head_dim), torch.randn(6, SMALL.hidden)

    def run(patches: tuple[Segment, ...], first: int) -> Tensor:
        step = replace(batch, patches=patches)
        kv = [cache.clone() for _ in layers]
        return reference.decoder(SMALL, layers, *tables, hidden, kv, step, first=first)

    base = run((), 0)
    stack = random_stack(SMALL, [5], 4)
    assert torch.equal(run((Segment(2, 6, stack),), 0), base)
    changed = run((Segment(2, 6, stack),), 4)
    assert torch.equal(changed[:2], base[:2])
    assert (changed[2:] - base[2:]).abs().amax(1).min() > 1e-2
