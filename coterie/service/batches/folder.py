"""The folder with the bytes of files: written while they arrive, read in pieces, never as a whole.

A name in the folder is an id that this server made; what a caller calls a file is only shown. All
work with the disk runs on threads of its own.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from coterie.core.errors import Unavailable
from coterie.core.private_files import private_folder
from coterie.obs.log import log

T = TypeVar("T")
# bytes that are collected before they are written, and read at once
PIECE_BYTES = 256 * 1024
THREADS = 4
PARTIAL, INPUT = ".partial", ".input"
# a file without a row is removed when nothing was written to it for this long
ORPHAN_S = 3600.0
RETRY_S = 5.0


class FileFolder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(THREADS, "files")

    async def aside(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread. A problem with the disk raises Unavailable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except OSError as error:
            log("files_failed", level="error", reason=f"{self._path}: {error}")
            raise Unavailable(
                "files cannot be read or written now; the server's log has the reason",
                retry_after_s=RETRY_S,
            ) from error

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def path(self, name: str) -> Path:
        assert name and "/" not in name and not name.startswith("."), "names are made here"
        return self._path / name

    async def create(self, name: str) -> FileWriter:
        """A new file. It has its name when it is complete."""
        partial = self.path(name + PARTIAL)

        def work() -> BinaryIO:
            private_folder(self._path)
            # it holds prompts: only this user may read it
            return os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", 0)

        return FileWriter(self, await self.aside(work), partial, self.path(name))

    async def link(self, name: str, other: str) -> None:
        """Give the file a second name: it stays when the first one is removed."""

        def work() -> None:
            try:
                os.link(self.path(name), self.path(other))
            except FileNotFoundError:
                raise
            except OSError:
                # a file system without links
                shutil.copyfile(self.path(name), self.path(other))
            self.sync()

        await self.aside(work)

    async def remove(self, *names: str) -> None:
        def work() -> None:
            for name in names:
                self.path(name).unlink(missing_ok=True)

        await self.aside(work)

    async def read(self, name: str, start: int, length: int) -> bytes:
        def work() -> bytes:
            with self.path(name).open("rb", 0) as file:
                return os.pread(file.fileno(), length, start)

        return await self.aside(work)

    async def pieces(self, name: str) -> AsyncGenerator[bytes, None]:
        """The bytes of the file. It is opened by the first piece; from then on it can be read to
        its end, also if it is removed."""
        file = await self.aside(lambda: self.path(name).open("rb", 0))
        try:
            while piece := await self.aside(lambda: file.read(PIECE_BYTES)):
                yield piece
        finally:
            file.close()

    def names_unused_since(self, seconds: float) -> list[str]:
        """Names of files that nothing was written to for so long. Call it on a thread."""
        before, names = time.time() - seconds, list[str]()
        if self._path.is_dir():
            for entry in os.scandir(self._path):
                if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < before:
                    names.append(entry.name)
        return names

    def sync(self) -> None:
        """Write the names in the folder to disk. Call it on a thread."""
        if os.name != "posix":
            return
        handle = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class FileWriter:
    """One file while it is written."""

    def __init__(self, folder: FileFolder, file: BinaryIO, partial: Path, path: Path) -> None:
        self._folder, self._file = folder, file
        self._partial, self._path = partial, path
        self.name = path.name
        self._waiting: list[bytes] = []
        self._num_waiting = 0
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_waiting += len(data)
        self.num_bytes += len(data)
        if self._num_waiting >= PIECE_BYTES:
            await self._flush()

    async def finish(self) -> int:
        """Write everything to disk and give the file its name. Returns its size."""
        await self._flush()

        def work() -> None:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
            self._folder.sync()

        await self._folder.aside(work)
        return self.num_bytes

    async def rewrite(self, name: str, work: Callable[[mmap.mmap, BinaryIO], T]) -> T:
        """Make the file `name` from what was written: `work` reads the one and writes the other,
        on a thread. If it raises, there is no new file."""
        await self._flush()
        partial, path = self._folder.path(name + PARTIAL), self._folder.path(name)

        def run() -> T:
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(handle, "wb") as target, self._partial.open("rb") as own:
                    # closed when nothing refers to it any more
                    source = mmap.mmap(own.fileno(), 0, access=mmap.ACCESS_READ)
                    found = work(source, target)
                    target.flush()
                    os.fsync(target.fileno())
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            self._folder.sync()
            return found

        return await self._folder.aside(run)

    async def discard(self) -> None:
        """Remove what was written."""

        def work() -> None:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

        await self._folder.aside(work)

    async def _flush(self) -> None:
        data, self._waiting, self._num_waiting = b"".join(self._waiting), [], 0

        def work() -> None:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

        if data:
            await self._folder.aside(work)
