"""Reads the lines of an input file, a few at a time, and checks them.

Memory is bounded by the longest line that is allowed; a longer one is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import BinaryIO

from coterie.core.batch import Batch, LineFault
from coterie.service.batches.batch_tables import BatchLine
from coterie.service.batches.calls import BadLine, BatchCalls

# bytes and lines that are checked at once: some milliseconds
PART_BYTES, PART_LINES = 64 * 1024, 64
READ_BYTES = 256 * 1024
# faults that are collected before the rest of a file is left unread
MAX_FAULTS = 1000
# lines without a request, in all
MAX_EMPTY_LINES = 10_000
BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class _Line:
    number: int
    start: int
    # None if it is too long
    raw: bytes | None


class LineReader:
    """Splits a file into lines. For one thread."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file, self._max = file, max_bytes
        self._buffer = b""
        # where the next line starts in the buffer, and where the buffer starts in the file
        self._at = 0
        self._offset = 0
        self._number = 0
        self._at_end = False

    def part(self) -> list[_Line]:
        """The next lines; none at the end."""
        lines: list[_Line] = []
        size = 0
        while len(lines) < PART_LINES and size < PART_BYTES:
            line = self._next()
            if line is None:
                break
            lines.append(line)
            size += len(line.raw or b"")
        return lines

    def _next(self) -> _Line | None:
        start, is_long = self._offset + self._at, False
        searched = self._at
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0 or self._at_end:
                break
            # what was read before is dropped once in a piece, not with each line
            self._drop(self._at)
            if len(self._buffer) > self._max:
                # keep nothing of it
                is_long = True
                self._drop(len(self._buffer))
            searched = len(self._buffer)
            piece = self._file.read(READ_BYTES)
            self._at_end = not piece
            self._buffer += piece
        if end < 0 and self._at == len(self._buffer) and not is_long:
            return None
        stop = len(self._buffer) if end < 0 else end
        is_long = is_long or stop - self._at > self._max
        raw = None if is_long else self._buffer[self._at : stop]
        self._at = stop + (end >= 0)
        self._number += 1
        return _Line(self._number, start, raw)

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._offset += count
        self._at = 0


@dataclass(slots=True)
class LineChecker:
    """Checks the lines of one batch, part by part."""

    batch: Batch
    calls: BatchCalls
    max_requests: int
    faults: list[LineFault] = field(default_factory=list)
    num_requests: int = 0
    # it has too many empty lines
    is_cut: bool = False
    _seen: set[str] = field(default_factory=set)

    @property
    def has_enough(self) -> bool:
        """Whether the rest need not be read."""
        is_over = self.is_cut or self.num_requests > self.max_requests
        return is_over or len(self.faults) >= MAX_FAULTS

    def check(self, lines: list[_Line]) -> list[BatchLine]:
        """The requests of these lines. Empty lines are passed over."""
        found: list[BatchLine] = []
        for line in lines:
            raw = line.raw
            if raw is not None and line.number == 1:
                raw = raw.removeprefix(BOM)
            if raw is not None and not raw.strip():
                if line.number - self.num_requests > MAX_EMPTY_LINES:
                    message = f"the file has more than {MAX_EMPTY_LINES} empty lines"
                    self.faults.append(LineFault("too_many_lines", message, line.number))
                    self.is_cut = True
                    break
                continue
            self.num_requests += 1
            if self.num_requests > self.max_requests:
                message = f"a batch holds at most {self.max_requests} requests"
                self.faults.append(LineFault("too_many_requests", message, line.number))
                break
            try:
                custom_id = self._custom_id(raw)
            except BadLine as bad:
                self.faults.append(LineFault(bad.code, bad.message, line.number, bad.param))
                continue
            start = line.start + len(line.raw or b"") - len(raw or b"")
            found.append(BatchLine(line.number, custom_id, start, len(raw or b"")))
        return [] if self.faults else found

    def end(self) -> None:
        """After the last line."""
        if not self.num_requests and not self.faults:
            self.faults.append(LineFault("empty_file", "the input file holds no request", 1))

    def _custom_id(self, raw: bytes | None) -> str:
        if raw is None:
            limit = self.calls.max_line_bytes
            raise BadLine("line_too_long", f"the line is longer than {limit} bytes")
        custom_id = self.calls.check_line(self.batch, raw)
        if custom_id in self._seen:
            raise BadLine("duplicate_custom_id", "another line has the same custom_id", "custom_id")
        self._seen.add(custom_id)
        return custom_id
