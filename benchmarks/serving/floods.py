"""Floods against a real server: what they take of its memory, and of everybody else's time.

    python -m benchmarks.serving.floods [--seconds 60] [--connections 1,8,64] [--model MODEL]

One process, pinned to one core, floods the gateway from each number of connections: with requests
that are pipelined without a key and whose answers nobody reads (`unread`), the same with answers
that are read (`read`), with a WebSocket message of empty fragments (`fragments`), with a body in
chunks of one byte (`chunks`), and from another address with connections that send 30 requests
without a key and are reset at once (`reset`; of those so many are open at a time). Meanwhile two
callers stream answers that must be the ones they had before, and a probe asks for /health/live.
Exit code 1 if a bar is missed: memory within 100 MB and back within 10 s, a probe under 0.5 s, no
gap in a caller's stream of a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

KINDS = ("unread", "read", "fragments", "chunks", "reset")
CALLERS = 2
# the callers' key, and that of the sockets that flood
KEYS = ("key-of-the-callers", "key-of-the-flood")
MAX_MORE_BYTES, MAX_PROBE_S, MAX_GAP_S, BACK_S = 100_000_000, 0.5, 1.0, 10.0
# what may be left of a flood's memory when it counts as given back
LEFT_BYTES = 20_000_000
PROBE_EVERY_S, START_S, WAIT_S = 0.05, 300.0, 60.0

GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
PIPELINE, PIPELINE_OF_RESET = GET * 1500, GET * 30
# where `reset` comes from, so that the callers have another address
RESET_SOURCE = ("127.0.0.2", 0)
CHUNKS_HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
)
CHUNKS = b"1\r\na\r\n" * 10_000
# empty, masked: the beginning of a text, and continuations of it
FRAGMENTS = b"\x01\x80\0\0\0\0", b"\0\x80\0\0\0\0" * 10_000
HANDSHAKE = (
    "GET /v1/infer/ws HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: AQIDBAUGBwgJCgsMDQ4PEA==\r\n\r\n"
)


@dataclass(slots=True)
class FloodResult:
    kind: str
    connections: int
    seconds: float
    before_bytes: int
    peak_bytes: int = 0
    # when it is back, or after BACK_S
    after_bytes: int = 0
    back_s: float = 0.0
    sent_bytes: int = 0
    opened: int = 0
    probes: list[float] = field(default_factory=list)
    answers: int = 0
    different: int = 0
    worst_gap_s: float = 0.0

    def faults(self) -> list[str]:
        bars = {
            "nothing was sent": self.sent_bytes > 0,
            "no answer came": self.answers > 0 and len(self.probes) > 0,
            "memory grew": self.peak_bytes <= self.before_bytes + MAX_MORE_BYTES,
            "memory stayed": self.after_bytes <= self.before_bytes + LEFT_BYTES,
            "a probe waited": max(self.probes, default=0.0) < MAX_PROBE_S,
            "an answer differs": self.different == 0,
            "a stream paused": self.worst_gap_s < MAX_GAP_S,
        }
        return [name for name, holds in bars.items() if not holds]

    def row(self) -> str:
        more = (self.peak_bytes - self.before_bytes) / 1e6
        left = (self.after_bytes - self.before_bytes) / 1e6
        worst = max(self.probes, default=0.0)
        return (
            f"| {self.kind} | {self.connections} | {self.sent_bytes / 1e6:.1f} | {self.opened} | "
            f"{more:+.0f} | {left:+.0f} in {self.back_s:.1f} s | {worst:.3f} | "
            f"{self.worst_gap_s:.3f} | {self.answers} | {self.different} | "
            f"{'; '.join(self.faults()) or 'held'} |"
        )


HEADER = """\
| flood | connections | MB sent | opened | MB more | MB left | worst probe, s | worst gap, s \
| answers | different | bars |
|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class FloodTarget:
    """A server that runs, and the name of a specialist of it."""

    url: str
    pid: int
    model: str
    # a caller's, and one for sockets that flood
    keys: tuple[str, str]


