"""Turns the bytes of a stream into chunks: server-sent events, split at any byte.

Pure: bytes in, chunks out. Lines end only where the SSE standard says: an answer may contain any of
the characters that Unicode counts as line ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coterie_client import errors
from coterie_client.decode import decode
from coterie_client.types import InferenceResult, InferStarted

MAX_EVENT_BYTES = 64 * 2**20
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Chunk:
    """One event of an answer: `started`, then a `delta` per piece of text, then `finished`."""

    event: str
    # the next part of the answer; empty at its start and at its end
    text: str = ""
    # only in `started`: who answers, and why
    started: InferStarted | None = None
    # only in `finished`: the whole answer
    result: InferenceResult | None = None


class Frames:
    """Reads one stream. `result` is set once it has ended successfully."""

    def __init__(self, request_id: str | None = None) -> None:
        self.request_id = request_id
        self.result: InferenceResult | None = None
        self._tail = b""
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The chunks that `data` completes; raises the error that the stream contains."""
        text = self._tail + data
        # a \r at the end may be the first half of \r\n
        carriage_return = text[-1:] if text.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(text[: len(text) - len(carriage_return)])
        self._tail = rest + carriage_return
        if len(self._tail) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise errors.UnexpectedAnswer(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            chunk = self._line(line)
            if chunk is not None:
                yield chunk

    def end(self) -> None:
        """The connection is closed; raises an error if the answer is not complete."""
        if self.result is None:
            raise errors.ConnectionFailed(
                "the stream broke off before its end", request_id=self.request_id
            )

    def _line(self, line: bytes) -> Chunk | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._event = value.decode()
        elif name == b"data":
            self._data.append(value)
        return None

    def _dispatch(self) -> Chunk | None:
        event, data = self._event, b"\n".join(self._data)
        self._event, self._data = "", []
        if not data:
            return None
        return self._chunk(event, _fields(data))

    def _chunk(self, event: str, fields: dict[str, Any]) -> Chunk | None:
        if event == "delta":
            return Chunk(event, fields.get("text", ""))
        if event == "started":
            return Chunk(event, started=decode(InferStarted, fields))
        if event == "finished":
            self.result = decode(InferenceResult, fields)
            return Chunk(event, result=self.result)
        if event == "error":
            raise errors.of_frame(fields, self.request_id)
        return None


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise errors.UnexpectedAnswer(f"an event is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.UnexpectedAnswer("an event is not a JSON object")
    return fields
