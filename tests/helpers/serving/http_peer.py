"""A server at a real socket that answers as a test writes it, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class PeerRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


Script = Callable[[PeerRequest, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Peer:
    script: Script
    port: int = 0
    # answers to GET /models
    probe_status: int = 200
    requests: list[PeerRequest] = field(default_factory=list)
    num_connections: int = 0
    # connections that the other side closed while an answer was written
    num_left: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


def chunk(text: str | None = None, *, end: str | None = None, **fields: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": end} | fields
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def status(code: int, body: Any = None, **headers: str) -> bytes:
    """A whole answer with this status."""
    raw = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {code} X", "content-type: application/json", f"content-length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def saying(*pieces: bytes) -> Script:
    """Sends these bytes and closes the connection."""

    async def script(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    return script


@asynccontextmanager
async def serving(script: Script, port: int = 0) -> AsyncIterator[Peer]:
    peer = Peer(script)
    writers: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.num_connections += 1
        writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while not writer.is_closing():
                    await _one(peer, reader, writer)
        finally:
            writers.discard(writer)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    peer.port = server.sockets[0].getsockname()[1]
    try:
        yield peer
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def _one(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines) if name
    }
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    request = PeerRequest(method, path, headers, json.loads(raw) if raw else None)
    peer.requests.append(request)
    if method == "GET":
        writer.write(status(peer.probe_status, {"data": []}))
        await writer.drain()
        return
    answering = asyncio.ensure_future(peer.script(request, writer))
    leaving = asyncio.ensure_future(reader.read(1))
    await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not answering.done():
        peer.num_left += 1
        answering.cancel()
        writer.close()
    leaving.cancel()
    with suppress(asyncio.CancelledError, ConnectionError):
        await leaving
    with suppress(asyncio.CancelledError, ConnectionError):
        await answering
