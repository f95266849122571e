"""The torch twins against torch's own operators."""

from __future__ import annotations

import torch
from torch.nn import functional

from coterie.kernels.batch import AttentionBatch
from coterie.kernels.linear import ReferenceLinear
from coterie.kernels.reference import layers as reference
from coterie.weights.quantize import dense
from tests.helpers.kernels.kernel_inputs import KINDS, cache_for, paged_batch, weight


def test_attention_equals_sdpa() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(10, 6, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    batch = paged_batch([(0, 10)], block_size=8)
    kv = cache_for(batch, 2, 16, torch.float32)
    reference.write_kv(k, v, kv, batch.slots)
    heads_first = [part.transpose(0, 1)[None] for part in (q, k, v)]
    want = functional.scaled_dot_product_attention(
        heads_first[0], heads_first[1], heads_first[2], is_causal=True, enable_gqa=True, scale=0.25
    )
    got = reference.paged_attention(q, kv, batch, 0.25)
    assert torch.allclose(got, want[0].transpose(0, 1), atol=1e-6)


def test_attention_in_pieces_equals_attention_at_once() -> None:
    torch.manual_seed(1)
    batch = paged_batch([(0, 600)])
    kv = cache_for(batch, 1, 16, torch.float32)
    q = torch.randn(600, 2, 16)
    whole = reference.paged_attention(q, kv, batch, 0.25)
    tail = AttentionBatch(
        batch.positions[-5:],
        batch.slots[-5:],
        torch.tensor([0, 5]),
        batch.context_lens,
        batch.block_tables,
        16,
    )
    assert torch.allclose(reference.paged_attention(q[-5:], kv, tail, 0.25), whole[-5:], atol=1e-6)


def test_rms_norm_equals_torch() -> None:
    torch.manual_seed(2)
    x, scale = torch.randn(4, 48), torch.rand(48)
    assert torch.allclose(
        reference.rms_norm(x, scale, 1e-6), functional.rms_norm(x, (48,), scale, 1e-6), atol=1e-6
    )


def test_rotary_turns_pairs_of_halves() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    quarter_turn = reference.rotary(x, torch.zeros(1, 2), torch.ones(1, 2))
    assert quarter_turn.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_linear_and_silu() -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 64)
    for kind in KINDS:
        stored = weight(kind, 10, 64)
        want = x @ dense(stored).T
        assert torch.allclose(reference.linear(x, stored), want, atol=1e-6)
        assert torch.allclose(ReferenceLinear([stored, stored])(x), want.repeat(1, 2), atol=1e-6)
    gate, up = x.chunk(2, dim=-1)
    assert torch.allclose(reference.silu_mul(x), gate * torch.sigmoid(gate) * up)
