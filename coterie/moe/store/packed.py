"""Experts from a packed store: one contiguous, page-aligned, kernel-ready record each.

A record is read from disk into its slot without a copy. Its checksum is verified at its first read.
It is converted only when another precision is requested, or when another kind of machine with
another int8 offset wrote the store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels.cpu.expert_record import pack_record, rebias, unpack_record, weight_offset
from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.store.base import ExpertGeometry, ExpertShape, Key, StoreTimings
from coterie.moe.store.disk import PAGE, DiskReader, StagingBuffers
from coterie.moe.store.tensors import fit_to_kind
from coterie.weights.files import read_json
from coterie.weights.kinds import GROUP, KINDS
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
        self._staging = StagingBuffers(largest)
        self._checked: set[Key] = set()
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
        if stored == served and out.data_ptr() % PAGE == 0:
            self._read_stored(key, record, out[: record.nbytes])
            return record.nbytes
        with self._staging.lent() as staging:
            data = self._read_stored(key, record, staging[: record.nbytes])
            started = time.perf_counter()
            if stored == served:
                out[: record.nbytes].copy_(data)
            else:
                parts = unpack_record(stored, data)
                kinds = {place.name: place.kind for place in served.parts()}
                fitted = {name: fit_to_kind(part, kinds[name]) for name, part in parts.items()}
                pack_record(served, fitted, out)
            self.spent.add(pack_s=time.perf_counter() - started)
        return record.nbytes

    def _read_stored(self, key: Key, record: RecordLocation, buffer: Tensor) -> Tensor:
        """A record as the file has it, checked, with the weight offset of this machine."""
        data = self.disk.read(self._file, record.offset, record.nbytes, buffer)
        self._check(key, record, data)
        if self.index.weight_offset != weight_offset():
            started = time.perf_counter()
            rebias(self.index.layout(key[0]), data)
            self.spent.add(pack_s=time.perf_counter() - started)
        return data

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


def open_packed(path: Path, dtype: str = "auto", disk: DiskReader | None = None) -> PackedStore:
    """The store in directory `path`; checks its index."""
    return PackedStore(path, read_index(path), dtype, disk or DiskReader())


def expect_model(store: PackedStore, geometry: ExpertGeometry, shape: ExpertShape) -> None:
    """Refuse a store whose experts do not belong to this model."""
    found = store.geometry
    ours = (found.layers, found.num_experts, found.top_k, store.index.shape)
    if ours != (geometry.layers, geometry.num_experts, geometry.top_k, shape):
        raise WeightsError(
            f"{store.path}: its experts ({len(found.layers)} layers of {found.num_experts}, "
            f"{store.index.shape}) are not those of config.json ({len(geometry.layers)} layers of "
            f"{geometry.num_experts}, {shape}). Export it again."
        )


def _converted(layout: ExpertLayout, dtype: str) -> ExpertLayout:
    """int8 and int4 stay as they are unless a dense type is requested, as everywhere."""
    if dtype == "auto":
        return layout
    widths = [place.columns for place in layout.parts() if place.columns]
    kinds = [
        dtype
        if dtype in ("fp32", "bf16") or (kind not in ("int8", "int4") and columns % GROUP == 0)
        else kind
        for kind, columns in zip(layout.kinds, widths, strict=True)
    ]
    return ExpertLayout(layout.hidden, layout.intermediate, layout.gated, tuple(kinds))


INDEX_FILE = "coterie_store.json"
EXPERTS_FILE = "experts.bin"
BACKBONE_FILE = "backbone.safetensors"

_VERSION = 2
_AGAIN = "Export it again."
# far above every real model, so that a wrong number cannot cause a huge allocation
_MAX_WIDTH, _MAX_EXPERTS, _MAX_LAYERS = 1 << 20, 1 << 16, 1 << 14
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RecordLocation:
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class StoreIndex:
    """`geometry.absent` are the experts without a record."""

    shape: ExpertShape
    geometry: ExpertGeometry
    # of each layer's matrices
    kinds: Mapping[int, tuple[str, ...]]
    records: Mapping[Key, RecordLocation] = field(repr=False)
    # the offset of int8 weights (expert_record.weight_offset of the machine that wrote them)
    weight_offset: int
    # fingerprints of the stores that this one was made from, the model first
    lineage: tuple[str, ...]

    def layout(self, layer: int) -> ExpertLayout:
        shape = self.shape
        return ExpertLayout(shape.hidden, shape.intermediate, shape.gated, self.kinds[layer])

    @property
    def dtype(self) -> str:
        """The kind of all matrices, or all kinds joined by +."""
        return "+".join(sorted({kind for kinds in self.kinds.values() for kind in kinds}))

    @cached_property
    def fingerprint(self) -> str:
        text = json.dumps(self._facts(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return max((record.offset + record.nbytes for record in self.records.values()), default=0)

    def save(self, directory: Path) -> None:
        """Replace the index in one step."""
        text = json.dumps({**self._facts(), "fingerprint": self.fingerprint})
        draft = directory / f".{INDEX_FILE}.{os.getpid()}"
        try:
            with draft.open("w", encoding="utf-8") as sink:
                sink.write(text + "\n")
                sink.flush()
                os.fsync(sink.fileno())
            os.replace(draft, directory / INDEX_FILE)
        finally:
            draft.unlink(missing_ok=True)

    def _facts(self) -> dict[str, Any]:
        geometry, shape = self.geometry, self.shape
        layers = {
            str(layer): {
                "kinds": list(self.kinds[layer]),
                "experts": [self._row((layer, e)) for e in range(geometry.num_experts)],
            }
            for layer in geometry.layers
        }
        return {
            "format": "coterie expert store",
            "version": _VERSION,
            "dtype": self.dtype,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "gated": shape.gated,
            "num_experts": geometry.num_experts,
            "top_k": geometry.top_k,
            "weight_offset": self.weight_offset,
            "lineage": list(self.lineage),
            "layers": layers,
        }

    def _row(self, key: Key) -> list[int | str] | None:
        record = self.records.get(key)
        return None if record is None else [record.offset, record.nbytes, record.sha256]


def read_index(directory: Path) -> StoreIndex:
    """The checked index of a packed store, or a WeightsError that says what is wrong."""
    path = directory / INDEX_FILE
    index = _Parser(path, read_json(path)).index()
    try:
        size = (directory / EXPERTS_FILE).stat().st_size
    except OSError as error:
        raise WeightsError(
            f"{directory / EXPERTS_FILE}: cannot be read ({error.strerror}). {_AGAIN}"
        ) from error
    reached = 0
    for key, record in sorted(index.records.items(), key=lambda item: item[1].offset):
        if record.offset < reached:
            raise WeightsError(f"{path}: {key_name(key)} overlaps another. {_AGAIN}")
        reached = record.offset + record.nbytes
        if reached > size:
            raise WeightsError(
                f"{directory / EXPERTS_FILE}: truncated, {key_name(key)} ends at byte {reached} "
                "but "
                f"the file has {size}. {_AGAIN}"
            )
    return index


def key_name(key: Key) -> str:
    return f"expert {key[1]} of layer {key[0]}"


class _Parser:
    """Checks every field; each error has a sentence of its own."""

    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path, self.document = path, document

    def index(self) -> StoreIndex:
        version = self.document.get("version")
        if version != _VERSION:
            raise WeightsError(
                f"{self.path}: version {version!r} of the store's format; version {_VERSION} is "
                f"read here. {_AGAIN}"
            )
        shape = ExpertShape(
            self._whole("hidden", 1, _MAX_WIDTH),
            self._whole("intermediate", 1, _MAX_WIDTH),
            self._flag("gated"),
        )
        num_experts = self._whole("num_experts", 1, _MAX_EXPERTS)
        top_k = self._whole("top_k", 1, num_experts)
        weight_offset = self._whole("weight_offset", 0, 128)
        kinds, records = self._layers(shape, num_experts)
        keys = [(layer, expert) for layer in kinds for expert in range(num_experts)]
        absent = frozenset(key for key in keys if key not in records)
        geometry = ExpertGeometry(tuple(kinds), num_experts, top_k, absent)
        for layer in kinds:
            if len(geometry.present(layer)) < top_k:
                raise self._wrong(f"layer {layer} has fewer than the {top_k} experts a token needs")
        index = StoreIndex(shape, geometry, kinds, records, weight_offset, self._lineage())
        if self.document.get("fingerprint") != index.fingerprint:
            raise self._wrong("its content does not match its fingerprint")
        return index

    def _layers(
        self, shape: ExpertShape, num_experts: int
    ) -> tuple[dict[int, tuple[str, ...]], dict[Key, RecordLocation]]:
        layers = self.document.get("layers")
        if not isinstance(layers, dict) or not 0 < len(layers) <= _MAX_LAYERS:
            raise self._wrong("it lists no layers")
        kinds: dict[int, tuple[str, ...]] = {}
        records: dict[Key, RecordLocation] = {}
        for text, facts in layers.items():
            if not re.fullmatch("0|[1-9][0-9]{0,5}", text) or not isinstance(facts, dict):
                raise self._wrong(f"layer {text[:20]!r} makes no sense")
            layer = int(text)
            kinds[layer] = self._kinds(layer, facts.get("kinds"), shape)
            layout = ExpertLayout(shape.hidden, shape.intermediate, shape.gated, kinds[layer])
            rows = facts.get("experts")
            if not isinstance(rows, list) or len(rows) != num_experts:
                raise self._wrong(f"layer {layer} does not list {num_experts} experts")
            for expert, row in enumerate(rows):
                if row is not None:
                    records[layer, expert] = self._record((layer, expert), row, layout.nbytes)
        if list(kinds) != sorted(kinds):
            raise self._wrong("its layers are out of order")
        return kinds, records

    def _kinds(self, layer: int, value: Any, shape: ExpertShape) -> tuple[str, ...]:
        matrices = [part for part in shape.parts if not part.endswith("_bias")]
        sound = isinstance(value, list) and len(value) == len(matrices)
        if not sound or any(kind not in KINDS for kind in value):
            raise self._wrong(f"layer {layer} has unknown kinds of matrices")
        for part, name in zip(matrices, value, strict=True):
            kind = KINDS[name]
            if not kind.is_dense and shape.of(part)[1] % kind.columns:
                raise self._wrong(f"layer {layer} cannot keep {part} as {name}")
        return tuple(value)

    def _record(self, key: Key, row: Any, nbytes: int) -> RecordLocation:
        sound = isinstance(row, list) and len(row) == 3 and all(type(x) is int for x in row[:2])
        if not sound or not isinstance(row[2], str) or not _SHA256.fullmatch(row[2]):
            raise self._wrong(f"the entry of {key_name(key)} makes no sense")
        offset, size, digest = row
        if size != nbytes:
            raise self._wrong(f"{key_name(key)} has {size} bytes instead of {nbytes}")
        if not 0 <= offset < 1 << 50 or offset % PAGE:
            raise self._wrong(f"{key_name(key)} lies at the impossible offset {offset}")
        return RecordLocation(offset, size, digest)

    def _lineage(self) -> tuple[str, ...]:
        value = self.document.get("lineage")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong("lineage is not a list of fingerprints")
        return tuple(value)

    def _whole(self, name: str, least: int, most: int) -> int:
        value = self.document.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(f"{name} is {str(value)[:40]!r}")
        return value

    def _flag(self, name: str) -> bool:
        value = self.document.get(name)
        if not isinstance(value, bool):
            raise self._wrong(f"{name} is {str(value)[:40]!r}")
        return value

    def _wrong(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: {what}. {_AGAIN}")
