"""Experts from a packed store: one contiguous, page-aligned, kernel-ready record each.

A record goes from disk to its slot without a copy. Its checksum is checked at its first read. It is
converted on the way only when another precision, or another machine's int8 offset, is asked for.
"""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels.cpu.expert_record import pack_record, rebias, unpack_record, weight_offset
from coterie.kernels.expert_layout import GROUP, ExpertLayout
from coterie.moe.store.base import ExpertGeometry, ExpertShape, Key, StoreTimings
from coterie.moe.store.disk import PAGE, DiskReader, aligned_buffer
from coterie.moe.store.index import EXPERTS_FILE, RecordLocation, StoreIndex, key_name, read_index
from coterie.moe.store.tensors import fit_to_kind
from coterie.weights.quantize import DTYPES


class PackedStore:
    def __init__(self, path: Path, index: StoreIndex, dtype: str, disk: DiskReader) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}", param="dtype")
        self.path, self.index, self.disk, self.spent = path, index, disk, StoreTimings()
        self.geometry = index.geometry
        self._file = path / EXPERTS_FILE
        self._layouts = {layer: _converted(index.layout(layer), dtype) for layer in index.kinds}
        sizes = {layer: layout.nbytes for layer, layout in self._layouts.items()}
        self.slot_bytes = max(sizes.values())
        self.expert_bytes = sum(sizes[layer] for layer, _ in index.records)
        self._converts = any(self._layouts[layer] != index.layout(layer) for layer in index.kinds)
        largest = max(index.layout(layer).nbytes for layer in index.kinds)
        self.staging_bytes = largest if self._converts else 0
        self._staging_bytes = largest
        self._checked: set[Key] = set()
        self._thread = threading.local()
        disk.open(self.files())

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint

    @property
    def lineage(self) -> tuple[str, ...]:
        return (*self.index.lineage, self.fingerprint)

    def layout(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def read_bytes(self, key: Key) -> int:
        return self._record(key).nbytes

    def read(self, key: Key, out: Tensor) -> int:
        record, stored, served = self._record(key), *self._both(key[0])
        straight = stored == served and out.data_ptr() % PAGE == 0
        buffer = out[: record.nbytes] if straight else self._staging()[: record.nbytes]
        data = self.disk.read(self._file, record.offset, record.nbytes, buffer)
        self._check(key, record, data)
        started = time.perf_counter()
        if self.index.weight_offset != weight_offset():
            rebias(stored, data)
        if stored != served:
            parts = unpack_record(stored, data)
            kinds = {place.name: place.kind for place in served.parts()}
            fitted = {name: fit_to_kind(part, kinds[name]) for name, part in parts.items()}
            pack_record(served, fitted, out)
        elif not straight:
            out[: record.nbytes].copy_(data)
        self.spent.add(pack_s=time.perf_counter() - started)
        return record.nbytes

    def tensors(self) -> frozenset[str]:
        return frozenset()

    def files(self) -> frozenset[Path]:
        return frozenset({self._file})

    def close(self) -> None:
        self.disk.close()

    def _both(self, layer: int) -> tuple[ExpertLayout, ExpertLayout]:
        return self.index.layout(layer), self._layouts[layer]

    def _record(self, key: Key) -> RecordLocation:
        record = self.index.records.get(key)
        if record is None:
            raise WeightsError(f"{self.path}: has no {key_name(key)}; it was pruned")
        return record

    def _check(self, key: Key, record: RecordLocation, data: Tensor) -> None:
        if key in self._checked:
            return
        started = time.perf_counter()
        digest = hashlib.sha256(data.numpy().data).hexdigest()
        self.spent.add(checksum_s=time.perf_counter() - started)
        if digest != record.sha256:
            raise WeightsError(
                f"{self._file}: {key_name(key)} is damaged (its checksum does not match). "
                "Export the store again, or replace the expert."
            )
        self._checked.add(key)

    def _staging(self) -> Tensor:
        if not hasattr(self._thread, "buffer"):
            self._thread.buffer = aligned_buffer(self._staging_bytes)
        buffer: Tensor = self._thread.buffer
        return buffer


def open_packed(path: Path, dtype: str = "auto", disk: DiskReader | None = None) -> PackedStore:
    """The store in directory `path`, its index checked."""
    return PackedStore(path, read_index(path), dtype, disk or DiskReader())


def expect_model(store: PackedStore, geometry: ExpertGeometry, shape: ExpertShape) -> None:
    """Refuses a store whose experts are not those of the model around it."""
    found = store.geometry
    ours = (found.layers, found.num_experts, found.top_k, store.index.shape)
    if ours != (geometry.layers, geometry.num_experts, geometry.top_k, shape):
        raise WeightsError(
            f"{store.path}: its experts ({len(found.layers)} layers of {found.num_experts}, "
            f"{store.index.shape}) are not those of config.json ({len(geometry.layers)} layers of "
            f"{geometry.num_experts}, {shape}). Export it again."
        )


def _converted(layout: ExpertLayout, dtype: str) -> ExpertLayout:
    """What is quantised stays as it is unless a dense type is asked for, as everywhere."""
    if dtype == "auto":
        return layout
    widths = [place.columns for place in layout.parts() if place.columns]
    kinds = [
        dtype
        if dtype in ("fp32", "bf16") or (kind in ("fp32", "bf16") and columns % GROUP == 0)
        else kind
        for kind, columns in zip(layout.kinds, widths, strict=True)
    ]
    return ExpertLayout(layout.hidden, layout.intermediate, layout.gated, tuple(kinds))
