"""Frames of HTTP/2, to be a gRPC client that does what no library would do."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3) + bytes((kind, flags))
    return head + stream.to_bytes(4) + payload


def window(num_bytes: int) -> bytes:
    """The settings of a client that takes this much of each stream."""
    return frame(SETTINGS, 0, 0, struct.pack("!HI", 4, num_bytes))


def call(stream: int, path: str, key: str = "") -> bytes:
    """The head of a gRPC call; its message follows in DATA frames."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if key:
        fields["authorization"] = f"Bearer {key}"
    block = b"".join(_literal(name, value) for name, value in fields.items())
    return frame(HEADERS, END_HEADERS, stream, block)


def message(stream: int, raw: bytes) -> bytes:
    """The only message of a call."""
    return frame(DATA, END_STREAM, stream, b"\0" + len(raw).to_bytes(4) + raw)


def _literal(name: str, value: str) -> bytes:
    # without indexing; all texts are short
    assert len(name) < 127 and len(value) < 127
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
