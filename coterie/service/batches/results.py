"""Writes the files with the results of a batch, in the order of its lines."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from coterie.core.batch import (
    BATCH_OUTPUT,
    MESSAGE_RESULTS,
    REQUEST_SUCCEEDED,
    Batch,
    LineFault,
    StoredFile,
)
from coterie.service.batches.batch_tables import EndedRequest
from coterie.service.batches.calls import BatchCalls
from coterie.service.batches.files import FileStore, new_file_id
from coterie.service.batches.folder import FileWriter
from coterie.service.batches.store import BatchStore

# rows that are read at once
ROWS = 32
ANTHROPIC = "anthropic"
_encode = msgspec.json.Encoder().encode


class ResultWriter:
    """The files of one batch. A file that would be empty is not made."""

    def __init__(
        self, store: BatchStore, files: FileStore, calls: BatchCalls, batch: Batch
    ) -> None:
        self._store, self._files, self._calls, self._batch = store, files, calls, batch
        self._output: FileWriter | None = None
        self._error: FileWriter | None = None

    async def write(self) -> tuple[StoredFile | None, StoredFile | None]:
        """The file with answers and the file with errors; a message batch has one for both."""
        line = 0
        try:
            while rows := await self._rows(line):
                for row in rows:
                    await self._add(row)
                line = rows[-1].line
            return await self._finish()
        except BaseException:
            await self._discard()
            raise

    async def write_faults(self, faults: Sequence[LineFault]) -> StoredFile | None:
        """The file with errors of a batch that cannot be run."""
        self._error = await self._files.folder.create(new_file_id())
        try:
            for fault in faults:
                error = {
                    "code": fault.code, "message": fault.message, "param": fault.param,
                    "line": fault.line,
                }  # fmt: skip
                row = {"id": None, "custom_id": None, "response": None, "error": error}
                await self._error.write(_encode(row) + b"\n")
            return (await self._finish())[1]
        except BaseException:
            await self._discard()
            raise

    async def _rows(self, after: int) -> list[EndedRequest]:
        batch_id = self._batch.id
        return await self._store.ask(lambda db: db.batches.ended(batch_id, after, ROWS))

    async def _add(self, row: EndedRequest) -> None:
        result = row.result or self._calls.unanswered_line(self._batch, row)
        folder = self._files.folder
        if row.state == REQUEST_SUCCEEDED or self._batch.dialect == ANTHROPIC:
            self._output = self._output or await folder.create(new_file_id())
            await self._output.write(result + b"\n")
        else:
            self._error = self._error or await folder.create(new_file_id())
            await self._error.write(result + b"\n")

    async def _finish(self) -> tuple[StoredFile | None, StoredFile | None]:
        return await self._complete(self._output, "output"), await self._complete(
            self._error, "error"
        )

    async def _complete(self, writer: FileWriter | None, kind: str) -> StoredFile | None:
        if writer is None:
            return None
        batch, now = self._batch, time.time()
        num_bytes = await writer.finish()
        keep_s = self._files.settings.keep_s
        lifetime_s = min(batch.output_keep_s or keep_s, keep_s)
        purpose = MESSAGE_RESULTS if batch.dialect == ANTHROPIC else BATCH_OUTPUT
        name = f"{batch.id}_{kind}.jsonl"
        return StoredFile(
            writer.name, batch.tenant, purpose, name, num_bytes, now, now + lifetime_s
        )

    async def _discard(self) -> None:
        for writer in (self._output, self._error):
            if writer is not None:
                await writer.discard()
