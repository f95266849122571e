"""A lock between processes, held on a file. The operating system frees it when its holder dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits until `path` is ours. The file stays: removing it would race with those who wait."""
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
        """Whether an open file is ours now; it stays so until it is closed."""
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
        """Whether an open file is ours now; it stays so until it is closed."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