def flood(url: str, kind: str, connections: int, seconds: float, key: str) -> tuple[int, int]:
    """Send until the time is up; the bytes sent and the connections opened."""
    where = urlsplit(url)
    assert where.hostname is not None and where.port is not None
    address, until = (where.hostname, where.port), time.monotonic() + seconds
    if kind == "reset":
        return reset_flood(address, connections, until)
    waiting = selectors.DefaultSelector()
    sent, opened, missing = 0, 0, connections
    while (now := time.monotonic()) < until:
        for _ in range(missing):
            with suppress(OSError):
                events = selectors.EVENT_WRITE | (selectors.EVENT_READ if kind != "unread" else 0)
                waiting.register(opened_socket(address, kind, key), events, [0])
                opened, missing = opened + 1, missing - 1
        ready = waiting.select(min(0.1, until - now))
        for chosen, events in ready:
            sock = chosen.fileobj
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_READ and not sock.recv(1 << 20):
                    raise ConnectionResetError
                if events & selectors.EVENT_WRITE:
                    sent += _send(sock, kind, chosen.data)
            except BlockingIOError:
                continue
            except OSError:
                waiting.unregister(sock)
                sock.close()
                missing += 1
    for chosen in list(waiting.get_map().values()):
        assert isinstance(chosen.fileobj, socket.socket)
        chosen.fileobj.close()
    return sent, opened


def reset_flood(address: tuple[str, int], connections: int, until: float) -> tuple[int, int]:
    """Connect, send, reset, and again; `connections` of them are open at a time."""
    sent, opened, alive = 0, 0, deque[socket.socket]()
    while time.monotonic() < until:
        with suppress(OSError):
            sock = socket.create_connection(address, WAIT_S, RESET_SOURCE)
            # closing resets it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            opened += 1
            alive.append(sock)
            sent += sock.send(PIPELINE_OF_RESET)
        if len(alive) >= connections:
            alive.popleft().close()
    for sock in alive:
        sock.close()
    return sent, opened


def opened_socket(address: tuple[str, int], kind: str, key: str) -> socket.socket:
    """Ready to be flooded; a WebSocket has begun its message."""
    sock = socket.create_connection(address, timeout=WAIT_S)
    try:
        if kind == "fragments":
            sock.sendall(HANDSHAKE.format(key=key).encode())
            answer = b""
            while b"\r\n\r\n" not in answer:
                part = sock.recv(4096)
                if not part:
                    raise ConnectionResetError
                answer += part
            assert b" 101 " in answer, answer
            sock.sendall(FRAGMENTS[0])
        elif kind == "chunks":
            sock.sendall(CHUNKS_HEAD.format(key=key).encode())
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _send(sock: socket.socket, kind: str, begun: list[int]) -> int:
    """`begun`: bytes of the piece that went before."""
    piece = {"fragments": FRAGMENTS[1], "chunks": CHUNKS}.get(kind, PIPELINE)
    count = sock.send(memoryview(piece)[begun[0] :])
    begun[0] = (begun[0] + count) % len(piece)
    return count


async def measured(target: FloodTarget, kind: str, connections: int, seconds: float) -> FloodResult:
    """One flood against a server that runs."""
    expected = await _answer(target, None)
    result = FloodResult(kind, connections, seconds, _rss(target.pid))
    command = [sys.executable, "-m", "benchmarks.serving.floods", "--flood", kind]
    command += ["--url", target.url, "--key", target.keys[1]]
    command += ["--connections", str(connections), "--seconds", str(seconds)]
    root = Path(__file__).resolve().parents[2]
    flooder = await asyncio.create_subprocess_exec(
        *command, cwd=root, stdout=asyncio.subprocess.PIPE
    )
    ended = asyncio.Event()
    watchers = [asyncio.create_task(_call(target, expected, result, ended)) for _ in range(CALLERS)]
    watchers.append(asyncio.create_task(_probe(target, result, ended)))
    try:
        out, _ = await asyncio.wait_for(flooder.communicate(), seconds + WAIT_S)
    finally:
        if flooder.returncode is None:
            flooder.kill()
        ended.set()
        await asyncio.gather(*watchers)
    assert flooder.returncode == 0
    result.sent_bytes, result.opened = json.loads(out)
    await _until_back(target, result)
    return result


