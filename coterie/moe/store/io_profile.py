"""How fast a store delivers experts: direct against buffered reads, at growing queue depth.

Tells reading from checking and packing, so that one sees what to mend. Reads a sample in a fixed
random order; changes nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.moe.store.base import Store
from coterie.moe.store.disk import aligned_buffer
from coterie.moe.store.geometry import Key

DEPTHS = (1, 2, 4, 8, 16)
READS = ("direct", "buffered")


@dataclass(frozen=True, slots=True)
class Sample:
    """One way to read. `read_s`, `checksum_s` and `pack_s` are thread seconds of the first pass,
    summed over all threads. A second pass, in which nothing is checked any more, took `wall_s`."""

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


def profile(
    opened: Callable[[str], Store], limit_bytes: int, depths: Sequence[int] = DEPTHS
) -> list[Sample]:
    """`opened` gives a fresh store for a way of reading; each sample reads about `limit_bytes`.
    Ways that this file system does not have are left out."""
    samples = []
    for reads in READS:
        for depth in depths:
            try:
                samples.append(_sample(opened, reads, depth, limit_bytes))
            except ConfigError:
                break
    return samples


def _sample(opened: Callable[[str], Store], reads: str, depth: int, limit_bytes: int) -> Sample:
    started = time.perf_counter()
    store = opened(reads)
    open_s = time.perf_counter() - started
    try:
        keys = _chosen(store, limit_bytes)
        buffers = [aligned_buffer(store.slot_bytes) for _ in range(depth)]
        for buffer in buffers:
            buffer.fill_(1)  # the pages are there before the clock runs
        store.disk.forget()
        first_s = _timed(store, keys, buffers)
        spent = (store.disk.read_s, store.spent.checksum_s, store.spent.pack_s)
        wall_s = _timed(store, keys, buffers)
        nbytes = sum(store.read_bytes(key) for key in keys)
        return Sample(reads, depth, len(keys), nbytes, open_s, first_s, wall_s, *spent)
    finally:
        store.close()


def _chosen(store: Store, limit_bytes: int) -> list[Key]:
    keys = store.geometry.keys()
    random.Random(0).shuffle(keys)
    chosen, nbytes = [], 0
    for key in keys:
        chosen.append(key)
        nbytes += store.read_bytes(key)
        if nbytes >= limit_bytes:
            break
    return chosen


def _timed(store: Store, keys: Sequence[Key], buffers: Sequence[Tensor]) -> float:
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
