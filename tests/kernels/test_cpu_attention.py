"""Native paged attention: equal to the torch twin; bits free of batch and chunking."""

from __future__ import annotations

import pytest
import torch

from coterie.kernels.cpu import layers as cpu
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.reference import layers as reference
from tests.helpers.kernels.kernel_inputs import cache_for, one_row, paged_batch

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

# Short and long, one row and many, tile (64) and split (512) borders on both sides.
SPEC = (
    (700, 1),
    (0, 37),
    (1, 1),
    (1100, 5),
    (520, 3),
    (63, 1),
    (64, 1),
    (0, 1),
    (511, 1),
    (512, 60),
    (30, 4),
)
SHAPES = [
    (9, 3, 64, 16), (8, 1, 128, 8), (4, 4, 80, 32), (6, 2, 16, 16), (5, 1, 96, 16), (2, 2, 12, 16),
    (64, 2, 32, 16),
]  # heads, kv_heads, head_dim, block_size  # fmt: skip


def limit(dtype: torch.dtype) -> float:
    """AMX tiles round queries and weights to bf16 where the cache is bf16."""
    library = native()
    rounded = dtype == torch.bfloat16 and library is not None and "amx" in library.isa
    return 3e-2 if rounded else 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,kv_heads,head_dim,block_size", SHAPES)
def test_equals_reference(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads * head_dim)
    batch = paged_batch(SPEC, block_size)
    kv = cache_for(batch, kv_heads, head_dim, dtype)
    q = torch.randn(len(batch.positions), heads, head_dim) * 2
    want = reference.paged_attention(q, kv, batch, head_dim**-0.5)
    got = cpu.paged_attention(q, kv, batch, head_dim**-0.5)
    assert (got - want).abs().max() < limit(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_alone_has_the_same_bits(dtype: torch.dtype) -> None:
    """A prefilled row equals the row decoded on its own: neither neighbours nor chunks matter."""
    torch.manual_seed(7)
    batch = paged_batch(SPEC)
    kv = cache_for(batch, 3, 64, dtype)
    q = torch.randn(len(batch.positions), 9, 64)
    whole = cpu.paged_attention(q, kv, batch, 0.125)
    for sequence in range(len(SPEC)):
        first, end = batch.query_starts[sequence : sequence + 2].tolist()
        for row in range(first, end, 3):
            alone = cpu.paged_attention(q[row : row + 1], kv, one_row(batch, sequence, row), 0.125)
            assert torch.equal(alone[0], whole[row])


def test_many_sequences_and_threads_keep_bits() -> None:
    """Enough splits that tasks walk all KV heads together: another schedule, the same bits."""
    torch.manual_seed(8)
    batch = paged_batch([(1500, 1)] * 12)
    kv = cache_for(batch, 2, 32, torch.bfloat16)
    q = torch.randn(12, 4, 32)
    whole = cpu.paged_attention(q, kv, batch, 0.2)
    error = (whole - reference.paged_attention(q, kv, batch, 0.2)).abs().max()
    assert error < limit(torch.bfloat16)
    for row in range(12):
        alone = cpu.paged_attention(q[row : row + 1], kv, one_row(batch, row, row), 0.2)
        assert torch.equal(alone[0], whole[row])


def test_extreme_scores_stay_finite() -> None:
    torch.manual_seed(9)
    batch = paged_batch([(200, 3), (0, 5)])
    kv = cache_for(batch, 1, 16, torch.float32)
    q = torch.randn(8, 2, 16) * 1e3
    want = reference.paged_attention(q, kv, batch, 1.0)
    got = cpu.paged_attention(q, kv, batch, 1.0)
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() < 1e-3


def test_unwritten_cache_is_never_read() -> None:
    """Slots past a context hold whatever was there: NaN must not leak."""
    torch.manual_seed(10)
    batch = paged_batch([(5, 1), (0, 9)])
    kv = cache_for(batch, 2, 64, torch.bfloat16)
    clean = cpu.paged_attention(q := torch.randn(10, 4, 64), kv, batch, 0.1)
    for sequence, context in enumerate(batch.context_lens.tolist()):
        kv[:, batch.block_tables[sequence, 0].long(), :, context:] = float("nan")
    assert torch.equal(cpu.paged_attention(q, kv, batch, 0.1), clean)
