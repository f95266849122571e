"""The padded inputs of a captured decode step; capturing itself needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from coterie.core.lane import GPU_STEP_TOKENS, LaneConfig
from coterie.kernels.batch import AttentionBatch, graph_family, places_of
from coterie.kernels.patch import PARTS, Patch, PatchStack, Segment
from coterie.models.base import read_spec
from coterie.models.build.cuda_graph import (
    SIZES,
    DecodeGraphs,
    DecodeInputs,
    PromptGraphs,
    captured_sizes,
)
from coterie.models.build.graph_memory import GraphMemory, estimate_graph_bytes
from coterie.models.spec import ModelSpec
from coterie.weights.checkpoint import open_checkpoint
from coterie.workers.contract import WorkerSpec
from coterie.workers.host import _graph_bytes
from tests.helpers.models.tiny import tiny_checkpoint


def step(lengths: list[int], width: int) -> tuple[torch.Tensor, AttentionBatch, torch.Tensor]:
    count = len(lengths)
    batch = AttentionBatch(
        positions=torch.tensor(lengths) - 1,
        slots=torch.arange(count) * 8 + 3,
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.arange(1, 1 + count * width, dtype=torch.int32).view(count, width),
        block_size=8,
    )
    return torch.arange(10, 10 + count), batch, torch.arange(count).flip(0)


def test_fill_copies_live_rows_and_pads_the_rest() -> None:
    inputs = DecodeInputs(4, 6, 8, torch.device("cpu"))
    addresses = inputs.token_ids.data_ptr(), inputs.batch.block_tables.data_ptr()
    inputs.fill(*step([5, 17, 30], 4))
    assert inputs.token_ids[:3].tolist() == [10, 11, 12]
    assert inputs.rows.tolist() == [2, 1, 0, 3]
    assert inputs.batch.context_lens.tolist() == [5, 17, 30, 0]
    assert inputs.batch.slots.tolist() == [3, 11, 19, -1]
    assert inputs.batch.positions[:3].tolist() == [4, 16, 29]
    assert inputs.batch.block_tables[1].tolist() == [5, 6, 7, 8, 0, 0]
    assert (inputs.token_ids.data_ptr(), inputs.batch.block_tables.data_ptr()) == addresses


def test_a_smaller_step_leaves_no_live_row_behind() -> None:
    inputs = DecodeInputs(4, 6, 8, torch.device("cpu"))
    inputs.fill(*step([5, 17, 30, 2], 4))
    inputs.fill(*step([9], 2))
    assert inputs.batch.context_lens.tolist() == [9, 0, 0, 0]
    assert inputs.batch.slots.tolist() == [3, -1, -1, -1]
    assert inputs.batch.query_starts.tolist() == [0, 1, 2, 3, 4]


CPU = torch.device("cpu")


def stack_of(rank: int, part: str = "q", layer: int = 0) -> PatchStack:
    low = Patch(torch.ones(rank, 4), torch.ones(rank, 4))
    return PatchStack(f"{part}-{rank}", 0, {(layer, part): low})


def test_rows_find_their_patches_at_a_fixed_address() -> None:
    inputs = DecodeInputs(4, 6, 8, torch.device("cpu"))
    inputs.adapt(2, "wide")
    rows = inputs.batch.patch_rows
    assert rows is not None
    address, ranks = rows.table.data_ptr(), rows.table[:, len(PARTS) + PARTS.index("up"), 5]
    ids, batch, wanted = step([5, 17, 30], 4)
    one, two = stack_of(3, "up", 1), stack_of(5, "up", 1)
    cut = Segment(0, 1, two), Segment(1, 3, one)
    inputs.fill(ids, batch, wanted, places_of(cut, CPU))
    assert ranks.tolist() == [5, 3, 3, 0]
    inputs.fill(ids, batch, wanted, places_of((Segment(2, 3, two),), CPU))
    assert ranks.tolist() == [0, 0, 5, 0]
    ids, batch, wanted = step([5], 4)
    inputs.fill(ids, batch, wanted)
    assert not rows.table.any()
    assert rows.table.data_ptr() == address


def test_a_stack_of_soft_tokens_alone_decodes_as_the_base() -> None:
    device = torch.device("cpu")
    soft = Segment(0, 2, PatchStack("soft", 0, {}, torch.ones(3, 4)))
    assert places_of((soft,), device) == ()
    head = Segment(0, 2, PatchStack("head", 0, {(-1, "head"): Patch(out_scale=torch.ones(4))}))
    assert [graph_family(places_of(cut, device), 2) for cut in ((soft,), (soft, head))] == [
        "plain",
        "",
    ]


def test_another_stack_at_the_same_place_is_seen() -> None:
    """A pool composes a stack again after it was pushed out: same key, same slot, other bytes."""
    inputs = DecodeInputs(2, 6, 8, torch.device("cpu"))
    inputs.adapt(1, "wide")
    ids, batch, wanted = step([5, 6], 4)
    rows = inputs.batch.patch_rows
    assert rows is not None
    for stack in (stack_of(3), stack_of(3)):
        inputs.fill(ids, batch, wanted, places_of((Segment(0, 2, stack),), CPU))
        a = stack.patches[0, "q"].a
        assert a is not None
        assert rows.table[:, 0, 0].tolist() == [a.data_ptr()] * 2


def test_steps_beyond_the_kernels_run_eagerly() -> None:
    """Before anything is captured: this machine may have no GPU."""
    device = torch.device("cpu")
    graphs = DecodeGraphs(lambda *step: (torch.zeros(1), None), 64, device)
    ids, batch, wanted = step([5, 6], 4)
    kv = [torch.zeros(2, 9, 1, 8, 4)]
    scaled = PatchStack("scaled", 0, {(0, "q"): Patch(in_scale=torch.ones(4))})
    head = PatchStack("head", 0, {(-1, "head"): Patch(out_scale=torch.ones(4))})
    # a prompt's last row may be a soft token
    soft = PatchStack("soft", 0, {}, torch.ones(3, 4))
    for stack in (scaled, head, soft, stack_of(3, layer=1), stack_of(300)):
        given = replace(batch, patches=(Segment(1, 2, stack),))
        assert graphs.forward(ids, given, kv, wanted) is None


class Captures:
    """Stands for a device: every capture takes `each` bytes of `free`."""

    def __init__(self, patch: pytest.MonkeyPatch, free: int, each: int) -> None:
        self.free, self.each = free, each
        self.sizes: list[tuple[Any, ...]] = []
        patch.setattr(GraphMemory, "_free_bytes", lambda _: self.free)
        patch.setattr(GraphMemory, "_held_bytes", lambda _: -self.free)
        patch.setattr(DecodeGraphs, "_capture", self.capture)
        patch.setattr(PromptGraphs, "_capture", self.capture)

    def capture(self, size: int, kv: Any, block_size: int, *rest: Any) -> tuple[Any, ...]:
        self.free -= self.each
        self.sizes.append((size, *rest))
        return self.sizes[-1]


def test_all_sizes_are_captured_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(monkeypatch, 10 << 30, 1 << 20)
    graphs = DecodeGraphs(lambda *step: (torch.zeros(1), None), 4096, CPU)
    kv = [torch.zeros(2, 9, 1, 8, 4)]
    done = list(graphs.prepare(kv, 8, 20))
    # the largest first, since the others find room in its memory; short and long contexts
    assert captures.sizes == [
        (size, "plain", width // 8) for size in (32, 16, 8, 4, 2, 1) for width in (2048, 4096)
    ]
    assert done[0] == (0, 12) and done[-1] == (12, 12)
    assert all(b == a + 1 for (a, _), (b, _) in pairwise(done))
    assert graphs.memory.stats() == {
        "graphs": 12,
        "graph_bytes": 12 * (5 << 20),
        "graph_reserved_bytes": 0,
    }
    list(graphs.prepare(kv, 8, 20))
    assert len(captures.sizes) == 12
    prompts = PromptGraphs(lambda *step: (torch.zeros(1), None), CPU)
    prompts.prepare(kv, 8, 300)
    assert captures.sizes[12:] == [(256,), (192,), (128,)]


def test_steps_without_room_for_a_graph_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(monkeypatch, 10 << 30, 3 << 20)
    graphs = DecodeGraphs(lambda *step: (torch.zeros(1), None), 64, CPU)
    graphs.memory = GraphMemory(CPU, 9 << 20)
    kv = [torch.zeros(2, 9, 1, 8, 4)]
    list(graphs.prepare(kv, 8, 20))
    assert [size for size, *_ in captures.sizes] == [32, 16]
    assert graphs.memory.used == 14 << 20 and not graphs.memory.has_room
    assert graphs.forward(*step([5, 6], 4)[:2], kv, torch.arange(2)) is None


def test_a_device_that_is_almost_full_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(monkeypatch, 100 << 20, 1 << 20)
    graphs = DecodeGraphs(lambda *step: (torch.zeros(1), None), 64, CPU)
    graphs.memory = GraphMemory(CPU, 5 << 30)
    list(graphs.prepare([torch.zeros(2, 9, 1, 8, 4)], 8, 4))
    assert captures.sizes == []


def test_a_step_whose_capture_finds_no_memory_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[None] = []

    def capture(*_: Any) -> Any:
        tries.append(None)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    monkeypatch.setattr(PromptGraphs, "_capture", capture)
    kv = [torch.zeros(2, 9, 1, 8, 4)]
    graphs = DecodeGraphs(lambda *step: (torch.zeros(1), None), 64, CPU)
    prompts = PromptGraphs(lambda *step: (torch.zeros(1), None), CPU)
    graphs.memory = GraphMemory(CPU, 5 << 30)
    fresh = replace(step([5], 4)[1], fresh=((0, 128),))
    for _ in range(3):
        assert graphs.forward(*step([5, 6], 4)[:2], kv, torch.arange(2)) is None
        assert prompts.forward(torch.zeros(128), fresh, kv, torch.arange(1)) is None
    # not again at every step
    assert len(tries) == 2
    assert graphs.memory.stats()["graphs"] == 0


def test_what_is_reserved_for_graphs() -> None:
    """Logits of all sizes are the largest part; a small model takes less than a gigabyte."""
    assert captured_sizes(1) == (1,) and captured_sizes(20)[-1] == 32
    assert captured_sizes(4096) == SIZES
    small = ModelSpec("m", 30, 576, 1536, 9, 3, 64, 49_152, 8192, 1e-6, True, (), None)
    few, many = (estimate_graph_bytes(small, "bf16", captured_sizes(n), 512) for n in (1, 256))
    assert 256 << 20 < few < 512 << 20
    assert few + 2 * 511 * 49_152 * 4 < many < 1 << 30
    # with adapters each size has four graphs
    both = estimate_graph_bytes(small, "bf16", captured_sizes(256), 512, 4)
    assert both - many > 3 * 2 * 511 * 49_152 * 4


def test_prompts_of_the_default_length_are_reserved_for() -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    shape = read_spec(checkpoint, None)

    def reserved(max_step_tokens: int) -> int:
        lane = LaneConfig("a", max_step_tokens=max_step_tokens)
        return _graph_bytes(WorkerSpec("r0", "", (lane,)), shape, checkpoint, "cuda")

    assert reserved(0) == reserved(GPU_STEP_TOKENS) > reserved(512)


@pytest.mark.parametrize("reads", [True, False])
def test_steps_with_adapters_have_a_graph_of_their_own(reads: bool) -> None:
    def compute(ids: torch.Tensor, batch: AttentionBatch, *_: Any) -> Any:
        if batch.patch_rows is not None:
            batch.patch_rows.read = reads
        return torch.zeros(len(ids), 4), None

    graphs, kv = DecodeGraphs(compute, 64, CPU), [torch.zeros(2, 4, 1, 8, 8)] * 2
    half = torch.bfloat16
    patch = Patch(torch.zeros(3, 16, dtype=half), torch.zeros(3, 16, dtype=half))
    stack = PatchStack("a", 0, {(1, "q"): patch})
    plain = graphs.step(3, 9, kv, 8)
    assert plain is not None and plain.inputs.batch.patch_rows is None
    places = places_of((Segment(1, 2, stack),), CPU)
    adapted = graphs.step(3, 9, kv, 8, places)
    if not reads:
        assert adapted is None and graphs.step(3, 9, kv, 8) is plain
        return
    assert adapted is not None and adapted is not plain
    rows = adapted.inputs.batch.patch_rows
    assert rows is not None and rows.kind == 0
    # the same graph for other rows
    assert graphs.step(3, 9, kv, 8, places_of((Segment(2, 3, stack),), CPU)) is adapted
