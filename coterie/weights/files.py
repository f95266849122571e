"""Where a tensor's bytes are in a file, and how a file's pages are released from memory.

Mapped files fill the page cache; code that has finished reading releases the pages here.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core.errors import WeightsError

# absent outside Linux
_advise_file = getattr(os, "posix_fadvise", None)
_DROP_MAPPED = getattr(mmap, "MADV_DONTNEED", None)
_EXPECT_RANDOM = getattr(mmap, "MADV_RANDOM", None)


@dataclass(frozen=True, slots=True)
class FileExtent:
    """A range of bytes of one file."""

    path: Path
    offset: int
    nbytes: int


def unmap(mapped: npt.NDArray[np.uint8]) -> None:
    """Gives back this process's memory of a mapped file. Views stay valid: the system's cache still
    has the pages. The mapping must not contain anything that was written to it."""
    mapping = getattr(mapped, "_mmap", None)
    if isinstance(mapping, mmap.mmap) and _DROP_MAPPED is not None:
        mapping.madvise(_DROP_MAPPED)


def release(path: Path, mapped: npt.NDArray[np.uint8]) -> None:
    """As `unmap`, and drops the pages from the system's cache: one that is used again is read
    again, alone."""
    unmap(mapped)
    mapping = getattr(mapped, "_mmap", None)
    if isinstance(mapping, mmap.mmap) and _EXPECT_RANDOM is not None:
        mapping.madvise(_EXPECT_RANDOM)
    with _opened(path) as handle:
        drop_cached(handle, 0, 0)


def drop_cached(handle: int, offset: int, nbytes: int) -> None:
    """Drops the unmodified cached pages of a range; `nbytes` 0 means to the end."""
    if _advise_file is not None:
        _advise_file(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def expect_random(handle: int) -> None:
    """Turns off read-ahead: only the requested bytes are read."""
    if _advise_file is not None:
        _advise_file(handle, 0, 0, os.POSIX_FADV_RANDOM)


def samples(path: Path, starts: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of each (offset, length), read without read-ahead and not kept in the cache."""
    with _opened(path) as handle:
        expect_random(handle)
        for offset, nbytes in starts:
            os.lseek(handle, offset, os.SEEK_SET)
            yield os.read(handle, nbytes)
        drop_cached(handle, 0, 0)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        yield handle
    finally:
        os.close(handle)


_MAX_BYTES = 64_000_000


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or a WeightsError."""
    value = _read_value(path)
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object. Fetch it again.")
    return value


def read_json_list(path: Path) -> list[Any]:
    """The JSON list in `path`, or a WeightsError."""
    value = _read_value(path)
    if not isinstance(value, list):
        raise WeightsError(f"{path}: not a JSON list. Fetch it again.")
    return value


def _read_value(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise WeightsError(f"{path}: {size} bytes is too large for this file. Fetch it again.")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise WeightsError(
            f"{path}: missing. Give a directory with config.json, the tokenizer and safetensors."
        ) from error
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Check it.") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON. Fetch it again.") from error
    return value


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits for the lock on `path`. The file is not removed: that would race with other waiters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(handle)
        yield
    finally:
        os.close(handle)


if sys.platform == "win32":
    import msvcrt
    import time

    def _acquire(handle: int) -> None:
        while True:
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                return
            except OSError:
                time.sleep(0.2)

    def try_lock(handle: int) -> bool:
        """Whether the lock on an open file was obtained; it is held until the file is closed."""
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _acquire(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX)

    def try_lock(handle: int) -> bool:
        """Whether the lock on an open file was obtained; it is held until the file is closed."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of this file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(handle)
    finally:
        os.close(handle)
