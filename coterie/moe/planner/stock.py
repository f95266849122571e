"""Records of a model's own shape and no meaning, where its experts would lie: for measuring.

Far fewer bytes than the model has, and yet past every cache. Knows no store's content and no tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coterie.kernels.expert_layout import ExpertLayout, matrix_bytes
from coterie.kernels.expert_mlp import RecordTable
from coterie.kernels.expert_record import pack_record
from coterie.moe.runtime.resident import Resident
from coterie.weights.quantize import Blocks, Dense, Weight, convert

if TYPE_CHECKING:
    from coterie.moe.store.base import Store

# past every cache; a smaller set of experts than this is measured as it is
COLD_BYTES = 192 << 20
_BLOCKS = ("q4_k", "q6_k")


def sample_record(layout: ExpertLayout, size: int) -> Tensor:
    """One expert of small random weights, laid out as the kernels want it."""
    record = torch.zeros(size, dtype=torch.uint8)
    drawn = torch.Generator().manual_seed(0)
    parts: dict[str, Weight | Tensor] = {}
    for part in layout.parts():
        if part.kind in _BLOCKS:
            width = matrix_bytes(part.kind, 1, part.columns)
            parts[part.name] = Blocks(part.kind, torch.zeros(part.rows, width, dtype=torch.uint8))
            continue
        shape = (part.rows, part.columns) if part.columns else (part.rows,)
        values = torch.randn(shape, generator=drawn) * 0.02
        parts[part.name] = values if not part.columns else convert(Dense(values), part.kind)
    pack_record(layout, parts, record)
    return record


class Stock:
    """As if every expert of `store` were in memory."""

    def __init__(self, store: Store) -> None:
        geometry = store.geometry
        self._keys = geometry.keys()
        layouts = {layer: store.layout(layer) for layer in geometry.layers}
        self._banks = _banks(layouts, len(self._keys))
        tables = {layer: RecordTable(geometry.num_experts) for layer in layouts}
        nowhere = np.zeros((len(layouts), geometry.num_experts), dtype=bool)
        self.resident = Resident(tables, layouts, nowhere)
        self._first = 0
        self.turn()

    def turn(self) -> None:
        """Every expert lies elsewhere now: whoever is asked for again is not in a cache."""
        for place, (layer, expert) in enumerate(self._keys):
            bank = self._banks[self.resident.layouts[layer]]
            self.resident.tables[layer].set(expert, bank[(self._first + place) % len(bank)])
        self._first += max(1, len(self._keys) // 3)


def _banks(layouts: Mapping[int, ExpertLayout], experts: int) -> dict[ExpertLayout, list[Tensor]]:
    kinds = set(layouts.values())
    banks = {}
    for layout in kinds:
        count = max(2, min(COLD_BYTES // len(kinds) // layout.nbytes, experts))
        record = sample_record(layout, layout.nbytes)
        banks[layout] = [record.clone() for _ in range(count)]
    return banks
