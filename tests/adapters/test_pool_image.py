"""A stack as one run of bytes: whatever is composed comes back, written whole or in pieces."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.adapters.compose import ALIGN, FIELDS, ComposedStack, StackImage
from coterie.kernels.patch import Patch, Site


def composed(seed: int, sites: int, soft: int) -> ComposedStack:
    draw = torch.Generator().manual_seed(seed)

    def maybe(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        tensor = torch.randn(shape, generator=draw).to(dtype)
        return tensor if torch.rand((), generator=draw) < 0.7 else None

    patches: dict[Site, Patch] = {}
    for index in range(sites):
        dtype = (torch.float32, torch.bfloat16)[index % 2]
        rank, wide, tall = 1 + index % 3, 5 + 3 * index, 7 + index
        # a transposed factor is not contiguous
        factor = torch.randn(wide, rank, generator=draw).to(dtype).T
        patches[index, "q"] = Patch(
            factor,
            torch.randn(rank, tall, generator=draw).to(dtype),
            maybe(wide),
            maybe(tall),
            maybe(tall),
        )
    table = torch.randn(soft, 6, generator=draw) if soft else None
    return ComposedStack(patches, table, 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(0, 6), st.integers(0, 3), st.integers(1, 700))
def test_what_is_written_is_read(seed: int, sites: int, soft: int, piece: int) -> None:
    given_stack = composed(seed, sites, soft)
    image = StackImage(given_stack)
    # room in the middle of a buffer, as in a slab
    buffer = torch.full((image.nbytes + 4 * ALIGN,), 255, dtype=torch.uint8)
    room = buffer[2 * ALIGN : 2 * ALIGN + image.nbytes]
    for begin in range(0, image.nbytes, piece):
        image.write(room[begin : begin + piece], begin)
    assert (buffer[: 2 * ALIGN] == 255).all() and (buffer[-2 * ALIGN :] == 255).all()
    patches, table = image.views(room)
    assert patches.keys() == given_stack.patches.keys()
    for site, patch in patches.items():
        for field in FIELDS:
            mine, theirs = getattr(patch, field), getattr(given_stack.patches[site], field)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
                assert mine.is_contiguous() and mine.data_ptr() % 32 == room.data_ptr() % 32
    assert (table is None) == (soft == 0)
    if table is not None:
        assert torch.equal(table, given_stack.soft)  # type: ignore[arg-type]
