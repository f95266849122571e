"""Looks at every expert of a store: sizes, norms and counts, or only whether it can be read.

Reads a few at a time, keeps none. Changes nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.kernels.expert_record import dense_parts
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import Store
from coterie.moe.store.disk import aligned_buffer
from coterie.moe.store.geometry import Key
from coterie.moe.store.index import named

# (bytes done, bytes in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    key: Key
    nbytes: int
    # part -> Frobenius norm
    norms: dict[str, float]
    # rows the heatmap counted; None without one
    count: float | None


@dataclass(frozen=True, slots=True)
class Verified:
    experts: int
    nbytes: int
    # one sentence for each expert that cannot be read or is damaged
    faults: tuple[str, ...]


def inspect(
    store: Store, keys: Sequence[Key], heatmap: Heatmap | None, progress: Progress | None = None
) -> Iterator[ExpertFacts]:
    buffer, done = aligned_buffer(store.slot_bytes), 0
    total = sum(store.read_bytes(key) for key in keys)
    for key in keys:
        done += store.read(key, buffer)
        layout = store.layout(key[0])
        parts = dense_parts(layout, buffer[: layout.nbytes], torch.float32)
        norms = {name: float(part.norm()) for name, part in parts.items()}
        if progress is not None:
            progress(done, total)
        yield ExpertFacts(key, layout.nbytes, norms, heatmap.count(key) if heatmap else None)


def verify(store: Store, progress: Progress | None = None, depth: int = 4) -> Verified:
    """Reads everything, and goes on after a fault."""
    keys = store.geometry.keys()
    total, done = sum(store.read_bytes(key) for key in keys), 0
    faults: list[str] = []
    for key, error in _read_all(store, keys, depth):
        done += store.read_bytes(key)
        if error is not None:
            faults.append(f"{named(key)}: {error.message}")
        if progress is not None:
            progress(done, total)
    return Verified(len(keys), total, tuple(faults))


def _read_all(
    store: Store, keys: Iterable[Key], depth: int
) -> Iterator[tuple[Key, WeightsError | None]]:
    thread = threading.local()

    def read(key: Key) -> tuple[Key, WeightsError | None]:
        if not hasattr(thread, "buffer"):
            thread.buffer = aligned_buffer(store.slot_bytes)
        buffer: Tensor = thread.buffer
        try:
            store.read(key, buffer)
        except WeightsError as error:
            return key, error
        return key, None

    with ThreadPoolExecutor(min(depth, os.cpu_count() or 1)) as pool:
        yield from pool.map(read, keys)
