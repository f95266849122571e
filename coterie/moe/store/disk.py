"""Positional reads that leave nothing in the page cache.

Uses direct I/O of whole 4 KiB pages where the file system allows it, otherwise ordinary reads whose
pages are dropped at once. Any number of threads may read; a read releases the interpreter lock.
This module knows bytes and files, not experts.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, WeightsError
from coterie.core.moe import READS
from coterie.weights.files import drop_cached, expect_random

PAGE = 4096

# one system call moves at most this much on Linux, rounded down to whole pages
_MAX_CALL_BYTES = 1 << 30

# the file system, or the target memory, does not support direct I/O
_NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class PageSpan:
    """The pages that cover a range of bytes. The range starts `skip` bytes after the first page's
    start."""

    offset: int
    nbytes: int
    skip: int


def covering_pages(offset: int, nbytes: int) -> PageSpan:
    first = offset // PAGE * PAGE
    end = -(-(offset + nbytes) // PAGE) * PAGE
    return PageSpan(first, end - first, offset - first)


def aligned_buffer(nbytes: int) -> Tensor:
    """uint8 at a page boundary, as direct reads need it; uses no memory until it is written."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)


class StagingBuffers:
    """Buffers for raw bytes, one for each read that runs. A read waits for another's buffer where
    the system gives no memory for one more; the first is allocated at once, so one is always
    there."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free = [aligned_buffer(nbytes)]
        self._changed = threading.Condition()

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        buffer = self._take()
        try:
            yield buffer
        finally:
            with self._changed:
                self._free.append(buffer)
                self._changed.notify()

    def _take(self) -> Tensor:
        with self._changed:
            if not self._free:
                try:
                    return aligned_buffer(self._nbytes)
                except OSError as error:
                    if error.errno != errno.ENOMEM:
                        raise
                while not self._free:
                    self._changed.wait()
            return self._free.pop()


@dataclass(slots=True)
class _Handle:
    number: int
    direct: bool
    size: int


class DiskReader:
    """Reads the files of one store. Tests inject faults by overriding `pread`, which makes the
    only read system call."""

    def __init__(self, reads: str = "auto") -> None:
        if reads not in READS:
            raise ConfigError(f"reads is {reads!r}; one of {', '.join(READS)}", param="reads")
        self.reads = reads
        # bytes read, in whole pages; and thread seconds spent in reads
        self.read_bytes = 0
        self.read_s = 0.0
        self._handles: dict[Path, _Handle] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, nbytes: int, out: Tensor) -> Tensor:
        """Bytes [offset, offset + nbytes) of `path`, as a view of `out`, which must be a CPU uint8
        tensor at a page boundary with room for the covering pages."""
        handle, span = self._handle(path), covering_pages(offset, nbytes)
        if out.data_ptr() % PAGE or out.numel() < span.nbytes:
            raise ValueError(f"a buffer of {out.numel()} bytes, not {span.nbytes} at a page")
        started = time.perf_counter()
        view = out.numpy().data[: span.nbytes]
        try:
            got = self._fill(handle, view, span.offset, span.skip + nbytes)
        except OSError as error:
            raise WeightsError(
                f"{path}: {nbytes} bytes at {offset} cannot be read ({error.strerror or error}). "
                "Check the disk."
            ) from error
        if got < span.skip + nbytes:
            raise WeightsError(
                f"{path}: truncated, its bytes end at {span.offset + got} and not behind "
                f"{offset + nbytes}. Fetch or export it again."
            )
        with self._lock:
            self.read_bytes += span.nbytes
            self.read_s += time.perf_counter() - started
        return out[span.skip : span.skip + nbytes]

    def is_direct(self, path: Path) -> bool:
        return self._handle(path).direct

    def size(self, path: Path) -> int:
        return self._handle(path).size

    def open(self, paths: Iterable[Path]) -> None:
        """Open the files now and not at the first read, so that errors are raised at once."""
        for path in paths:
            self._handle(path)

    def forget(self) -> None:
        """Remove the open files from the page cache."""
        with self._lock:
            for handle in self._handles.values():
                drop_cached(handle.number, 0, 0)

    def close(self) -> None:
        with self._lock:
            for handle in self._handles.values():
                os.close(handle.number)
            self._handles.clear()

    def pread(self, number: int, view: memoryview, offset: int) -> int:
        """May read less than requested, as the system call may."""
        return os.preadv(number, [view], offset)

    def _fill(self, handle: _Handle, view: memoryview, offset: int, needed: int) -> int:
        """Read until the first `needed` bytes of `view` are filled or the file ends. Returns the
        number of bytes read."""
        got = 0
        while got < needed:
            room = view[got : got + _MAX_CALL_BYTES]
            direct = handle.direct  # another thread may reopen it meanwhile
            try:
                count = self.pread(handle.number, room, offset + got)
            except OSError as error:
                if not direct or self.reads == "direct" or error.errno not in _NOT_DIRECT:
                    raise
                self._reopen_buffered(handle)
                continue
            if count == 0:
                break
            got += count
            if direct and got < needed and count < PAGE:
                break
            if direct and got < needed:
                # direct reads start at a page: the bytes after its start are read again
                got = got // PAGE * PAGE
        if not handle.direct:
            drop_cached(handle.number, offset, len(view))
        return got

    def _handle(self, path: Path) -> _Handle:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = self._open(path)
            return self._handles[path]

    def _open(self, path: Path) -> _Handle:
        flag = getattr(os, "O_DIRECT", 0)
        if self.reads != "buffered" and flag:
            try:
                number = os.open(path, os.O_RDONLY | flag)
                return _Handle(number, True, os.fstat(number).st_size)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise self._fault(path, error) from error
        if self.reads == "direct":
            raise ConfigError(
                f"{path}: its file system has no direct reads; use reads=auto", param="reads"
            )
        try:
            number = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise self._fault(path, error) from error
        expect_random(number)
        return _Handle(number, False, os.fstat(number).st_size)

    def _reopen_buffered(self, handle: _Handle) -> None:
        with self._lock:
            if handle.direct:
                path = next(path for path, known in self._handles.items() if known is handle)
                number = os.open(path, os.O_RDONLY)
                expect_random(number)
                # keep the file number for threads that are reading now
                os.dup2(number, handle.number)
                os.close(number)
                handle.direct = False

    def _fault(self, path: Path, error: OSError) -> WeightsError:
        return WeightsError(f"{path}: cannot be read ({error.strerror}). Check it.")
