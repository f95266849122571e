"""The padded inputs of a captured decode step; capturing itself needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from coterie.kernels.batch import AttentionBatch, graph_family, places_of
from coterie.kernels.patch import PARTS, Patch, PatchStack, Segment
from coterie.models.build.cuda_graph import DecodeGraphs, DecodeInputs


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
    graphs = DecodeGraphs(lambda *step: torch.zeros(1), 64, device)
    ids, batch, wanted = step([5, 6], 4)
    kv = [torch.zeros(2, 9, 1, 8, 4)]
    scaled = PatchStack("scaled", 0, {(0, "q"): Patch(in_scale=torch.ones(4))})
    head = PatchStack("head", 0, {(-1, "head"): Patch(out_scale=torch.ones(4))})
    # a prompt's last row may be a soft token
    soft = PatchStack("soft", 0, {}, torch.ones(3, 4))
    for stack in (scaled, head, soft, stack_of(3, layer=1), stack_of(300)):
        given = replace(batch, patches=(Segment(1, 2, stack),))
        assert graphs.forward(ids, given, kv, wanted) is None
