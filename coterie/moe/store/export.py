"""Writes a packed store: backbone, experts and index, in a temporary directory that is renamed at
the end.

An export that was killed can continue: a journal lists finished records, which are verified before
they are used. A few threads read, convert and hash; records are written in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.kernels.cpu.expert_record import weight_offset
from coterie.moe.store.base import ExpertShape, ExpertStore, Key
from coterie.moe.store.disk import DiskReader, aligned_buffer
from coterie.moe.store.packed import (
    BACKBONE_FILE,
    EXPERTS_FILE,
    RecordLocation,
    StoreIndex,
    key_name,
)
from coterie.weights.checkpoint import Checkpoint, GGUFCheckpoint
from coterie.weights.files import drop_cached, try_lock
from coterie.weights.formats.safetensors_write import copy_tensors

# (bytes done, total bytes)
Progress = Callable[[int, int], None]

# the other files of a model's directory that are copied
_COPIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "chat_template.*", "vocab.*", "merges.txt", "LICENSE*", "README.md",
)  # fmt: skip

_FLUSH_BYTES = 256 << 20
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export did: records written now, and records that an earlier attempt wrote."""

    path: Path
    index: StoreIndex
    written: int
    resumed: int
    backbone_bytes: int


def export(
    checkpoint: Checkpoint, store: ExpertStore, target: Path, progress: Progress | None = None
) -> ExportResult:
    """Make the directory `target`. It does not exist before it is complete."""
    if target.exists():
        raise WeightsError(f"{target}: exists already. Give a new directory.")
    partial = target.with_name(f"{target.name}.partial")
    with _write_errors(target):
        partial.mkdir(parents=True, exist_ok=True)
        with ExportJournal(partial, _header(store)) as journal:
            experts = store.tensors()
            names = [name for name in checkpoint.names() if name not in experts]
            rest = sum(checkpoint.extent(name).nbytes for name in names)
            written = _Writer(store, partial, journal, _Steps(progress, rest)).run()
            backbone = copy_tensors(checkpoint, names, partial / BACKBONE_FILE, written.steps)
            _copy_files(checkpoint, partial)
            written.index.save(partial)
            os.replace(partial, target)
            _sync_directory(target.parent)
            (target / ExportJournal.NAME).unlink()
    return ExportResult(target, written.index, written.count, written.resumed, backbone)


def _header(store: ExpertStore) -> dict[str, Any]:
    """Two exports with the same header write the same records."""
    layouts = {str(layer): list(store.layout(layer).kinds) for layer in store.geometry.layers}
    return {
        "source": store.fingerprint,
        "absent": sorted(store.geometry.absent),
        "layouts": layouts,
        "weight_offset": weight_offset(),
    }


