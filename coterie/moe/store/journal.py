"""What an export has finished so far: a line per record, so that a killed export can go on.

The file is also the lock: one export at a time writes into a directory. A journal that was begun
for other records is started anew. A torn last line is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from coterie.core.errors import WeightsError
from coterie.moe.store.geometry import Key
from coterie.weights.lock import try_lock


class Journal:
    NAME = "export.journal"

    def __init__(self, directory: Path, header: dict[str, Any]) -> None:
        self._path, self._header = directory / self.NAME, json.dumps(header, sort_keys=True)
        # what the journal says; whoever believes it checks it first
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
                self._believe(line)
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
        """Only once the record is in its file."""
        self._write(key, digest)
        self._file.flush()

    def _write(self, key: Key, digest: str) -> None:
        self._file.write(f"{key[0]} {key[1]} {digest}\n")

    def _believe(self, line: str) -> None:
        parts = line.split(" ")
        if len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit():
            self.finished[int(parts[0]), int(parts[1])] = parts[2]
