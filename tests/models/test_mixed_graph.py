"""Padded steps of prompts and decoding rows give the tokens of plain ones; capturing itself needs a
GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie.kernels.batch import AttentionBatch
from coterie.models.arch import llama
from coterie.models.build.cuda_graph import DecodeGraphs
from coterie.models.build.graph_memory import GraphMemory, estimate_graph_bytes
from coterie.models.build.mixed_graph import ROWS, SEQUENCES, MixedGraphs, mixed_sizes
from tests.helpers.models.toy_model import (
    VOCAB,
    ToyModel,
    drain,
    make_assignment,
    make_engine,
    make_lane,
    outputs,
    padded_forward,
    true_output,
)

SPEC = llama.read(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    },
    None,
)


class MixedToy(ToyModel):
    """Computes the live rows of padded steps."""

    def __init__(self) -> None:
        super().__init__()
        graphs = DecodeGraphs(padded_forward(self), 4096, torch.device("cpu"))
        self.mixed, self.num_mixed = MixedGraphs(self._live, graphs, SPEC, 1), 0

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], logits_rows: Tensor
    ) -> Tensor:
        found = None
        if batch.phase != "decode":
            found = self.mixed.forward(token_ids, batch, kv, logits_rows)
        if found is None:
            return super().forward(token_ids, batch, kv, logits_rows)
        self.num_mixed += 1
        return found[0].clone()

    def _live(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> tuple[Tensor, None]:
        assert len(token_ids) in ROWS and len(rows) in SEQUENCES
        live, sequences = int((batch.slots >= 0).sum()), int((batch.context_lens > 0).sum())
        starts = batch.query_starts.tolist()
        assert starts == sorted(starts) and starts[-1] == len(token_ids)
        assert set(starts[sequences:-1]) == {live} and not batch.context_lens[sequences:].any()
        if not live:
            return torch.zeros(len(rows), VOCAB), None
        own = AttentionBatch(
            batch.positions[:live],
            batch.slots[:live],
            batch.query_starts[: sequences + 1],
            batch.context_lens[:sequences],
            batch.block_tables[:sequences],
            batch.block_size,
        )
        # rows left from another step
        rows = rows.clamp(max=live - 1)
        return super().forward(token_ids[:live], own, kv, rows), None


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_plain_steps(seed: int) -> None:
    rng, model = random.Random(seed), MixedToy()
    lane = make_lane(num_blocks=512, max_sequences=40, max_step_tokens=rng.choice([48, 64, 400]))
    engine = make_engine(lane, model=model)
    requests = [
        make_assignment(
            f"r{number}",
            [rng.randint(1, VOCAB - 1) for _ in range(rng.randint(1, 30))],
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice([0.0, 1.0]),
        )
        for number in range(36)
    ]
    events = []
    for request in requests:
        engine.add(request)
        if rng.random() < 0.5:
            events += engine.step()
    found = outputs(events + drain(engine))
    assert all(found[one.request_id, 0] == true_output(one) for one in requests)
    assert model.num_mixed


def test_padding_must_cost_nothing() -> None:
    """A step that takes the device long is captured only if it has exactly a captured size."""
    model = ToyModel()
    graphs = DecodeGraphs(padded_forward(model), 4096, torch.device("cpu"))
    kv, calls = model.new_kv(9, 4), []

    def compute(*step: object) -> tuple[Tensor, None]:
        calls.append(step)
        return torch.zeros(SEQUENCES[0], VOCAB), None

    mixed = MixedGraphs(compute, graphs, SPEC, 10**12)
    for count, captured in ((400, False), (512, True)):
        batch = AttentionBatch(
            torch.arange(count),
            torch.arange(count),
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([count], dtype=torch.int32),
            torch.zeros((1, 200), dtype=torch.int32),
            4,
        )
        ids, rows = torch.zeros(count, dtype=torch.int64), torch.tensor([count - 1])
        found = [mixed.forward(ids, batch, kv, rows) for _ in range(2)]
        assert found[0] is None and (found[1] is not None) is captured
    assert calls


def test_all_mixes_are_captured_before_the_first_request() -> None:
    """For the steps that a lane can have; what was captured runs at its first use."""
    model = MixedToy()
    lane = make_lane(num_blocks=512, max_sequences=40, max_step_tokens=600)
    kv = model.new_kv(512, lane.block_size)
    done = list(model.mixed.prepare(kv, lane, "bf16"))
    rows, rooms, contexts = (768, 512, 384), (256, 32), (4096, 2048)
    keys = [
        (size, room, context // lane.block_size, lane.block_size)
        for size in rows
        for room in rooms
        for context in contexts
    ]
    captured = model.mixed._captured[kv[0]]
    assert list(captured) == keys and all(captured.values())
    assert done[0] == (0, 12) and done[-1] == (12, 12)
    # logits of the same number of sequences share their memory
    assert len({mix.logits.data_ptr() for mix in captured.values()}) == len(rooms)
    graphs = model.mixed._graphs
    assert graphs.memory.count == 12
    list(model.mixed.prepare(kv, lane, "bf16"))
    assert graphs.memory.count == 12
    assert list(model.mixed.prepare(kv, lane, "fp32")) == [(0, 0)]


def test_mixes_leave_room_for_other_graphs() -> None:
    model = MixedToy()
    lane = make_lane(num_blocks=512, max_sequences=40, max_step_tokens=600)
    kv = model.new_kv(512, lane.block_size)
    memory = model.mixed._graphs.memory = GraphMemory(torch.device("cpu"), 40 << 20)
    list(model.mixed.prepare(kv, lane, "bf16"))
    assert 0 < memory.count < 12 and memory.used <= 30 << 20


def test_what_is_reserved_for_mixes() -> None:
    small = replace(SPEC, vocab=49_152)
    mixes = mixed_sizes(small, "bf16", 300 << 20, 8192, 64)
    assert [mix.rows for mix in mixes[::2]] == list(reversed(ROWS))
    assert {mix.sequences for mix in mixes} == set(SEQUENCES)
    # a model whose large steps take long
    assert max(mix.rows for mix in mixed_sizes(small, "bf16", 2 << 30, 8192, 64)) == 1536
    assert mixed_sizes(small, "bf16", 3 << 30, 8192, 64) == []
    without, with_mixes = (
        estimate_graph_bytes(small, "bf16", (1, 2), 2048, 1, given) for given in ([], mixes)
    )
    # launches of 40 graphs, and logits of two numbers of sequences
    assert with_mixes - without > (40 * 4 << 20) + sum(SEQUENCES) * 49_152 * 4
