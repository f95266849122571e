"""Products with patches, for layers that run in Python: `reference.decoder`, blocks, shared experts
and the LM head call them instead of `product(x)`.

    linear(product, x, layer, parts, patches) -> Tensor      # x [T, in], the segments' rows are x's
    linear(o, mixed, 3, (("o", 576),), batch.patches)
    linear(qkv, normed, 3, (("q", 576), ("k", 192), ("v", 192)), batch.patches)
    linear(head, rows, -1, (("head", vocab),), pick(batch.patches, logits_rows))

A patch acts on the product without its bias: y = out_scale * (W (in_scale * x)) + shift + (x a^T) b
+ bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from coterie.kernels.cpu import layers as cpu_patches
from coterie.kernels.cpu.layers import PackedLinear
from coterie.kernels.linear import Linear
from coterie.kernels.patch import Patch, Segment

# the parts of a fused product: (part, rows of the weight), in order
Parts = Sequence[tuple[str, int]]
# rows of x and y, columns of y, and their patch
Work = tuple[slice, slice, Patch]


class _Biased(Protocol):
    """A product with a bias (models/build/reader.py: BiasedLinear)."""

    product: Linear
    bias: Tensor


def linear(
    product: Linear, x: Tensor, layer: int, parts: Parts, patches: tuple[Segment, ...]
) -> Tensor:
    """product(x) [T, out], with the patches of (layer, part) on the rows of each segment."""
    work = list(_work(layer, parts, patches)) if patches else []
    if not work:
        return product(x)
    biased = cast(_Biased, product) if hasattr(product, "bias") else None
    bare = biased.product if biased else product
    y = bare(x)  # a new tensor, so that it may be changed
    for rows, columns, patch in work:
        if patch.in_scale is not None:
            y[rows, columns] = bare((x[rows] * patch.in_scale).to(x.dtype))[:, columns]
    # with a native product a row's result does not depend on the other rows
    native = isinstance(bare, PackedLinear) and y.dtype == torch.float32
    (cpu_patches.add if native else add)(work, x, y)
    return y + biased.bias.to(y.dtype) if biased else y


def add(work: Sequence[Work], x: Tensor, y: Tensor) -> None:
    """y [T, out] = W (in_scale * x) in place: out_scale * y + shift + (x a^T) b, in fp32."""
    for rows, columns, patch in work:
        if _half(x, y, patch):
            assert patch.a is not None and patch.b is not None
            y[rows, columns].addmm_(x[rows] @ patch.a.T, patch.b)
            continue
        changed = y[rows, columns].float()
        if patch.out_scale is not None:
            changed = changed * patch.out_scale
        if patch.shift is not None:
            changed = changed + patch.shift
        if patch.a is not None and patch.b is not None:
            changed = changed + (x[rows].float() @ patch.a.float().T) @ patch.b.float()
        y[rows, columns] = changed.to(y.dtype)


def _half(x: Tensor, y: Tensor, patch: Patch) -> bool:
    """Whether two products in bf16 on an accelerator do it, with sums in fp32."""
    plain = patch.out_scale is None and patch.shift is None
    low = plain and patch.a is not None and patch.a.dtype == torch.bfloat16
    return low and y.is_cuda and x.dtype == y.dtype == torch.bfloat16


def pick(patches: tuple[Segment, ...], rows: Tensor) -> tuple[Segment, ...]:
    """The segments of x[rows], for rows in any order."""
    if not patches:
        return ()
    found: list[Segment] = []
    for at, row in enumerate(rows.tolist()):
        stack = next((s.stack for s in patches if s.first <= row < s.last), None)
        if stack is None:
            continue
        if found and found[-1].stack is stack and found[-1].last == at:
            found[-1] = found[-1]._replace(last=at + 1)
        else:
            found.append(Segment(at, at + 1, stack))
    return tuple(found)


def _work(layer: int, parts: Parts, patches: tuple[Segment, ...]) -> Iterator[Work]:
    for first, last, stack in patches:
        column = 0
        for name, width in parts:
            patch = stack.patches.get((layer, name))
            if patch is not None:
                yield slice(first, last), slice(column, column + width), patch
            column += width
