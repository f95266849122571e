"""The native decoder against the torch one, and against itself in other batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.cpu import layers as cpu
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.decoder import DecoderShape
from coterie.kernels.reference import layers as reference
from coterie.weights.kinds import BLOCK_KINDS
from tests.helpers.kernels.kernel_inputs import (
    ALL_KINDS,
    KINDS,
    cache_for,
    decoder_layers,
    paged_batch,
    rope_tables,
)

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

SMOLLM = DecoderShape(9, 3, 64, 576, 1536, 1e-5, 64**-0.5)
SMALL = DecoderShape(6, 2, 32, 96, 160, 1e-6, 0.17)
WIDE_HEADS = DecoderShape(4, 4, 80, 64, 96, 1e-5, 80**-0.5)
# rows of whole blocks of every kind
IN_BLOCKS = DecoderShape(4, 2, 64, 256, 512, 1e-6, 0.125)
CASES = [
    *(
        (kind, *case)
        for kind in KINDS
        for case in [(SMOLLM, False), (SMALL, True), (WIDE_HEADS, True)]
    ),
    *((kind, IN_BLOCKS, True) for kind in BLOCK_KINDS),
]


@pytest.mark.parametrize(("kind", "shape", "extras"), CASES)
def test_equals_reference(kind: str, shape: DecoderShape, extras: bool) -> None:
    torch.manual_seed(11)
    stacks = decoder_layers(shape, [kind] * 2, ("cpu", "reference"), extras)
    cos, sin = rope_tables(1000, shape.head_dim)
    batch = paged_batch([(700, 1), (0, 37), (1, 1), (90, 5)])
    cache = cache_for(batch, shape.num_kv_heads, shape.head_dim, torch.float32)
    mine, theirs = ([cache.clone() for _ in range(2)] for _ in range(2))
    hidden = torch.randn(len(batch.positions), shape.hidden)
    before = hidden.clone()
    got = cpu.NativeDecoder(shape, stacks["cpu"], cos, sin).forward(hidden, mine, batch)
    want = reference.decoder(shape, stacks["reference"], cos, sin, hidden, theirs, batch)
    library = native()
    rounded = kind == "bf16" and library is not None and "amx" in library.isa
    limit = 2e-2 if rounded else 1e-5 if kind in ("fp32", "bf16") else 3e-4
    assert (got - want).abs().max() / want.abs().max() < limit
    assert torch.equal(hidden, before)
    for layer, other in zip(mine, theirs, strict=True):
        assert (layer - other).abs().max() < 1e3 * limit


def _generate(
    decoder: cpu.NativeDecoder, shape: DecoderShape, x: Tensor, chunks: list[int]
) -> Tensor:
    """Rows of one sequence fed in chunks."""
    kv = [torch.zeros(2, 8, shape.num_kv_heads, 16, shape.head_dim).bfloat16() for _ in ALL_KINDS]
    table = torch.tensor([[5, 2, 7, 1, 3]], dtype=torch.int32)
    outputs, start = [], 0
    for count in chunks:
        positions = torch.arange(start, start + count)
        batch = AttentionBatch(
            positions,
            table[0, positions // 16].long() * 16 + positions % 16,
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([start + count], dtype=torch.int32),
            table,
            16,
        )
        outputs.append(decoder.forward(x[start : start + count], kv, batch))
        start += count
    return torch.cat(outputs)


def test_chunks_do_not_change_bits() -> None:
    torch.manual_seed(12)
    layers = decoder_layers(IN_BLOCKS, ALL_KINDS, ("cpu",), extras=True)["cpu"]
    decoder = cpu.NativeDecoder(IN_BLOCKS, layers, *rope_tables(100, IN_BLOCKS.head_dim))
    x = torch.randn(70, IN_BLOCKS.hidden)
    whole = _generate(decoder, IN_BLOCKS, x, [70])
    for chunks in ([1] * 70, [33, 1, 1, 35], [7] * 10):
        assert torch.equal(_generate(decoder, IN_BLOCKS, x, chunks), whole)


def test_layers_may_run_in_pieces() -> None:
    torch.manual_seed(13)
    layers = decoder_layers(SMALL, KINDS, ("cpu",))["cpu"]
    decoder = cpu.NativeDecoder(SMALL, layers, *rope_tables(100, SMALL.head_dim))
    batch = paged_batch([(3, 2), (40, 1)])
    cache = cache_for(batch, SMALL.num_kv_heads, SMALL.head_dim, torch.bfloat16)
    hidden = torch.randn(3, SMALL.hidden)
    whole = decoder.forward(hidden, [cache.clone() for _ in KINDS], batch)
    kv = [cache.clone() for _ in KINDS]
    for first, last in ((0, 1), (1, 3), (3, None)):
        hidden = decoder.forward(hidden, kv, batch, first, last)
    assert torch.equal(hidden, whole)


def test_refuses_products_it_cannot_run() -> None:
    layers = decoder_layers(SMALL, ["fp32"], ("reference",))["reference"]
    with pytest.raises(ConfigError, match="packed"):
        cpu.NativeDecoder(SMALL, layers, *rope_tables(10, SMALL.head_dim))


def test_rms_norm_equals_reference() -> None:
    torch.manual_seed(14)
    for width in (1, 7, 64, 577):
        x, scale = torch.randn(5, width), torch.rand(width)
        want = reference.rms_norm(x, scale, 1e-5)
        assert torch.allclose(cpu.rms_norm(x, scale, 1e-5), want, rtol=2e-6, atol=1e-7)


def test_a_cache_of_another_shape_at_the_same_address() -> None:
    """Memory comes back: a longer cache may start where a freed shorter one did."""
    torch.manual_seed(5)
    layers = decoder_layers(SMALL, ["fp32"], ("cpu",))["cpu"]
    tables = rope_tables(1000, SMALL.head_dim)
    memory = torch.zeros(2 * 64 * SMALL.kv_size * 16)
    decoder = cpu.NativeDecoder(SMALL, layers, *tables)
    for spec in ([(0, 5)], [(0, 40), (100, 3)]):
        batch = paged_batch(spec)
        cache = cache_for(batch, SMALL.num_kv_heads, SMALL.head_dim, torch.float32)
        moved = memory[: cache.numel()].view(cache.shape)
        moved.copy_(cache)
        hidden = torch.randn(len(batch.positions), SMALL.hidden)
        fresh = cpu.NativeDecoder(SMALL, layers, *tables).forward(hidden, [cache], batch)
        assert torch.equal(decoder.forward(hidden, [moved], batch), fresh)
