"""Row norms of packed weights: those of the values that products multiply by."""

from __future__ import annotations

import threading

import pytest
import torch

from coterie.kernels.cpu.build import use_threads_here
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.cpu.layers import PackedLinear
from coterie.weights.quantize import dense
from tests.helpers.kernels.kernel_inputs import ALL_KINDS, fitting, weight

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("rows,width", [(1, 32), (17, 64), (50, 96), (576, 1536)])
def test_norms_are_those_of_the_values(kind: str, rows: int, width: int) -> None:
    torch.manual_seed(rows)
    width = fitting(kind, width)
    stored = weight(kind, rows, width)
    want = dense(stored).double().square().sum(1)
    made = PackedLinear([stored])
    torch.testing.assert_close(made.row_norms_squared(), want, rtol=1e-6, atol=1e-30)
    # the identity shows what the product multiplies by
    seen = made(torch.eye(width)).double().square().sum(0)
    torch.testing.assert_close(made.row_norms_squared(), seen, rtol=1e-3, atol=1e-30)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_widths_that_are_no_multiple(kind: str) -> None:
    stored = weight(kind, 20, 37)
    want = dense(stored).double().square().sum(1)
    torch.testing.assert_close(PackedLinear([stored]).row_norms_squared(), want, rtol=1e-6, atol=0)


def test_one_weight_of_several() -> None:
    """Alone it gives the very bits that it gives beside others, and the same norms."""
    torch.manual_seed(3)
    stored = [weight(kind, rows, 64) for kind, rows in (("int8", 33), ("int4", 16), ("fp32", 5))]
    whole = PackedLinear(stored)
    x, norms, first = torch.randn(7, 64), whole.row_norms_squared(), 0
    for one in stored:
        last = first + one.shape[0]
        alone = whole.whole_weight(first, one.shape[0])
        assert alone is not None and alone.out_features == one.shape[0]
        assert torch.equal(alone(x), whole(x)[:, first:last])
        assert torch.equal(alone.row_norms_squared(), norms[first:last])
        first = last
    assert whole.whole_weight(0, 34) is None and whole.whole_weight(1, 33) is None


def test_threads_of_one_thread() -> None:
    """What a thread may use is its own affair."""
    before, seen = torch.get_num_threads(), []

    def work() -> None:
        use_threads_here(before + 1)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before + 1] and torch.get_num_threads() == before
