"""Splits a multipart/form-data body into its parts while it arrives.

`MultipartParser.feed` takes the next bytes and returns what they complete; it keeps at most the
headers of one part and the length of a boundary. Everything that is not as RFC 7578 wants it raises
`InvalidRequest`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coterie.core.errors import InvalidRequest, RequestTooLarge, UnsupportedMediaType

MAX_BOUNDARY = 70
# of one part, names and values together
MAX_PART_HEADERS = 4096
MAX_PARTS = 16
# before the first boundary, and after the last
MAX_AROUND = 1024
MAX_NAME, MAX_FILENAME = 128, 255
_BOUNDARY = re.compile(rb"[A-Za-z0-9'()+_,./:=? -]{1,70}")
_PARAMETER = re.compile(r';[ \t]*([A-Za-z0-9*_-]{1,32})[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;"\s]*)')
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class PartStart:
    """A part begins. `filename` is None if the part has none; it is a name without folders."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The part that began last is complete."""


PartEvent = PartStart | PartData | PartEnd


def boundary_of(content_type: str) -> bytes:
    """The boundary of a multipart/form-data body, from its Content-Type."""
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise UnsupportedMediaType("send the file as 'content-type: multipart/form-data'")
    for name, value in _PARAMETER.findall(";" + rest):
        if name.lower() == "boundary":
            boundary = _unquoted(value).encode("latin-1", "replace")
            if _BOUNDARY.fullmatch(boundary) and not boundary.endswith(b" "):
                return boundary
    raise InvalidRequest(
        f"content-type: multipart/form-data needs a boundary of 1 to {MAX_BOUNDARY} characters"
    )


class MultipartParser:
    """One body. The state is the method that reads what comes next."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # the first boundary may be the first line
        self._buffer = b"\r\n"
        self._state: Callable[[], PartEvent | None] = self._before
        self._num_parts = 0
        self._num_around = 0
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[PartEvent]:
        """What `data` completes."""
        self._buffer += data
        while True:
            state = self._state
            event = state()
            if event is not None:
                yield event
            elif self._state == state:
                # it needs more bytes
                return

    def finish(self) -> None:
        """Raise if the body ended before its last boundary."""
        if not self.is_complete:
            raise InvalidRequest("the body ended before its last part was complete")

    def _before(self) -> PartEvent | None:
        at = self._buffer.find(self._delimiter)
        self._drop_around(at if at >= 0 else len(self._buffer) - len(self._delimiter) + 1)
        if at >= 0:
            self._buffer = self._buffer[len(self._delimiter) :]
            self._state = self._boundary_end
        return None

    def _boundary_end(self) -> PartEvent | None:
        """Behind a boundary: the end of its line, or the end of all parts."""
        if self._buffer.startswith(b"--"):
            self._buffer, self._state = self._buffer[2:], self._after
            self.is_complete = True
            return None
        line = self._buffer.lstrip(b" \t")
        if line.startswith(b"\r\n"):
            self._num_parts += 1
            if self._num_parts > MAX_PARTS:
                raise InvalidRequest(f"the body has more than {MAX_PARTS} parts")
            self._buffer, self._state = line[2:], self._headers
        elif len(self._buffer) > MAX_AROUND or line not in (b"", b"\r", b"-"):
            raise InvalidRequest("a boundary of the body is not followed by a new line")
        return None

    def _headers(self) -> PartEvent | None:
        at = 0 if self._buffer.startswith(b"\r\n") else self._buffer.find(b"\r\n\r\n")
        if max(at, len(self._buffer) - 4 if at < 0 else 0) > MAX_PART_HEADERS:
            what = f"a part of the body has more than {MAX_PART_HEADERS} bytes of headers"
            raise RequestTooLarge(what)
        if at < 0:
            return None
        start = _part_start(self._buffer[:at])
        self._buffer, self._state = self._buffer[at + 4 :], self._data
        return start

    def _data(self) -> PartEvent | None:
        at = self._buffer.find(self._delimiter)
        if at == 0:
            self._buffer = self._buffer[len(self._delimiter) :]
            self._state = self._boundary_end
            return PartEnd()
        # the end of the buffer may be the beginning of a boundary
        count = at if at > 0 else len(self._buffer) - len(self._delimiter) + 1
        if count <= 0:
            return None
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return PartData(data)

    def _after(self) -> PartEvent | None:
        self._drop_around(len(self._buffer))
        return None

    def _drop_around(self, count: int) -> None:
        if count > 0:
            self._num_around += count
            self._buffer = self._buffer[count:]
            if self._num_around > MAX_AROUND:
                raise InvalidRequest("the body holds bytes outside of its parts")


def _part_start(headers: bytes) -> PartStart:
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        kind, _, rest = value.partition(";")
        given = {key.lower(): _unquoted(text) for key, text in _PARAMETER.findall(";" + rest)}
        if kind.strip().lower() == "form-data" and "name" in given:
            filename = given.get("filename")
            return PartStart(
                given["name"][:MAX_NAME], None if filename is None else bare_name(filename)
            )
    raise InvalidRequest("a part of the body has no name: send content-disposition: form-data")


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == '"':
        # a backslash is part of a name on Windows, unless it is before a quote
        text = text[1:-1].replace('\\"', '"')
    return text


def bare_name(filename: str) -> str:
    """The last part of a path, shortened, without control characters."""
    name = _CONTROL.sub("", re.split(r"[/\\]", filename)[-1]).strip()
    return name[:MAX_FILENAME] if name not in ("", ".", "..") else "file"
