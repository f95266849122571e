"""Where a tensor's bytes lie in a file, and how a file's pages leave memory again.

Mapped files fill the page cache; whoever has read what it wanted gives the pages back here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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


def release(path: Path, mapped: npt.NDArray[np.uint8]) -> None:
    """Gives back the pages of a mapped file. Views stay valid: a page that is touched again is
    read again, alone. The mapping must hold nothing that was written to it."""
    mapping = getattr(mapped, "_mmap", None)
    if isinstance(mapping, mmap.mmap) and _DROP_MAPPED is not None:
        mapping.madvise(_DROP_MAPPED)
        if _EXPECT_RANDOM is not None:
            mapping.madvise(_EXPECT_RANDOM)
    with _opened(path) as handle:
        drop_cached(handle, 0, 0)


def drop_cached(handle: int, offset: int, nbytes: int) -> None:
    """Forgets the clean cached pages of a range; `nbytes` 0 means to the end."""
    if _advise_file is not None:
        _advise_file(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def expect_random(handle: int) -> None:
    """No read-ahead: what is asked for is read, and nothing beside it."""
    if _advise_file is not None:
        _advise_file(handle, 0, 0, os.POSIX_FADV_RANDOM)


def samples(path: Path, starts: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of each (offset, length), read without read-ahead and not left in the cache."""
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
