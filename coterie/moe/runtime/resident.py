"""Experts that are all in memory for good, as one value: where each layer's records are.

While that is so, there is nothing to decide or to move, and all layers may run in one call. This
module reads tiers and strategies and changes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.kernels.cpu.expert_mlp import RecordTable
from coterie.moe.runtime.usage import UsageTally

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.moe.runtime.setup import RuntimeParts
    from coterie.moe.runtime.usage import UsageTelemetry


@dataclass(frozen=True, slots=True)
class ResidentExperts:
    tables: Mapping[int, RecordTable]
    layouts: Mapping[int, ExpertLayout]
    # [layers, experts]: whether the strategy would run it from a device slot
    on_device: NDArray[np.bool_]


class ResidentFinder:
    """Finds the resident experts, remembers the result, and counts the steps that used it."""

    def __init__(self, parts: RuntimeParts, telemetry: UsageTelemetry) -> None:
        self._parts, self._telemetry = parts, telemetry
        # by phase: `slots.changes` at that time, and the result
        self._found: dict[str, tuple[int, ResidentExperts]] = {}

    def find(self, phase: str) -> ResidentExperts | None:
        now = self._parts.slots.changes
        at, known = self._found.get(phase, (-1, None))
        if known is not None and at == now:
            return known
        found = find_resident(self._parts, phase)
        if found is not None:
            self._found[phase] = now, found
        return found

    def count(
        self, found: ResidentExperts, routed: Tensor, owners: Tensor | None, seconds: float
    ) -> NDArray[np.int64]:
        """Rows per layer and expert. The `seconds` of the step are divided equally by layers."""
        ids, mask, geometry = routed.numpy(), found.on_device, self._parts.store.geometry
        rows = count_demands(ids, geometry.num_experts)
        used = rows > 0
        hits = (used & mask).sum(axis=1).tolist()
        for layer, slots, met in zip(geometry.layers, hits, used.sum(axis=1).tolist(), strict=True):
            tally = UsageTally()
            tally.device_hits, tally.host_runs = slots, met - slots
            tally.host_hits = met - slots
            tally.compute_s = seconds / len(hits)
            self._telemetry.add(layer, tally)
        if owners is not None:
            self._telemetry.attribute_resident(
                demands_by_sequence(ids, owners.tolist(), mask), seconds
            )
        return rows


def find_resident(parts: RuntimeParts, phase: str) -> ResidentExperts | None:
    """None unless the strategies have nothing more to decide and all bytes are in memory."""
    strategies = parts.strategies
    if parts.device.device.type != "cpu" or not strategies[phase].settled():
        return None
    tables = _tables(parts, all(each.settled() for each in strategies.values()))
    if tables is None:
        return None
    geometry = parts.store.geometry
    layouts = {layer: parts.store.layout(layer) for layer in geometry.layers}
    mask = np.zeros((len(geometry.layers), geometry.num_experts), dtype=bool)
    for row, layer in enumerate(geometry.layers if strategies[phase].needs_device else ()):
        in_slots = [e for e in geometry.present(layer) if (layer, e) in parts.slots]
        mask[row, in_slots] = True
    return ResidentExperts(tables, layouts, mask)


def _tables(parts: RuntimeParts, still: bool) -> Mapping[int, RecordTable] | None:
    """Host RAM if it holds all experts; the slots, or both, if nothing will move (`still`)."""
    host, device, geometry = parts.host, parts.device, parts.store.geometry
    everywhere = {layer: geometry.present(layer) for layer in geometry.layers}
    if all(host.holds(layer, experts) for layer, experts in everywhere.items()):
        return host.tables if host.complete else None
    if not still or not (host.complete or device.num_slots >= geometry.total):
        return None
    if not all(_all_here(parts, layer, experts) for layer, experts in everywhere.items()):
        return None
    merged = {layer: RecordTable(geometry.num_experts) for layer in everywhere}
    for layer, table in merged.items():
        for tier in (host, device):
            for expert, record in tier.tables[layer].pick():
                table.set(expert, record)
    return merged


def _all_here(parts: RuntimeParts, layer: int, experts: tuple[int, ...]) -> bool:
    not_on_host = [e for e in experts if not parts.host.holds(layer, (e,))]
    return not not_on_host or parts.device.holds(layer, tuple(not_on_host))


def count_demands(routed: NDArray[np.int32], num_experts: int) -> NDArray[np.int64]:
    """[layers, experts]: rows per expert of routed [layers, rows, k]."""
    layers = len(routed)
    flat = routed.reshape(layers, -1) + np.arange(layers, dtype=np.int64)[:, None] * num_experts
    return np.bincount(flat.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)


def demands_by_sequence(
    routed: NDArray[np.int32], owners: Sequence[int], on_device: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """[sequences, layers, 2]: demanded experts, and those of them that are in slots."""
    layers, _, top_k = routed.shape
    width = on_device.shape[1]
    need = np.zeros((max(owners) + 1, layers, width), dtype=bool)
    rows = np.repeat(np.asarray(owners), top_k)
    for layer in range(layers):
        need[rows, layer, routed[layer].ravel()] = True
    return np.stack((need.sum(axis=2), (need & on_device).sum(axis=2)), axis=2)
