"""Random experts for kernel checks: weights and records of every kind. Needs torch alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.kernels.cpu.expert_record import pack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.weights.quantize import Weight
from tests.helpers.kernels.kernel_inputs import weight


def expert_parts(layout: ExpertLayout) -> dict[str, Weight | Tensor]:
    return {
        place.name: weight(place.kind, place.rows, place.columns)
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
