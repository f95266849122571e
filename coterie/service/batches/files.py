"""Files of tenants: received within bounds, listed, read and removed.

A file exists when its row does: the row is written when the bytes are on disk. Bytes without a row
are removed an hour after the last write.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from coterie.core.batch import FilePage, StoredFile
from coterie.core.errors import (
    CoterieError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestTooLarge,
)
from coterie.core.settings import FileSettings
from coterie.obs.log import log
from coterie.service.batches.batch_tables import BatchTables
from coterie.service.batches.folder import INPUT, ORPHAN_S, PARTIAL, FileFolder, FileWriter
from coterie.service.batches.store import BatchDatabase, BatchStore

# files that are received at once: of one tenant, and of all
MAX_UPLOADS, MAX_ALL_UPLOADS = 16, 64
# rows that are removed at once
REMOVED_AT_ONCE = 256


class FileStore:
    def __init__(self, store: BatchStore, folder: FileFolder, settings: FileSettings) -> None:
        self._store, self.folder, self.settings = store, folder, settings
        self._uploads: Counter[str] = Counter()
        # bytes of files that are being received, by tenant
        self._arriving: Counter[str] = Counter()
        # bytes of all files, for metrics
        self.num_bytes = 0

    @asynccontextmanager
    async def receive(self, tenant: str) -> AsyncIterator[FileUpload]:
        """A file that is being received. It is removed unless `keep` was called."""
        if self._uploads[tenant] >= MAX_UPLOADS or self._uploads.total() >= MAX_ALL_UPLOADS:
            raise Overloaded("too many files are being received", retry_after_s=1.0)
        self._uploads[tenant] += 1
        upload: FileUpload | None = None
        try:
            await self.check_room(tenant, 1)
            upload = FileUpload(self, tenant, await self.folder.create(new_file_id()))
            yield upload
        finally:
            self._uploads -= Counter({tenant: 1})
            if upload is not None:
                self._arriving -= Counter({tenant: upload.writer.num_bytes})
                if not upload.is_kept:
                    # also if the caller was cancelled
                    await asyncio.shield(upload.writer.discard())

    async def check_room(self, tenant: str, more: int) -> None:
        """Raise if `more` bytes would exceed a bound."""
        settings = self.settings
        await self._store.ask(lambda db: db.files.check_room(tenant, more, settings))

    def count(self, tenant: str, more: int) -> None:
        """Count bytes that have arrived, before they are written."""
        own, total = self._arriving[tenant] + more, self._arriving.total() + more
        if own > self.settings.max_tenant_bytes or total > self.settings.max_total_bytes:
            raise Overloaded("too many bytes are being received at once", retry_after_s=5.0)
        self._arriving[tenant] = own

    async def add(self, file: StoredFile) -> None:
        """Make a complete file visible to its tenant, if there is room for it."""
        settings = self.settings

        def work(db: BatchDatabase) -> int:
            # one thread writes, so nothing comes between; other servers of this home may add more
            db.files.check_room(file.tenant, file.num_bytes, settings)
            db.files.add(file)
            return db.files.num_bytes()

        self.num_bytes = await self._store.ask(work)

    async def find(self, file_id: str, tenant: str, param: str = "file_id") -> StoredFile:
        """`param`: the field that holds the id, for the error."""
        file = await self._store.ask(lambda db: db.files.find(file_id, tenant, time.time()))
        if file is None:
            raise NotFound("there is no file with this id", param=param)
        return file

    async def page(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> FilePage:
        files = await self._store.ask(
            lambda db: db.files.page(tenant, purpose, after, limit, newest_first, time.time())
        )
        if files is None:
            raise InvalidRequest("after: no file has this id", param="after")
        return FilePage(tuple(files[:limit]), len(files) > limit)

    async def content(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """The bytes; the file is open when this returns."""
        pieces = self.folder.pieces(file.id)
        try:
            first = await anext(pieces, b"")
        except BaseException:
            await pieces.aclose()
            raise
        return _continued(first, pieces)

    async def remove(self, file_id: str, tenant: str) -> None:
        if not await self._store.ask(lambda db: db.files.remove(file_id, tenant)):
            raise NotFound("there is no file with this id", param="file_id")
        await self.folder.remove(file_id)

    async def drop(self, file_id: str) -> None:
        """Remove a file that no tenant can see."""
        await self._store.ask(lambda db: db.files.drop(file_id))
        await self.folder.remove(file_id)

    async def expire(self) -> None:
        """Remove files that are too old."""
        while True:
            ids = await self._store.ask(lambda db: db.files.expired(time.time(), REMOVED_AT_ONCE))
            for file_id in ids:
                await self.drop(file_id)
            if len(ids) < REMOVED_AT_ONCE:
                break
        self.num_bytes = await self._store.ask(lambda db: db.files.num_bytes())

    async def remove_orphans(self) -> None:
        """Remove bytes without a row: what a server that died was receiving or writing."""
        folder = self.folder
        names = await folder.aside(lambda: folder.names_unused_since(ORPHAN_S))
        for name in names:
            if not await self._store.ask(partial(_is_used, name=name)):
                await folder.remove(name)
                log("file_removed", path=name, reason="no file or batch has it")


def _is_used(db: BatchDatabase, name: str) -> bool:
    if name.endswith(INPUT):
        batches: BatchTables = db.batches
        return batches.holds_open(name.removesuffix(INPUT))
    return not name.endswith(PARTIAL) and db.files.holds(name)


class FileUpload:
    """One file while it arrives."""

    def __init__(self, files: FileStore, tenant: str, writer: FileWriter) -> None:
        self._files, self._tenant, self.writer = files, tenant, writer
        self.is_kept = False
        self.limit = files.settings.max_bytes

    @property
    def id(self) -> str:
        return self.writer.name

    async def write(self, data: bytes) -> None:
        if self.writer.num_bytes + len(data) > self.limit:
            raise RequestTooLarge(
                f"file: is larger than the limit of {self.limit} bytes", param="file"
            )
        self._files.count(self._tenant, len(data))
        await self.writer.write(data)

    async def keep(self, purpose: str, filename: str, keep_s: float | None) -> StoredFile:
        """Make it a file of the tenant."""
        settings, now = self._files.settings, time.time()
        num_bytes = await self.writer.finish()
        lifetime_s = min(keep_s or settings.keep_s, settings.keep_s)
        file = StoredFile(
            self.id, self._tenant, purpose, filename, num_bytes, now, now + lifetime_s
        )
        self.is_kept = True
        try:
            # a file whose row is being written is kept, even if its caller is gone
            await asyncio.shield(self._files.add(file))
        except CoterieError:
            self.is_kept = False
            raise
        return file


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


async def _continued(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        if first:
            yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()
