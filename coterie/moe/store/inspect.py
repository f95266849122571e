"""Inspects every expert of a store: sizes, norms and counts, or only whether it can be read.

Reads a few at a time, keeps none and changes nothing.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels.cpu.expert_record import dense_parts
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertStore, Key
from coterie.moe.store.disk import aligned_buffer
from coterie.moe.store.packed import key_name

# (bytes done, total bytes)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    key: Key
    nbytes: int
    # part -> Frobenius norm
    norms: dict[str, float]
    # rows in the heatmap; None without a heatmap
    count: float | None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    experts: int
    nbytes: int
    # one sentence for each expert that cannot be read or is damaged
    faults: tuple[str, ...]


def inspect(
    store: ExpertStore,
    keys: Sequence[Key],
    heatmap: Heatmap | None,
    progress: Progress | None = None,
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


def verify(store: ExpertStore, progress: Progress | None = None, depth: int = 4) -> VerifyResult:
    """Read everything, and continue after a fault."""
    keys = store.geometry.keys()
    total, done = sum(store.read_bytes(key) for key in keys), 0
    faults: list[str] = []
    for key, error in _read_all(store, keys, depth):
        done += store.read_bytes(key)
        if error is not None:
            faults.append(f"{key_name(key)}: {error.message}")
        if progress is not None:
            progress(done, total)
    return VerifyResult(len(keys), total, tuple(faults))


def _read_all(
    store: ExpertStore, keys: Iterable[Key], depth: int
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


DEPTHS = (1, 2, 4, 8, 16)
READS = ("direct", "buffered")


@dataclass(frozen=True, slots=True)
class ReadSample:
    """One measurement. `read_s`, `checksum_s` and `pack_s` are thread seconds of the first pass,
    summed over all threads. The second pass, without checksums, took `wall_s`."""

    reads: str
    depth: int
    experts: int
    nbytes: int
    open_s: float
    first_s: float
    wall_s: float
    read_s: float
    checksum_s: float
    pack_s: float

    @property
    def first_bytes_s(self) -> float:
        return self.nbytes / max(self.first_s, 1e-9)

    @property
    def bytes_s(self) -> float:
        return self.nbytes / max(self.wall_s, 1e-9)


def profile_reads(
    opened: Callable[[str], ExpertStore], limit_bytes: int, depths: Sequence[int] = DEPTHS
) -> list[ReadSample]:
    """`opened` returns a new store for a way of reading; each sample reads about `limit_bytes`.
    Ways that the file system does not support are left out."""
    samples = []
    for reads in READS:
        for depth in depths:
            try:
                samples.append(_sample(opened, reads, depth, limit_bytes))
            except ConfigError:
                break
    return samples


def _sample(
    opened: Callable[[str], ExpertStore], reads: str, depth: int, limit_bytes: int
) -> ReadSample:
    started = time.perf_counter()
    store = opened(reads)
    open_s = time.perf_counter() - started
    try:
        keys = _chosen(store, limit_bytes)
        buffers = [aligned_buffer(store.slot_bytes) for _ in range(depth)]
        for buffer in buffers:
            buffer.fill_(1)  # allocate the pages before time is measured
        store.disk.forget()
        first_s = _timed(store, keys, buffers)
        spent = (store.disk.read_s, store.spent.checksum_s, store.spent.pack_s)
        wall_s = _timed(store, keys, buffers)
        nbytes = sum(store.read_bytes(key) for key in keys)
        return ReadSample(reads, depth, len(keys), nbytes, open_s, first_s, wall_s, *spent)
    finally:
        store.close()


def _chosen(store: ExpertStore, limit_bytes: int) -> list[Key]:
    keys = store.geometry.keys()
    random.Random(0).shuffle(keys)
    chosen, nbytes = [], 0
    for key in keys:
        chosen.append(key)
        nbytes += store.read_bytes(key)
        if nbytes >= limit_bytes:
            break
    return chosen


def _timed(store: ExpertStore, keys: Sequence[Key], buffers: Sequence[Tensor]) -> float:
    work: SimpleQueue[Key] = SimpleQueue()
    for key in keys:
        work.put(key)
    faults: list[Exception] = []

    def run(buffer: Tensor) -> None:
        try:
            while True:
                store.read(work.get_nowait(), buffer)
        except Empty:
            return
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return time.perf_counter() - started
