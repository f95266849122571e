"""The kinds of matrices: how each lies in memory, and which types of files become it.

Kernels read panels of 16 rows: block after block of columns, in a block item after item, of an
item the bytes of row 0, row 1 ... row 15. A new kind is a row here, a struct in
kernels/cpu/csrc/formats.h, and where it is GGUF's the functions in weights/formats/gguf_blocks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

PANEL = 16
# columns that share a scale
GROUP = 32


@dataclass(frozen=True, slots=True)
class MatrixKind:
    name: str
    # types of tensors, in GGUF files or safetensors, that are kept so; fp32 holds fp16 exactly
    stored_as: tuple[str, ...]
    # of one block
    columns: int
    # bytes of each item of a block, for one row
    items: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Of one row."""
        return sum(self.items)

    @property
    def is_dense(self) -> bool:
        """Rows of any length: they are padded."""
        return self.name in ("fp32", "bf16")

    def nbytes(self, rows: int, columns: int) -> int:
        """Of a packed matrix."""
        return -(-rows // PANEL) * PANEL * -(-columns // self.columns) * self.block_bytes


_HALF, _NIBBLES, _FIFTH, _TWO_BITS = (2,), (4,) * 4, (4,), (4,) * 2

# the order is that of the numbers in kernels/cpu/csrc/types.h
KINDS: dict[str, MatrixKind] = {
    kind.name: kind
    for kind in (
        # four columns; sixteen pairs of columns, as many as a tile of AMX has
        MatrixKind("fp32", ("F32", "F16"), 4, (4,) * 4),
        MatrixKind("bf16", ("BF16",), 32, (4,) * 16),
        # q + an offset, scale
        MatrixKind("int8", ("Q8_0",), 32, (4,) * 8 + _HALF),
        # q, scale, minimum
        MatrixKind("int4", ("Q4_0", "Q4_1"), 32, _NIBBLES + _HALF + _HALF),
        # q, scale, and of q5_1 minimum
        MatrixKind("q5_0", ("Q5_0",), 32, _NIBBLES + _FIFTH + _HALF),
        MatrixKind("q5_1", ("Q5_1",), 32, _NIBBLES + _FIFTH + _HALF + _HALF),
        # d, -dmin, eight scales, eight minima; q
        MatrixKind("q4_k", ("Q4_K",), 256, _HALF + _HALF + (1,) * 16 + _NIBBLES * 8),
        MatrixKind("q5_k", ("Q5_K",), 256, _HALF + _HALF + (1,) * 16 + (_NIBBLES + _FIFTH) * 8),
        # d, sixteen scales; q
        MatrixKind("q6_k", ("Q6_K",), 256, _HALF + (1,) * 16 + (_NIBBLES + _TWO_BITS) * 8),
    )
}

# type in a file -> the kind that keeps it as it is
KEPT_AS = {stored: kind.name for kind in KINDS.values() for stored in kind.stored_as}

# kinds whose bits are GGUF's own
BLOCK_KINDS = ("q5_0", "q5_1", "q4_k", "q5_k", "q6_k")

# GGUF's types whose blocks have the parts of another kind: integers and fp16 factors
SPLIT_TYPES = ("Q8_0", "Q4_0", "Q4_1")
