"""What batches need from the APIs: checking a line, answering it, and writing its result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from coterie.core.batch import REQUEST_ERRORED, Batch, BatchTokens
from coterie.core.errors import CoterieError
from coterie.service.batches.batch_tables import ClaimedRequest, EndedRequest

NO_TOKENS = BatchTokens()


class BadLine(Exception):
    """A line that is not a request of its batch's endpoint."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """The end of one request. `line` is what the file with results has about it."""

    line: bytes
    state: str = REQUEST_ERRORED
    tokens: BatchTokens = NO_TOKENS


class BatchCalls(Protocol):
    @property
    def endpoints(self) -> Collection[str]:
        """The endpoints whose requests can be in a batch."""
        ...

    @property
    def max_line_bytes(self) -> int: ...

    def check_line(self, batch: Batch, raw: bytes) -> str:
        """The custom id of a line. Raises BadLine."""
        ...

    async def answer(self, batch: Batch, request: ClaimedRequest, raw: bytes) -> RequestAnswer:
        """Raises Overloaded or Unavailable if it cannot be answered now. Every other error is an
        answer."""
        ...

    def error_line(self, batch: Batch, request: ClaimedRequest, error: CoterieError) -> bytes:
        """The result of a request that cannot be run."""
        ...

    def unanswered_line(self, batch: Batch, request: EndedRequest) -> bytes:
        """The result of a request that was cancelled or has expired."""
        ...
