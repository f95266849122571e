"""The interface of expert stores: checkpoints and packed stores.

`checkpoint.open_store` chooses by the files in the directory. A store returns records in the layout
of kernels/expert_layout, ready for the kernels, whatever the file's format is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from coterie.kernels.expert_layout import ExpertLayout

if TYPE_CHECKING:
    from coterie.moe.store.disk import DiskReader

# names of a layout's parts, in its order
GATED = ("gate", "up", "down")
PLAIN = ("fc1", "fc1_bias", "fc2", "fc2_bias")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """part -> tensor name with {layer} and {expert}. Without ".{expert}" it names a stack
    [experts, rows, columns], as GGUF keeps them."""

    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """gated: gate, up [intermediate, hidden] and down [hidden, intermediate]; otherwise fc1
    [intermediate, hidden] and fc2 [hidden, intermediate] with their biases."""

    hidden: int
    intermediate: int
    gated: bool

    @property
    def parts(self) -> tuple[str, ...]:
        return GATED if self.gated else PLAIN

    def of(self, part: str) -> tuple[int, ...]:
        rows = self.hidden if part.startswith(("down", "fc2")) else self.intermediate
        columns = self.hidden + self.intermediate - rows
        return (rows,) if part.endswith("_bias") else (rows, columns)


@dataclass(slots=True)
class StoreTimings:
    """Thread seconds, summed over all threads; `DiskReader.read_s` has those of the reads."""

    checksum_s: float = 0.0
    pack_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, checksum_s: float = 0.0, pack_s: float = 0.0) -> None:
        with self.lock:
            self.checksum_s += checksum_s
            self.pack_s += pack_s


class ExpertStore(Protocol):
    geometry: ExpertGeometry
    # the largest record, a multiple of the page size; and all present records together
    slot_bytes: int
    expert_bytes: int
    # RAM that each thread inside `read` uses in addition to `out`
    staging_bytes: int
    disk: DiskReader
    spent: StoreTimings

    @property
    def fingerprint(self) -> str:
        """Changes when any expert changes."""
        ...

    @property
    def lineage(self) -> tuple[str, ...]:
        """Fingerprints of the experts before an export or an edit, the model's own first. A
        heatmap of any of them still describes these experts."""
        ...

    def layout(self, layer: int) -> ExpertLayout: ...

    def read_bytes(self, key: Key) -> int:
        """The bytes that one `read` takes from the disk: whole pages."""
        ...

    def read(self, key: Key, out: Tensor) -> int:
        """Fill out[: layout(layer).nbytes] with the expert's record, ready for this process's
        kernels. Blocks; any number of threads may call it. `out` is uint8 on the CPU; if it starts
        at a page boundary, the disk may write into it directly. Returns the bytes read."""
        ...

    def tensors(self) -> frozenset[str]:
        """Names of the checkpoint's tensors with experts; the others are the backbone."""
        ...

    def files(self) -> frozenset[Path]:
        """The files that `read` reads from."""
        ...

    def close(self) -> None: ...


# (layer, index): the layer's number in the model, the expert's number in the layer
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """The routed experts of a model. Layers without experts (dense ones) are not listed."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    # experts that a pruned store does not have: the gate must not choose them
    absent: frozenset[Key] = frozenset()

    @property
    def total(self) -> int:
        return len(self.layers) * self.num_experts - len(self.absent)

    def present(self, layer: int) -> tuple[int, ...]:
        if not self.absent:
            return tuple(range(self.num_experts))
        return tuple(e for e in range(self.num_experts) if (layer, e) not in self.absent)

    def keys(self) -> list[Key]:
        return [(layer, expert) for layer in self.layers for expert in self.present(layer)]
