"""Takes a body that has arrived completely at once, and sends a whole answer in one write.

uvicorn's own `receive` waits for an event, and its `send` takes the head and the body one after the
other and looks at every header with two patterns. They stay in use for streams, and for what is not
as simple as most requests and answers are.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Receive, Send
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

Headers = Sequence[tuple[bytes, bytes]]
# headers that change how an answer is sent
_SENDING = frozenset((b"content-length", b"transfer-encoding", b"connection"))


def whole_body(receive: Receive) -> bytes | None:
    """What `receive` would return as the only part of a body; None if it would wait, or return
    something else."""
    cycle = getattr(receive, "__self__", None)
    if type(cycle) is not RequestResponseCycle or not cycle.message_event.is_set():
        return None
    is_whole = not (cycle.more_body or cycle.disconnected or cycle.response_complete)
    if not is_whole or cycle.waiting_for_100_continue:
        return None
    cycle.flow.resume_reading()
    cycle.message_event.clear()
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """`headers` without the length of the body."""
    cycle = getattr(send, "__self__", None)
    if type(cycle) is RequestResponseCycle and _write(cycle, status, headers, body):
        return
    length = b"%d" % len(body)
    all_headers = [(b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


def _write(cycle: RequestResponseCycle, status: int, headers: Headers, body: bytes) -> bool:
    """Whether it was written, with the same bytes and the same state afterwards as by
    `RequestResponseCycle.send`."""
    is_plain = not (
        cycle.response_started
        or cycle.disconnected
        or cycle.flow.write_paused
        or cycle.access_log
        or cycle.scope["method"] == "HEAD"
    )
    names, values = zip(*cycle.default_headers, *headers, strict=True)
    all_names = b"".join(names)
    if not is_plain or not _SENDING.isdisjoint(names) or all_names != all_names.lower():
        return False
    if HEADER_RE.search(all_names) or HEADER_VALUE_RE.search(b"".join(values)):
        return False
    default = b"".join([b"%b: %b\r\n" % item for item in cycle.default_headers])
    given = b"".join([b"%b: %b\r\n" % item for item in headers])
    ending = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
    length = b"content-length: %d\r\n" % len(body)
    cycle.transport.write(b"".join((STATUS_LINE[status], default, length, given, ending, body)))
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = cycle.chunked_encoding = False
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True
