"""Which servers of a home are alive: each holds a lock on a file of its own until it ends.

The operating system frees the lock of one that was killed. Knows nothing of jobs.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.weights.lock import try_lock


class Owner:
    """This server's name among those that share a home."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.name = uuid.uuid4().hex
        self._handle = self._take()

    def _take(self) -> int:
        path = self._path(self.name)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # somebody who cleans up may have removed the file before it was locked
            if try_lock(handle) and _is_same(handle, path):
                return handle
            os.close(handle)

    def close(self) -> None:
        self._path(self.name).unlink(missing_ok=True)
        os.close(self._handle)

    @contextmanager
    def gone(self, other: str) -> Iterator[bool]:
        """Whether `other` has ended. If so, nobody else is told the same inside the `with`."""
        path = self._path(other)
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            yield other != self.name
            return
        try:
            if not try_lock(handle):
                yield False
                return
            yield True
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)

    def clean(self) -> None:
        """Removes the files of servers that were killed."""
        for path in self._folder.glob("*.lock"):
            if not path.is_file():
                # somebody else's
                continue
            with self.gone(path.stem):
                continue

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.lock"


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
