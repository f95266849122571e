"""The index of a packed store: which record lies where, what it is and what it must hash to.

Written whole or not at all. Read with distrust: every number is checked against the others and
against the file before anybody uses it. Knows JSON, no tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError
from coterie.kernels.expert_layout import GROUP, KINDS, PAGE, ExpertLayout
from coterie.moe.store.base import ExpertGeometry, ExpertShape, Key
from coterie.weights.formats.json_file import read_json

INDEX_FILE = "coterie_store.json"
EXPERTS_FILE = "experts.bin"
BACKBONE_FILE = "backbone.safetensors"

_VERSION = 1
_AGAIN = "Export it again."
# far above every real model: a wrong number never allocates
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
    # what int8 weights are stored with (expert_record.weight_offset of the writer)
    weight_offset: int
    # fingerprints of what this came from, the model first
    lineage: tuple[str, ...]

    def layout(self, layer: int) -> ExpertLayout:
        shape = self.shape
        return ExpertLayout(shape.hidden, shape.intermediate, shape.gated, self.kinds[layer])

    @property
    def dtype(self) -> str:
        """The kind of all matrices, or all kinds there are."""
        return "+".join(sorted({kind for kinds in self.kinds.values() for kind in kinds}))

    @cached_property
    def fingerprint(self) -> str:
        text = json.dumps(self._facts(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def end(self) -> int:
        """Behind the last record."""
        return max((record.offset + record.nbytes for record in self.records.values()), default=0)

    def save(self, directory: Path) -> None:
        """Replaces the index in one step."""
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
    """The sound index of a packed store, or a WeightsError that names what is wrong."""
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
    """One sentence for each thing that is wrong."""

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
        steps = {"int8": GROUP, "int4": GROUP, "q4_k": 256, "q6_k": 256}
        for part, kind in zip(matrices, value, strict=True):
            if shape.of(part)[1] % steps.get(kind, 1):
                raise self._wrong(f"layer {layer} cannot keep {part} as {kind}")
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
