"""Routers: the native choice equals the torch twin, on fresh random inputs and every rule."""

from __future__ import annotations

import pytest
import torch

from coterie.kernels.backend import make_linear
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.expert_gate import ExpertGate, GateRule
from coterie.weights.quantize import DenseWeight

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

RULES = [
    GateRule(8, normalise=True),
    GateRule(2, normalise=False, scale=2.5),
    GateRule(4, normalise=True, scale=0.5),
    GateRule(3, normalise=False, equal=True),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("experts", [12, 17, 64, 130])
def test_equals_twin(rule: GateRule, experts: int) -> None:
    torch.manual_seed(experts)
    weight, bias = torch.randn(experts, 96), torch.randn(experts)
    native = ExpertGate(rule, make_linear([DenseWeight(weight)], "cpu"), bias)
    twin = ExpertGate(rule, make_linear([DenseWeight(weight)], "reference"), bias)
    assert native.route is not None
    assert twin.route is None
    absent = [1, experts - 2]
    for rows in (1, 5, 70):
        hidden = torch.randn(rows, 96) * 0.3
        for router in (native, twin):
            if rows == 5:
                router.exclude(absent)
        ids, weights = native(hidden)
        expected_ids, expected = twin(hidden)
        assert torch.equal(ids, expected_ids)
        assert (weights - expected).abs().max() < 1e-5
        if rows >= 5:
            assert not torch.isin(ids, torch.tensor(absent)).any()


def test_a_row_alone_has_the_same_bits() -> None:
    torch.manual_seed(3)
    router = ExpertGate(RULES[0], make_linear([DenseWeight(torch.randn(64, 160))], "cpu"))
    hidden = torch.randn(40, 160)
    ids, weights = router(hidden)
    for row in range(0, 40, 7):
        alone = router(hidden[row : row + 1])
        assert torch.equal(alone[0][0], ids[row])
        assert torch.equal(alone[1][0], weights[row])
