"""Random experts for kernel checks: weights and records of every kind. Needs torch alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.kernels.cpu.expert_record import pack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.weights.quantize import GgufBlocks, Weight
from tests.helpers.kernels.kernel_inputs import weight

BLOCK_BYTES = {"q4_k": 144, "q6_k": 210}


def blocks(kind: str, rows: int, width: int) -> GgufBlocks:
    """Every bit random but the fp16 factors, which stay finite; values near 1/sqrt(width)."""
    data = torch.randint(0, 256, (rows, width // 256, BLOCK_BYTES[kind]), dtype=torch.uint8)
    unit = width**-0.5 * (1 / 300 if kind == "q4_k" else 1 / 1500)
    factors = (torch.rand(rows, width // 256, 2) * unit).half().view(torch.uint8)
    if kind == "q4_k":
        data[..., :4] = factors
    else:
        data[..., 208:] = factors[..., :2]
    return GgufBlocks(kind, data.flatten(1))


def any_weight(kind: str, rows: int, width: int) -> Weight:
    return blocks(kind, rows, width) if kind in BLOCK_BYTES else weight(kind, rows, width)


def expert_parts(layout: ExpertLayout) -> dict[str, Weight | Tensor]:
    return {
        place.name: any_weight(place.kind, place.rows, place.columns)
        if place.columns
        else torch.randn(place.rows)
        for place in layout.parts()
    }


def record_of(layout: ExpertLayout, parts: Mapping[str, Weight | Tensor]) -> Tensor:
    out = torch.full((layout.nbytes,), 7, dtype=torch.uint8)
    pack_record(layout, parts, out)
    return out


def records_of(layout: ExpertLayout, experts: int) -> list[tuple[int, Tensor]]:
    return [(index, record_of(layout, expert_parts(layout))) for index in range(experts)]


def choices(tokens: int, experts: int, top_k: int) -> Tensor:
    """[T, K] distinct experts per row."""
    picked = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return picked.to(torch.int32)
