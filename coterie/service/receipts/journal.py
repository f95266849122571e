"""Receipts of requests that were accepted moments ago, in a file that outlives this process.

The database gets rows a few milliseconds later, many in one commit. If the server is killed before
that, the next one finds them here. Appending costs microseconds, so it is done on the event loop
before a request is enqueued. It protects from a process that dies, not from a machine that does.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from coterie.core.private_files import private_folder
from coterie.weights.files import try_lock

# a file is given up when it is this long, and removed when its receipts are in the database
MAX_BYTES = 1_000_000
_LENGTH = struct.Struct("<I")
_SUFFIX = ".journal"


class ReceiptJournal:
    """Files in `folder`, locked as long as their server lives. `MAX_BYTES` each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        private_folder(folder)
        self._path, self._handle = self._new()
        self._size = 0

    def append(self, data: bytes) -> None:
        """When it returns, the data outlives this process."""
        os.write(self._handle, _LENGTH.pack(len(data)) + data)
        self._size += _LENGTH.size + len(data)

    def replaced(self) -> Callable[[], None] | None:
        """If the file is long, start another. Returns what removes the old one: call it when its
        receipts are in the database."""
        if self._size < MAX_BYTES:
            return None
        old_path, old_handle = self._path, self._handle
        self._path, self._handle = self._new()
        self._size = 0

        def remove() -> None:
            old_path.unlink(missing_ok=True)
            os.close(old_handle)

        return remove

    def close(self) -> None:
        """All receipts are in the database."""
        self._path.unlink(missing_ok=True)
        os.close(self._handle)

    def _new(self) -> tuple[Path, int]:
        path = self._folder / f"{uuid.uuid4().hex}{_SUFFIX}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try_lock(handle)
        return path, handle


def left_behind(folder: Path) -> Iterator[bytes]:
    """What servers that were killed have appended; each of their files is removed after it was
    read to its end."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            if not try_lock(handle):
                # its server is alive
                continue
            with open(handle, "rb", closefd=False) as file:
                data = file.read()
            yield from _entries(data)
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _entries(data: bytes) -> Iterator[bytes]:
    """The whole entries; the last one may have been cut off."""
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length
