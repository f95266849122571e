"""Layers that end after attention, and norms over all heads: native against the torch twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie.kernels.cpu import layers as cpu
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.decoder import DecoderLayer, DecoderShape
from coterie.kernels.reference import layers as reference
from tests.helpers.kernels.kernel_inputs import (
    KINDS,
    cache_for,
    decoder_layers,
    paged_batch,
    rope_tables,
)

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

SHAPE = DecoderShape(6, 2, 32, 96, 160, 1e-6, 0.17)


def attention_half(layer: DecoderLayer) -> DecoderLayer:
    return replace(layer, post_norm=None, gate_up=None, down=None)


def both(kinds: list[str], change: list[object]) -> tuple[Tensor, Tensor, cpu.NativeDecoder]:
    """hidden by the native and by the torch decoder; change[i] is applied to layer i of both."""
    stacks = decoder_layers(SHAPE, kinds, ("cpu", "reference"), extras=True)
    for layers in stacks.values():
        layers[:] = [f(layer) for f, layer in zip(change, layers, strict=True)]  # type: ignore
    tables = rope_tables(200, SHAPE.head_dim)
    batch = paged_batch([(70, 1), (0, 9), (30, 2)])
    cache = cache_for(batch, SHAPE.num_kv_heads, SHAPE.head_dim, torch.float32)
    mine, theirs = ([cache.clone() for _ in kinds] for _ in range(2))
    hidden = torch.randn(len(batch.positions), SHAPE.hidden)
    decoder = cpu.NativeDecoder(SHAPE, stacks["cpu"], *tables)
    got = decoder.forward(hidden, mine, batch)
    # layer by layer, in place, is the same as the whole walk
    walked, kv = hidden.clone(), [cache.clone() for _ in kinds]
    for index in range(len(kinds)):
        walked = decoder.forward(walked, kv, batch, index, index + 1, overwrite=True)
    assert torch.equal(walked, got)
    want = reference.decoder(SHAPE, stacks["reference"], *tables, hidden, theirs, batch)
    return got, want, decoder


def limit(kind: str) -> float:
    library = native()
    rounded = kind == "bf16" and library is not None and "amx" in library.isa
    return 2e-2 if rounded else 3e-4 if kind.startswith("int") else 1e-5


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_layers_may_end_after_attention(kind: str) -> None:
    torch.manual_seed(21)
    got, want, _ = both([kind] * 3, [attention_half, lambda layer: layer, attention_half])
    assert (got - want).abs().max() / want.abs().max() < limit(kind)


@needs_compiler
def test_norms_over_all_heads() -> None:
    torch.manual_seed(22)
    whole = {"q_norm": torch.rand(SHAPE.q_size) + 0.5, "k_norm": torch.rand(SHAPE.kv_size) + 0.5}
    got, want, _ = both(["fp32"] * 2, [lambda layer: replace(layer, **whole)] * 2)
    assert (got - want).abs().max() / want.abs().max() < 1e-5
    torch.manual_seed(22)
    by_head, _, _ = both(["fp32"] * 2, [lambda layer: layer] * 2)
    assert not torch.allclose(got, by_head, atol=1e-2)


def test_an_attention_layer_adds_attention_alone() -> None:
    torch.manual_seed(23)
    layer = decoder_layers(SHAPE, ["fp32"], ("reference",))["reference"][0]
    tables = rope_tables(20, SHAPE.head_dim)
    batch = paged_batch([(0, 4)])
    cache = cache_for(batch, SHAPE.num_kv_heads, SHAPE.head_dim, torch.float32)
    hidden = torch.randn(4, SHAPE.hidden)

    def run(one: DecoderLayer) -> Tensor:
        return reference.decoder(SHAPE, [one], *tables, hidden, [cache.clone()], batch)

    half = run(attention_half(layer))
    assert layer.post_norm is not None and layer.gate_up is not None and layer.down is not None
    normed = reference.rms_norm(half, layer.post_norm, SHAPE.eps)
    mlp = layer.down(reference.silu_mul(layer.gate_up(normed)))
    assert torch.equal(run(layer), half + mlp)
