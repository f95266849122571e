"""What adapters change in a step, as values: patches of single matrices, and their rows.

A stack of adapters, of any number and kinds, becomes one `Patch` per matrix and one table of soft
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# The matrices of a decoder layer, in the order of the native tables.
PARTS = ("q", "k", "v", "o", "gate", "up", "down")

# (layer, part); parts outside PARTS belong to models whose layers run in Python ("shared_gate",
# "q_a", ...), and (-1, "head") is the LM head
Site = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Patch:
    """y = out_scale * (W (in_scale * x)) + shift + (x a^T) b, in fp32.

    Low-rank terms read x without in_scale. A part that is None is left out.
    """

    a: Tensor | None = None  # [R, in], fp32 or bf16, contiguous
    b: Tensor | None = None  # [R, out], same type as a
    in_scale: Tensor | None = None  # [in] fp32
    out_scale: Tensor | None = None  # [out] fp32
    shift: Tensor | None = None  # [out] fp32

    @property
    def rank(self) -> int:
        return 0 if self.a is None else len(self.a)

    @property
    def nbytes(self) -> int:
        parts = (self.a, self.b, self.in_scale, self.out_scale, self.shift)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PatchStack:
    """One composed stack of adapters, on the device of the kernels. It does not change while it is
    in use."""

    # of the ordered digests and weights: core.plan.stack_key
    key: str
    # its place among the resident stacks, below the pool's max_stacks
    slot: int
    patches: Mapping[Site, Patch]
    # [tokens, hidden] fp32: rows whose token id is vocab + i read soft[i] instead of the embedding
    soft: Tensor | None = None
    # each backend stores its own tables of a stack here, by backend name
    tables: dict[str, Any] = field(default_factory=dict)


class Segment(NamedTuple):
    """Rows first .. last (exclusive) of a step run with `stack`."""

    first: int
    last: int
    stack: PatchStack
