"""Random inputs for kernel checks: weights of every precision, paged batches, small decoders.

Needs torch alone, so that the self-check runs on machines without pytest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.kernels.backend import make_linear
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.decoder import DecoderLayer, DecoderShape
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES
from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.kinds import KINDS as MATRIX_KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Int4Weight, Int8Weight, Weight

# of any width in groups of 32, and all
KINDS = ("fp32", "bf16", "int8", "int4")
ALL_KINDS = tuple(MATRIX_KINDS)

# of a block: where its fp16 factors are, how many, and about the largest integer they scale
_FACTORS = {
    "q5_0": (0, 1, 10),
    "q5_1": (0, 2, 20),
    "q4_k": (0, 2, 300),
    "q5_k": (0, 2, 600),
    "q6_k": (208, 1, 1500),
}


def blocks(kind: str, rows: int, width: int) -> GgufBlocks:
    """Every bit random but the fp16 factors, which stay finite; values near 1/sqrt(width)."""
    elements, nbytes = BLOCK_SIZES[kind.upper()]
    data = torch.randint(0, 256, (rows, width // elements, nbytes), dtype=torch.uint8)
    at, count, per_unit = _FACTORS[kind]
    factors = (torch.rand(rows, width // elements, count) * width**-0.5 / per_unit).half()
    data[..., at : at + 2 * count] = factors.view(torch.uint8)
    return GgufBlocks(kind.upper(), data.flatten(1))


def fitting(kind: str, width: int) -> int:
    """The least width of at least `width` that a matrix of this kind can have."""
    step = 1 if MATRIX_KINDS[kind].is_dense else MATRIX_KINDS[kind].columns
    return -(-width // step) * step


def weight(kind: str, rows: int, width: int) -> Weight:
    """Uniform-ish values of variance near 1/width; every bit pattern of the integers occurs."""
    if kind in BLOCK_KINDS:
        return blocks(kind, rows, width)
    unit = width**-0.5
    groups = width // 32
    if kind == "int8":
        q = torch.randint(-128, 128, (rows, width), dtype=torch.int8)
        return Int8Weight(q, (torch.rand(rows, groups) * unit / 70).half())
    if kind == "int4":
        q = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8)
        scale = (torch.rand(rows, groups) - 0.3) * unit / 4
        return Int4Weight(q, scale.half(), (-7.5 * scale).half())
    dense = torch.randn(rows, width) * unit
    return DenseWeight(dense.bfloat16() if kind == "bf16" else dense)


def paged_batch(spec: Sequence[tuple[int, int]], block_size: int = 16) -> AttentionBatch:
    """Sequences of (tokens already cached, new rows), their blocks scattered over the pool."""
    needed = [-(-(before + rows) // block_size) for before, rows in spec]
    blocks = torch.randperm(sum(needed) + 1).to(torch.int32)
    tables = torch.zeros(len(spec), max(needed), dtype=torch.int32)
    positions, slots, starts, taken = [], [], [0], 0
    for index, (before, rows) in enumerate(spec):
        tables[index, : needed[index]] = blocks[taken : taken + needed[index]]
        taken += needed[index]
        here = torch.arange(before, before + rows)
        positions.append(here)
        slots.append(tables[index, here // block_size].long() * block_size + here % block_size)
        starts.append(starts[-1] + rows)
    return AttentionBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([before + rows for before, rows in spec], dtype=torch.int32),
        block_tables=tables,
        block_size=block_size,
    )


def cache_for(batch: AttentionBatch, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A filled layer cache that holds every block of the batch."""
    blocks = int(batch.block_tables.max()) + 1
    return torch.randn(2, blocks, kv_heads, batch.block_size, head_dim).to(dtype)


def one_row(batch: AttentionBatch, sequence: int, row: int) -> AttentionBatch:
    """The batch that decodes `row` of `sequence` alone, as the last token of its context."""
    last = int(batch.query_starts[sequence + 1]) - 1
    context = int(batch.context_lens[sequence]) - (last - row)
    return AttentionBatch(
        positions=batch.positions[row : row + 1],
        slots=batch.slots[row : row + 1],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=batch.block_tables[sequence : sequence + 1],
        block_size=batch.block_size,
    )


def rope_tables(positions: int, head_dim: int, theta: float = 1e5) -> tuple[Tensor, Tensor]:
    angles = torch.outer(
        torch.arange(positions).float(), theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    )
    return angles.cos(), angles.sin()


def decoder_layers(
    shape: DecoderShape, kinds: Sequence[str], backends: Sequence[str], extras: bool = False
) -> dict[str, list[DecoderLayer]]:
    """One layer per kind, the same weights for every backend; extras: biases and q/k norms."""
    stacks: dict[str, list[DecoderLayer]] = {backend: [] for backend in backends}
    q, kv, hidden, inter = shape.q_size, shape.kv_size, shape.hidden, shape.intermediate
    for kind in kinds:
        groups = [
            [weight(kind, rows, hidden) for rows in (q, kv, kv)],
            [weight(kind, hidden, q)],
            [weight(kind, rows, hidden) for rows in (inter, inter)],
            [weight(kind, hidden, inter)],
        ]
        norms = [torch.rand(hidden) + 0.5 for _ in range(2)]
        q_norm, k_norm = [torch.rand(shape.head_dim) + 0.5 if extras else None for _ in range(2)]
        bias = torch.randn(q + 2 * kv) if extras else None
        for backend, layers in stacks.items():
            qkv, o, gate_up, down = (make_linear(group, backend) for group in groups)
            layers.append(
                DecoderLayer(norms[0], qkv, q_norm, k_norm, bias, o, norms[1], gate_up, down)
            )
    return stacks
