"""Blocks of the slab: no gaps, no overlaps, and the cheapest neighbours make room."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.adapters.residency import ALIGN, AdapterSlab, SlabBlock

CPU = torch.device("cpu")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6 * ALIGN)), max_size=60))
def test_blocks_never_overlap_and_holes_join(steps: list[tuple[int, int]]) -> None:
    slab = AdapterSlab(20 * ALIGN + 7, CPU)
    held: dict[str, SlabBlock] = {}
    for number, (action, size) in enumerate(steps):
        if action == 0 and held:
            slab.free(held.pop(list(held)[size % len(held)]))
        else:
            block = slab.reserve(size, f"s{number}")
            if block is not None:
                held[f"s{number}"] = block
                assert block.nbytes >= size and slab.view(block).numel() == block.nbytes
        slab.check()
        spans = sorted((b.offset, b.offset + b.nbytes) for b in held.values())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert slab.used_bytes == sum(b.nbytes for b in held.values()) <= slab.nbytes
    for block in held.values():
        slab.free(block)
    assert slab.reserve(slab.nbytes, "all") is not None


def test_the_first_hole_that_fits_is_taken() -> None:
    slab = AdapterSlab(8 * ALIGN, CPU)
    blocks = [slab.reserve(ALIGN * size, name) for name, size in (("a", 2), ("b", 1), ("c", 3))]
    assert all(blocks) and slab.reserve(3 * ALIGN, "d") is None
    assert blocks[0] is not None and blocks[2] is not None
    slab.free(blocks[0])
    slab.free(blocks[2])
    again = slab.reserve(2 * ALIGN, "e")
    assert again is not None and again.offset == 0
    wide = slab.reserve(5 * ALIGN, "f")
    assert wide is not None and wide.offset == 3 * ALIGN


def test_the_cheapest_run_of_neighbours_goes() -> None:
    slab = AdapterSlab(6 * ALIGN, CPU)
    costs: dict[str, tuple[float, ...] | None] = {}
    for name, cost in (("a", 9), ("b", 1), ("c", 5), ("d", 2), ("e", 3), ("f", 4)):
        slab.reserve(ALIGN, name)
        costs[name] = (float(cost),)
    assert slab.cheapest(ALIGN, costs.get) == ["b"]
    # the oldest two are not neighbours: d and e cost less than anything around b
    assert slab.cheapest(2 * ALIGN, costs.get) == ["d", "e"]
    assert slab.cheapest(3 * ALIGN, costs.get) == ["d", "e", "f"]
    costs["e"] = None
    assert slab.cheapest(3 * ALIGN, costs.get) == ["b", "c", "d"]
    costs["c"] = None
    assert slab.cheapest(3 * ALIGN, costs.get) is None
    assert slab.cheapest(7 * ALIGN, costs.get) is None
