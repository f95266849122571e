"""Changes a packed store: removes unused experts, or replaces an expert by another.

A record is never overwritten: new ones are appended, and the index is replaced in one step. So the
old store is still there after a crash, and a running engine can keep reading it. Every change gives
a new fingerprint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.kernels.cpu.expert_record import pack_record, rebias, weight_offset
from coterie.kernels.expert_layout import ExpertLayout, PartPlace
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry, Key
from coterie.moe.store.disk import PAGE, DiskReader, aligned_buffer
from coterie.moe.store.export import Progress, export
from coterie.moe.store.packed import (
    EXPERTS_FILE,
    PackedStore,
    RecordLocation,
    StoreIndex,
    key_name,
    read_index,
)
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.files import try_lock
from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Int4Weight, Int8Weight, Weight, dense

# names that an expert's parts may have in a safetensors file
_SPELLINGS = {
    "gate": ("gate", "gate.weight", "gate_proj.weight", "w1.weight"),
    "up": ("up", "up.weight", "up_proj.weight", "w3.weight"),
    "down": ("down", "down.weight", "down_proj.weight", "w2.weight"),
    "fc1": ("fc1", "fc1.weight"),
    "fc1_bias": ("fc1_bias", "fc1.bias"),
    "fc2": ("fc2", "fc2.weight"),
    "fc2_bias": ("fc2_bias", "fc2.bias"),
}


@dataclass(frozen=True, slots=True)
class PruneResult:
    """`dropped`: experts that the gate may no longer choose. `spared`: also unused, but kept
    because a token needs that many experts."""

    path: Path
    fingerprint: str
    dropped: Mapping[int, tuple[int, ...]]
    spared: Mapping[int, tuple[int, ...]]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """A gate that chooses experts from the best `top` of `count` groups needs some in every one."""

    count: int = 1
    top: int = 1


def prune(
    path: Path,
    heatmap: Heatmap,
    groups: ExpertGroups | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> PruneResult:
    """Remove the experts that `heatmap` did not count: in place by a new index (`experts.bin` keeps
    their bytes), or in a compact copy at `out`."""
    with _editing(path):
        index = read_index(path)
        dropped, spared = _never_used(index.geometry, heatmap, groups or ExpertGroups())
        removed = {(layer, expert) for layer, experts in dropped.items() for expert in experts}
        edited = replace(
            index,
            geometry=replace(index.geometry, absent=index.geometry.absent | removed),
            records={key: record for key, record in index.records.items() if key not in removed},
            lineage=(*index.lineage, index.fingerprint),
        )
        if out is not None:
            store = PackedStore(path, edited, "auto", DiskReader())
            edited = export(open_checkpoint(path), store, out, progress).index
            store.close()
        elif removed:
            edited.save(path)
        else:
            edited = index
    freed = sum(index.records[key].nbytes for key in removed)
    return PruneResult(out or path, edited.fingerprint, dropped, spared, freed)


def _never_used(
    geometry: ExpertGeometry, heatmap: Heatmap, groups: ExpertGroups
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    if (heatmap.geometry.layers, heatmap.geometry.num_experts) != (
        geometry.layers,
        geometry.num_experts,
    ):
        raise WeightsError("the heatmap counts other layers and experts than the store has")
    if heatmap.total() <= 0:
        raise WeightsError("the heatmap has counted nothing: every expert would be dropped")
    floor, size = -(-geometry.top_k // groups.top), geometry.num_experts // groups.count
    dropped, spared = {}, {}
    for layer in geometry.layers:
        ranked = heatmap.hottest_of(layer)
        needed = {
            expert
            for group in range(groups.count)
            for expert in [e for e in ranked if e // size == group][:floor]
        }
        unused = [e for e in geometry.present(layer) if heatmap.count((layer, e)) <= 0]
        dropped[layer] = tuple(e for e in unused if e not in needed)
        spared[layer] = tuple(e for e in unused if e in needed)
    return dropped, spared


def replace_expert(path: Path, key: Key, parts: Mapping[str, Weight | Tensor]) -> StoreIndex:
    """Replace expert `key` by `parts`. Checks the shapes; the precision is the store's."""
    with _editing(path) as sink:
        index = read_index(path)
        if key not in index.records:
            raise WeightsError(f"{path}: has no {key_name(key)}")
        layout = index.layout(key[0])
        fitted = {place.name: _fitted(key, place, parts) for place in layout.parts()}
        record = aligned_buffer(layout.nbytes)
        pack_record(layout, fitted, record)
        edited = _appended(index, key, layout, record, sink)
        edited.save(path)
        return edited


def named_parts(tensors: Mapping[str, Weight], layout: ExpertLayout) -> dict[str, Weight | Tensor]:
    """An expert's parts among the tensors of a file, under any common name."""
    found: dict[str, Weight | Tensor] = {}
    for place in layout.parts():
        name = next((name for name in _SPELLINGS[place.name] if name in tensors), None)
        if name is None:
            spellings = ", ".join(_SPELLINGS[place.name])
            raise WeightsError(f"no {place.name} among {', '.join(tensors)}; name it {spellings}")
        found[place.name] = tensors[name] if place.columns else dense(tensors[name])
    return found


def _appended(
    index: StoreIndex, key: Key, layout: ExpertLayout, record: Tensor, sink: IO[bytes]
) -> StoreIndex:
    """Append the record; it is on disk before the index refers to it."""
    if index.weight_offset != weight_offset():
        rebias(layout, record)
    offset = -(-max(sink.seek(0, os.SEEK_END), index.end) // PAGE) * PAGE
    sink.seek(offset)
    sink.write(record.numpy().data)
    sink.flush()
    os.fsync(sink.fileno())
    digest = hashlib.sha256(record.numpy().data).hexdigest()
    return replace(
        index,
        records={**index.records, key: RecordLocation(offset, layout.nbytes, digest)},
        lineage=(*index.lineage, index.fingerprint),
    )


def _fitted(key: Key, place: PartPlace, parts: Mapping[str, Weight | Tensor]) -> Weight | Tensor:
    part = parts.get(place.name)
    wanted = (place.rows, place.columns) if place.columns else (place.rows,)
    if part is None or tuple(part.shape) != wanted:
        found = "missing" if part is None else f"{tuple(part.shape)}"
        raise WeightsError(f"{place.name} for {key_name(key)} is {found}, not {wanted}")
    if isinstance(part, Tensor) or _kind(part) == place.kind:
        return part
    if place.kind in BLOCK_KINDS:
        raise WeightsError(
            f"{place.name} of {key_name(key)} is kept as {place.kind}, which is not written here. "
            "Export the store with --dtype int8 or int4 first."
        )
    return DenseWeight(dense(part))


def _kind(weight: Weight) -> str:
    if isinstance(weight, GgufBlocks):
        return weight.kind
    return {Int8Weight: "int8", Int4Weight: "int4", DenseWeight: ""}[type(weight)]


@contextmanager
def _editing(path: Path) -> Iterator[IO[bytes]]:
    """One change at a time; the lock ends with the process."""
    file = path / EXPERTS_FILE
    try:
        with file.open("r+b") as sink:
            if not try_lock(sink.fileno()):
                raise WeightsError(f"{path}: another command is changing it. Wait for it.")
            yield sink
    except OSError as error:
        raise WeightsError(f"{file}: cannot be changed ({error.strerror or error}).") from error