async def _until_back(target: FloodTarget, result: FloodResult) -> None:
    begun = time.monotonic()
    while True:
        result.after_bytes, result.back_s = _rss(target.pid), time.monotonic() - begun
        is_back = result.after_bytes <= result.before_bytes + LEFT_BYTES
        if is_back or result.back_s > BACK_S:
            return
        await asyncio.sleep(0.1)


async def _call(
    target: FloodTarget, expected: str, result: FloodResult, ended: asyncio.Event
) -> None:
    while not ended.is_set():
        text = await _answer(target, result)
        result.answers += 1
        result.different += text != expected


async def _answer(target: FloodTarget, result: FloodResult | None) -> str:
    """The text of a streamed answer; notes its longest gap, the first token's too."""
    body = json.dumps(
        {"model": target.model, "max_tokens": 48, "temperature": 0, "ignore_eos": True,
         "stream": True, "messages": [{"role": "user", "content": "Tell me about the sea."}]}
    )  # fmt: skip
    text, is_whole = "", False
    reader, writer = await _send_request(target, "POST /v1/chat/completions", body)
    last = time.monotonic()
    try:
        while line := await asyncio.wait_for(reader.readline(), WAIT_S):
            if line.startswith(b"data: "):
                now = time.monotonic()
                if result is not None:
                    result.worst_gap_s = max(result.worst_gap_s, now - last)
                last = now
                if line.startswith(b"data: [DONE]"):
                    is_whole = True
                    break
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    finally:
        writer.close()
    return text if is_whole else f"cut: {text}"


async def _probe(target: FloodTarget, result: FloodResult, ended: asyncio.Event) -> None:
    """Each on a new connection, as a supervisor asks."""
    while not ended.is_set():
        begun = time.monotonic()
        reader, writer = await _send_request(target, "GET /health/live")
        line = await asyncio.wait_for(reader.readline(), WAIT_S)
        writer.close()
        assert b" 200 " in line, line
        result.probes.append(time.monotonic() - begun)
        result.peak_bytes = max(result.peak_bytes, _rss(target.pid))
        await asyncio.sleep(PROBE_EVERY_S)


async def _send_request(
    target: FloodTarget, line: str, body: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(target.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"authorization: Bearer {target.keys[0]}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer


def _rss(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def serving(model: str) -> Iterator[FloodTarget]:
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder, "keys"), Path(folder, "log")
        keys.write_text("\n".join(KEYS))
        keys.chmod(0o600)
        command = [sys.executable, "-m", "coterie", "serve", *([model] if model else [])]
        command += ["--name", "drill", "--port", "0", "--api-key-file", str(keys)]
        with log.open("wb") as file:
            server = subprocess.Popen(command, stderr=file, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            deadline = time.monotonic() + START_S
            # the banner is printed when it is ready
            line = server.stdout.readline()
            found = re.search(r"listening on (http://\S+?),", log.read_text())
            assert line and found and time.monotonic() < deadline, log.read_text()
            yield FloodTarget(found[1], server.pid, "drill", KEYS)
        finally:
            server.terminate()
            server.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", default="1,8,64")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--model", default="", help="default: the default model")
    parser.add_argument("--json", type=Path)
    # the process that floods
    parser.add_argument("--flood", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--key", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    counts = [int(number) for number in arguments.connections.split(",")]
    if arguments.flood:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        found = flood(arguments.url, arguments.flood, counts[0], arguments.seconds, arguments.key)
        print(json.dumps(found))
        return 0
    results: list[dict[str, Any]] = []
    missed = 0
    print(HEADER)
    with serving(arguments.model) as target:
        for kind in arguments.kinds.split(","):
            for count in counts:
                result = asyncio.run(measured(target, kind, count, arguments.seconds))
                print(result.row(), flush=True)
                missed += bool(result.faults())
                results.append(asdict(result) | {"faults": result.faults()})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
