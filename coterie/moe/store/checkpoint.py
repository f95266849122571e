"""Experts read in place from a checkpoint: safetensors or GGUF, no conversion on disk.

Each read takes an expert's bytes from the file, brings them to the precision asked for and packs
them, in the thread that reads; nothing of it stays. Knows no tier and no strategy.
"""

from __future__ import annotations

import threading
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.store.base import ExpertNames, ExpertShape, Spent
from coterie.moe.store.disk import Disk, aligned_buffer
from coterie.moe.store.geometry import Geometry, Key
from coterie.moe.store.reading import Reading, Target, read_bytes
from coterie.moe.store.tensors import Piece, kind_of, locate
from coterie.weights.quantize import DTYPES

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint


class CheckpointStore:
    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: Geometry,
        names: ExpertNames,
        shape: ExpertShape,
        dtype: str,
        disk: Disk,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}", param="dtype")
        self.geometry, self.disk, self.spent = geometry, disk, Spent()
        self._checkpoint = checkpoint
        self._pieces = locate(checkpoint, geometry, names, shape)
        self._layouts = {layer: self._layout(layer, shape, dtype) for layer in geometry.layers}
        self._targets = {layer: Target(layout) for layer, layout in self._layouts.items()}
        # made when they are first needed
        self._readings: dict[Key, Reading] = {}
        sizes = {layer: layout.nbytes for layer, layout in self._layouts.items()}
        self.slot_bytes = max(sizes.values(), default=0)
        self.expert_bytes = sum(sizes[layer] for layer, _ in self._pieces)
        self.staging_bytes = max((self.read_bytes(key) for key in self._pieces), default=0)
        self._thread = threading.local()
        disk.open(self.files())

    @cached_property
    def fingerprint(self) -> str:
        return self._checkpoint.fingerprint()

    @property
    def lineage(self) -> tuple[str, ...]:
        return (self.fingerprint,)

    def layout(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def read_bytes(self, key: Key) -> int:
        return read_bytes(self._expert(key))

    def read(self, key: Key, out: Tensor) -> int:
        way, staging = self._reading(key), self._staging()
        way.fetch(self.disk, staging)
        started = time.perf_counter()
        way.pack(staging, out)
        self.spent.add(pack_s=time.perf_counter() - started)
        return way.nbytes

    def tensors(self) -> frozenset[str]:
        return frozenset(piece.name for pieces in self._pieces.values() for piece in pieces)

    def files(self) -> frozenset[Path]:
        return frozenset(piece.extent.path for pieces in self._pieces.values() for piece in pieces)

    def close(self) -> None:
        self.disk.close()

    def _expert(self, key: Key) -> tuple[Piece, ...]:
        if key not in self._pieces:
            raise WeightsError(f"{self._checkpoint.path}: has no expert {key[1]} in layer {key[0]}")
        return self._pieces[key]

    def _reading(self, key: Key) -> Reading:
        found = self._readings.get(key)
        if found is None:
            found = self._readings[key] = Reading(self._expert(key), self._targets[key[0]])
        return found

    def _layout(self, layer: int, shape: ExpertShape, dtype: str) -> ExpertLayout:
        """One for the whole layer: slots and kernels know no other."""
        kinds: tuple[str, ...] = ()
        for expert in self.geometry.present(layer):
            matrices = [p for p in self._pieces[layer, expert] if not p.part.endswith("_bias")]
            own = tuple(kind_of(piece, dtype) for piece in matrices)
            if kinds and own != kinds:
                raise WeightsError(
                    f"{self._checkpoint.path}: expert tensor {matrices[0].name!r} is stored as "
                    f"{', '.join(own)}, the layer's others as {', '.join(kinds)}. "
                    "Ask for one precision: --dtype bf16, int8 or int4."
                )
            kinds = own
        return ExpertLayout(shape.hidden, shape.intermediate, shape.gated, kinds)

    def _staging(self) -> Tensor:
        """This thread's buffer for raw bytes."""
        if not hasattr(self._thread, "buffer"):
            self._thread.buffer = aligned_buffer(self.staging_bytes)
        buffer: Tensor = self._thread.buffer
        return buffer
