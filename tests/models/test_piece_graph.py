"""Steps in pieces give the logits of whole ones, whatever the padding; capturing itself needs a
GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.kernels.batch import AttentionBatch
from coterie.kernels.patch import PatchStack, Segment
from coterie.models.arch import qwen3_moe
from coterie.models.build.cuda_graph import DecodeGraphs
from coterie.models.build.graph_memory import GraphMemory, estimate_graph_bytes
from coterie.models.build.piece_graph import ROWS, Attend, PieceBuffers, PieceGraphs, piece_sizes

CPU = torch.device("cpu")
LAYERS, WIDTH, VOCAB, TOP_K = 3, 8, 32, 2
SPEC = qwen3_moe.read(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 16,
        "moe_intermediate_size": 4,
        "num_experts": 4,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    None,
)
POOL: Any = SimpleNamespace()


class ToyDecoder:
    """Attention is a sum over the rows before and the cache; experts depend on the choices."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weights = torch.randn(2 * LAYERS, WIDTH, WIDTH, generator=generator) / 8
        self.table = torch.randn(VOCAB, WIDTH, generator=generator)
        self.sizes: list[int] = []

    def new_buffers(self, rows: int) -> PieceBuffers:
        hidden, qkv, mixed, normed = (torch.zeros(rows, WIDTH) for _ in range(4))
        routed = torch.zeros((LAYERS, rows, TOP_K), dtype=torch.int32)
        return PieceBuffers(hidden, qkv, mixed, normed, routed)

    def run_piece(self, index: int, buffers: PieceBuffers, pool: Any) -> None:
        assert pool is POOL
        self.sizes.append(len(buffers.hidden))
        if index:
            buffers.hidden.add_(buffers.mixed @ self.weights[2 * index - 2])
            chosen = buffers.hidden.topk(TOP_K).indices
            buffers.routed[index - 1] = chosen.int()
            buffers.hidden.add_(chosen.float().sum(1, keepdim=True))
        if index == LAYERS:
            buffers.normed.copy_(buffers.hidden.tanh())
            return
        buffers.qkv.copy_(buffers.hidden.tanh() @ self.weights[2 * index + 1])

    def takes(self, batch: AttentionBatch, pool: Any) -> bool:
        return pool is not None

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.table[token_ids]

    def attend(self, hidden: Tensor, batch: AttentionBatch) -> Attend:
        assert len(hidden) == len(batch.positions)

        def run(layer: int, qkv: Tensor, cache: Tensor) -> Tensor:
            assert len(qkv) == len(batch.positions)
            return qkv.cumsum(0) / len(qkv) + cache[0]

        return run

    def logits(self, normed: Tensor) -> Tensor:
        return normed @ self.table.T

    def whole(self, ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor) -> Any:
        """The same in one go."""
        own = self.new_buffers(len(ids))
        own.hidden.copy_(self.embed(ids))
        attend = self.attend(own.hidden, batch)
        for layer in range(LAYERS):
            self.run_piece(layer, own, POOL)
            own.mixed.copy_(attend(layer, own.qkv, kv[layer]))
        self.run_piece(LAYERS, own, POOL)
        return self.logits(own.normed[rows]), own.routed


def step(count: int) -> tuple[Tensor, AttentionBatch, list[Tensor], Tensor]:
    """A part of a prompt beside three decoding rows."""
    batch = AttentionBatch(
        torch.arange(count),
        torch.arange(count),
        torch.tensor([0, 1, 2, 3, count], dtype=torch.int32),
        torch.tensor([4, 5, 6, count], dtype=torch.int32),
        torch.zeros((4, 9), dtype=torch.int32),
        16,
    )
    kv = [torch.randn(2, WIDTH) for _ in range(LAYERS)]
    return torch.randint(VOCAB, (count,)), batch, kv, torch.tensor([0, 1, 2, count - 1])


def opened() -> tuple[ToyDecoder, PieceGraphs, DecodeGraphs]:
    decoder = ToyDecoder()
    graphs = DecodeGraphs(decoder.whole, 4096, CPU)
    return decoder, PieceGraphs(decoder, graphs, SPEC, "bf16"), graphs


def test_pieces_of_padded_steps_are_whole_steps() -> None:
    decoder, pieces, graphs = opened()
    for count in (60, 64, 5, 61, 130, 250, 64, 2057, 2100, 2049):
        given = step(count)
        found = pieces.forward(*given, POOL)
        size = next(size for size in ROWS if size >= count)
        # the first of its size only says that it came
        assert (found is None) == (count in (60, 130, 2057))
        if found is None:
            continue
        assert decoder.sizes[-1] == size
        logits, routed = decoder.whole(*given)
        assert torch.allclose(found[0], logits, atol=1e-5)
        assert found[1] is not None and torch.equal(found[1][:, :count], routed)
    assert graphs.memory.count == 3 * (LAYERS + 1)


def test_steps_that_run_eagerly() -> None:
    _, pieces, _ = opened()
    pieces.prepare(8192, POOL)
    assert sorted(pieces._captured) == list(ROWS) and all(pieces._captured.values())
    assert pieces.forward(*step(100), POOL) is not None
    assert pieces.forward(*step(ROWS[-1] + 1), POOL) is None
    assert pieces.forward(*step(100), None) is None  # type: ignore[arg-type]
    ids, batch, kv, rows = step(100)
    patched = replace(batch, patches=(Segment(0, 1, PatchStack("a", 0, {})),))
    assert pieces.forward(ids, patched, kv, rows, POOL) is None


def test_sizes_without_room_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, pieces, graphs = opened()
    held = [0]
    graphs.memory = GraphMemory(CPU, 64 << 20)
    monkeypatch.setattr(GraphMemory, "_held_bytes", lambda _: held[0])
    new_buffers = decoder.new_buffers

    def taken(rows: int) -> PieceBuffers:
        held[0] += 40 << 20
        return new_buffers(rows)

    monkeypatch.setattr(decoder, "new_buffers", taken)
    pieces.prepare(8192, POOL)
    # the largest, then until three quarters are used: the others have no room
    assert graphs.memory.used <= 48 << 20 and graphs.memory.count % (LAYERS + 1) == 0
    assert pieces.forward(*step(2300), POOL) is not None
    graphs.memory.used = 64 << 20
    pieces._captured.pop(64, None)
    for _ in range(3):
        assert pieces.forward(*step(20), POOL) is None


def test_what_is_reserved_for_pieces() -> None:
    sizes = piece_sizes(SPEC, 8192)
    assert [size.rows for size in sizes] == list(reversed(ROWS))
    assert [size.rows for size in piece_sizes(SPEC, 100)] == [128, 64]
    assert piece_sizes(replace(SPEC, moe=None), 8192) == []
    without, with_pieces = (
        estimate_graph_bytes(SPEC, "bf16", (1, 2), 2048, 1, mixes) for mixes in ([], sizes)
    )
    assert with_pieces - without > len(ROWS) * (LAYERS + 1) * (128 << 10)
