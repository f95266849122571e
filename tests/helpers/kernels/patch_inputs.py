"""Random patches and stacks for kernel checks. Needs torch alone, as kernel_inputs.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from coterie.kernels.decoder import DecoderShape
from coterie.kernels.patch import PARTS, Patch, PatchStack, Segment, Site

FIELDS = ("low_rank", "in_scale", "out_scale", "shift")


def random_patch(
    width: int,
    height: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    fields: Sequence[str] = FIELDS,
) -> Patch:
    """Of a matrix [height, width]; every field changes the result by about a tenth of it."""

    def vector(name: str, size: int, middle: float) -> Tensor | None:
        return middle + 0.2 * torch.randn(size) if name in fields else None

    a = b = None
    if "low_rank" in fields:
        a = (torch.randn(rank, width) * width**-0.5).to(dtype)
        b = (0.3 * torch.randn(rank, height) * rank**-0.5).to(dtype)
    return Patch(
        a,
        b,
        vector("in_scale", width, 1.0),
        vector("out_scale", height, 1.0),
        vector("shift", height, 0.0),
    )


def sizes(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """[in, out] of every part."""
    hidden, inner = shape.hidden, shape.intermediate
    return dict(
        zip(
            PARTS,
            (
                (hidden, shape.q_size),
                (hidden, shape.kv_size),
                (hidden, shape.kv_size),
                (shape.q_size, hidden),
                (hidden, inner),
                (hidden, inner),
                (inner, hidden),
            ),
            strict=True,
        )
    )


def random_stack(
    shape: DecoderShape,
    layers: Sequence[int],
    rank: int,
    dtype: torch.dtype = torch.float32,
    fields: Sequence[str] = FIELDS,
    parts: Sequence[str] = PARTS,
) -> PatchStack:
    shapes = sizes(shape)
    patches: Mapping[Site, Patch] = {
        (layer, part): random_patch(*shapes[part], rank, dtype, fields)
        for layer in layers
        for part in parts
    }
    return PatchStack(f"stack-{rank}", 0, patches)


def segments(*rows: tuple[int, int, PatchStack]) -> tuple[Segment, ...]:
    return tuple(Segment(*row) for row in rows)