class _Steps:
    """Adds up the bytes that are done, of `total`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self.total, self._done = progress, total, 0

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self.total)


class _Writer:
    """Writes records in order, each at an offset that depends only on the layouts."""

    def __init__(
        self, store: ExpertStore, directory: Path, journal: ExportJournal, steps: _Steps
    ) -> None:
        self.store, self.journal, self.steps = store, journal, steps
        self.path = directory / EXPERTS_FILE
        self._places, self._total = self._plan()
        steps.total += self._total
        self.count = self.resumed = 0

    def run(self) -> _Writer:
        digests = self._finished()
        self.resumed = len(digests)
        missing = [key for key in self._places if key not in digests]
        self.path.touch()
        with self.path.open("r+b", buffering=0) as sink:
            waiting = 0
            for key, record, digest in self._read_ahead(missing):
                offset, nbytes = self._places[key]
                sink.seek(offset)
                _write_all(sink, record)
                self.journal.add(key, digest)
                digests[key] = digest
                self.count += 1
                self.steps(nbytes)
                waiting += nbytes
                if waiting >= _FLUSH_BYTES:
                    waiting = 0
                    _flush(sink)
            sink.truncate(self._total)
            _flush(sink)
        self.index = self._index(digests)
        return self

    def _plan(self) -> tuple[dict[Key, tuple[int, int]], int]:
        places, offset = {}, 0
        for key in self.store.geometry.keys():  # noqa: SIM118 (a method of Geometry)
            nbytes = self.store.layout(key[0]).nbytes
            places[key] = (offset, nbytes)
            offset += nbytes
        return places, offset

    def _finished(self) -> dict[Key, str]:
        """Records of an earlier attempt whose bytes match the journal."""
        if not self.journal.finished or not self.path.exists():
            return {}
        found: dict[Key, str] = {}
        buffer, disk = aligned_buffer(self.store.slot_bytes), DiskReader()
        size = self.path.stat().st_size
        for key, digest in self.journal.finished.items():
            offset, nbytes = self._places.get(key, (size, 1))
            if offset + nbytes > size:
                continue
            data = disk.read(self.path, offset, nbytes, buffer)
            if hashlib.sha256(data.numpy().data).hexdigest() == digest:
                found[key] = digest
                self.steps(nbytes)
        disk.close()
        return found

    def _read_ahead(self, keys: list[Key]) -> Iterator[tuple[Key, Tensor, str]]:
        """(key, record, sha256) in order; a buffer is reused after its record was consumed."""
        workers = min(_WORKERS, os.cpu_count() or 1)
        free = [aligned_buffer(self.store.slot_bytes) for _ in range(workers + 1)]
        waiting: deque[tuple[Key, Tensor, Future[tuple[Tensor, str]]]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            left = iter(keys)
            while True:
                while free and (key := next(left, None)) is not None:
                    buffer = free.pop()
                    waiting.append((key, buffer, pool.submit(self._record, key, buffer)))
                if not waiting:
                    return
                key, buffer, future = waiting.popleft()
                yield (key, *future.result())
                free.append(buffer)

    def _record(self, key: Key, buffer: Tensor) -> tuple[Tensor, str]:
        try:
            self.store.read(key, buffer)
        except WeightsError as error:
            raise WeightsError(f"{key_name(key)}: {error.message}") from error
        record = buffer[: self.store.layout(key[0]).nbytes]
        return record, hashlib.sha256(record.numpy().data).hexdigest()

    def _index(self, digests: dict[Key, str]) -> StoreIndex:
        geometry = self.store.geometry
        layout = self.store.layout(geometry.layers[0])
        return StoreIndex(
            shape=ExpertShape(layout.hidden, layout.intermediate, layout.gated),
            geometry=geometry,
            kinds={layer: self.store.layout(layer).kinds for layer in geometry.layers},
            records={
                key: RecordLocation(*place, digests[key]) for key, place in self._places.items()
            },
            weight_offset=weight_offset(),
            lineage=self.store.lineage,
        )


def _write_all(sink: Any, record: Tensor) -> None:
    view = record.numpy().data
    while len(view):
        view = view[sink.write(view) :]


def _flush(sink: Any) -> None:
    os.fsync(sink.fileno())
    drop_cached(sink.fileno(), 0, 0)


def _copy_files(checkpoint: Checkpoint, directory: Path) -> None:
    if isinstance(checkpoint, GGUFCheckpoint):
        (directory / "tokenizer.gguf").write_bytes(checkpoint.without_tensors())
        facts = {"config.json": checkpoint.config, "generation_config.json": checkpoint.generation}
        for name, value in facts.items():
            (directory / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        return
    for pattern in _COPIED:
        for file in checkpoint.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Turn errors such as a full disk or missing rights into a WeightsError."""
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"{error.filename or target}: cannot be written ({error.strerror or error}). What is "
            "written stays, and the same command continues it."
        ) from error


class ExportJournal:
    NAME = "export.journal"

    def __init__(self, directory: Path, header: dict[str, Any]) -> None:
        self._path, self._header = directory / self.NAME, json.dumps(header, sort_keys=True)
        # as the journal says; the caller must verify them
        self.finished: dict[Key, str] = {}

    def __enter__(self) -> Self:
        self._file: IO[str] = self._path.open("a+", encoding="utf-8")
        if not try_lock(self._file.fileno()):
            self._file.close()
            raise WeightsError(f"{self._path.parent}: another export is writing it. Wait for it.")
        self._file.seek(0)
        lines = self._file.read().split("\n")[:-1]
        if lines[:1] == [self._header]:
            for line in lines[1:]:
                self._parse(line)
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self._header + "\n")
        for key, digest in self.finished.items():
            self._write(key, digest)
        self._file.flush()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, key: Key, digest: str) -> None:
        """Call it after the record was written."""
        self._write(key, digest)
        self._file.flush()

    def _write(self, key: Key, digest: str) -> None:
        self._file.write(f"{key[0]} {key[1]} {digest}\n")

    def _parse(self, line: str) -> None:
        parts = line.split(" ")
        if len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit():
            self.finished[int(parts[0]), int(parts[1])] = parts[2]
