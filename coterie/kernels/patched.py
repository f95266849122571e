"""Products under patches, for models that are walked in Python: what `reference.decoder`, blocks,
shared experts and the LM head call instead of `product(x)`.

    linear(product, x, layer, parts, patches) -> Tensor      # x [T, in], the segments' rows are x's
    linear(o, mixed, 3, (("o", 576),), batch.patches)
    linear(qkv, normed, 3, (("q", 576), ("k", 192), ("v", 192)), batch.patches)
    linear(head, rows, -1, (("head", vocab),), pick(batch.patches, logits_rows))

A patch acts on the product without its bias: y = out_scale * (W (in_scale * x)) + shift + (x a^T) b
+ bias. Knows no adapter kind; without patches for these parts, it is `product(x)` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from coterie.kernels.patch import Segment

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.kernels.linear import Linear
    from coterie.kernels.patch import Patch

# what a fused product is made of: (part, rows of the weight), in order
Parts = Sequence[tuple[str, int]]


class _Biased(Protocol):
    """A product with a bias behind it (models/reader.py: BiasedLinear)."""

    product: Linear
    bias: Tensor


def linear(
    product: Linear, x: Tensor, layer: int, parts: Parts, patches: tuple[Segment, ...]
) -> Tensor:
    """product(x) [T, out], where the segments' rows have their stacks' patches of (layer, part)."""
    work = list(_work(layer, parts, patches)) if patches else []
    if not work:
        return product(x)
    biased = cast(_Biased, product) if hasattr(product, "bias") else None
    bare = biased.product if biased else product
    plain = bare(x)  # ours: nobody else has it
    y = plain + biased.bias.to(x.dtype) if biased else plain
    for rows, columns, patch in work:
        here = x[rows]
        if patch.in_scale is None:
            base = plain[rows, columns]
        else:
            base = bare((here * patch.in_scale).to(x.dtype))[:, columns]
        changed = apply(patch, here, base.float())
        if biased:
            changed = changed + biased.bias[columns].float()
        y[rows, columns] = changed.to(y.dtype)
    return y


def apply(patch: Patch, x: Tensor, base: Tensor) -> Tensor:
    """What the patch makes of base = W (in_scale * x), fp32 [n, out]."""
    y = base if patch.out_scale is None else base * patch.out_scale
    if patch.shift is not None:
        y = y + patch.shift
    if patch.a is not None and patch.b is not None:
        y = y + (x.float() @ patch.a.float().T) @ patch.b.float()
    return y


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


def _work(
    layer: int, parts: Parts, patches: tuple[Segment, ...]
) -> Iterator[tuple[slice, slice, Patch]]:
    for first, last, stack in patches:
        column = 0
        for name, width in parts:
            patch = stack.patches.get((layer, name))
            if patch is not None:
                yield slice(first, last), slice(column, column + width), patch
            column += width
