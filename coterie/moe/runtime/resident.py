"""Experts that are all in memory for good, as one value: where each layer's records are.

While that is so, there is nothing to decide or to move, and all layers may run in one call. This
module reads tiers and strategies and changes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.kernels.cpu.expert_mlp import RecordTable
from coterie.kernels.device_record import UNIT_BYTES, device_record
from coterie.moe.runtime.device_pool import DevicePool, ResidentExperts

if TYPE_CHECKING:
    from coterie.moe.runtime.setup import RuntimeParts
    from coterie.moe.runtime.usage import UsageTelemetry


@dataclass(frozen=True, slots=True)
class StepDemands:
    """Which experts a step used."""

    # [layers, experts]: rows per expert
    rows: NDArray[np.int64]
    # [sequences, layers, 2]: demanded experts, and those of them that are in slots; None: not known
    by_sequence: NDArray[np.int64] | None
    # "prefill" when any row of the step is prefill, else "decode"
    phase: str = "decode"
    # of a step in which the device itself brought experts to slots: its number, and the choices of
    # its rows [layers, sequences, k], if there are several
    placed: int | None = None
    choices: NDArray[np.int32] | None = None


class ResidentFinder:
    """Finds the resident experts, remembers the result, and counts the steps that used it."""

    def __init__(self, parts: RuntimeParts, telemetry: UsageTelemetry) -> None:
        self._parts, self._telemetry = parts, telemetry
        # by phase: `slots.changes` at that time, and the result
        self._found: dict[str, tuple[int, ResidentExperts]] = {}
        self._pool: tuple[int, DevicePool] | None = None
        # of every pool: captured steps have its address
        self._places: Tensor | None = None

    def find(self, phase: str) -> ResidentExperts | None:
        now = self._parts.slots.changes
        at, known = self._found.get(phase, (-1, None))
        if known is not None and at == now:
            return known
        found = find_resident(self._parts, phase)
        if found is not None:
            self._found[phase] = now, found
        return found

    def find_pool(self) -> DevicePool | None:
        """All experts on a CUDA device, once nothing moves any more in any phase."""
        now = self._parts.slots.changes
        if self._pool is None or self._pool[0] != now:
            found = find_device_pool(self._parts)
            self._pool = None if found is None else (now, self._in_place(found))
        return None if self._pool is None else self._pool[1]

    @torch.inference_mode()
    def _in_place(self, pool: DevicePool) -> DevicePool:
        if self._places is None:
            self._places = pool.places
            return pool
        # behind all steps that read it
        self._places.copy_(pool.places)
        return replace(pool, places=self._places)

    def count(
        self, found: ResidentExperts, routed: Tensor, owners: Tensor | None, seconds: float
    ) -> NDArray[np.int64]:
        """Rows per layer and expert. The `seconds` of the step are divided equally by layers."""
        ids, mask = routed.numpy(), found.on_device
        rows = count_demands(ids, mask.shape[1])
        own = None if owners is None else demands_by_sequence(ids, owners.tolist(), mask)
        self.add(found, StepDemands(rows, own), seconds)
        return rows

    def add(self, found: ResidentExperts, demands: StepDemands, seconds: float) -> None:
        used = demands.rows > 0
        hits = (used & found.on_device).sum(axis=1)
        missed = used.sum(axis=1) - hits
        self._telemetry.add_step({
            "device_hits": hits, "host_runs": missed, "host_hits": missed,
            "compute_s": np.full(len(hits), seconds / len(hits)),
        })  # fmt: skip
        if demands.by_sequence is not None:
            self._telemetry.attribute_resident(demands.by_sequence, seconds)


def find_device_pool(parts: RuntimeParts) -> DevicePool | None:
    device, geometry = parts.device, parts.store.geometry
    settled = all(each.settled() for each in parts.strategies.values())
    if device.device.type != "cuda" or not settled or device.pending:
        return None
    layouts = {layer: parts.store.layout(layer) for layer in geometry.layers}
    records = {layer: device_record(layout) for layer, layout in layouts.items()}
    known = {layer: record for layer, record in records.items() if record is not None}
    if len(known) < len(records):
        return None
    if not all(device.holds(layer, geometry.present(layer)) for layer in geometry.layers):
        return None
    places = np.zeros((len(geometry.layers), geometry.num_experts), dtype=np.int64)
    for row, layer in enumerate(geometry.layers):
        for expert in geometry.present(layer):
            slot = device.slot_of((layer, expert))
            assert slot is not None
            places[row, expert] = slot * device.slot_bytes // UNIT_BYTES
    mask = np.ones(places.shape, dtype=bool)
    return DevicePool(
        device.arena,
        device.slot_bytes,
        torch.from_numpy(places).to(device.device),
        torch.zeros(places.shape, dtype=torch.int8, device=device.device),
        known,
        ResidentExperts(device.tables, layouts, mask),
    )


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
