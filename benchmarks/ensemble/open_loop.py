"""An open-loop HTTP load on one core: requests leave at drawn times, whether others are answered or
not. The loop polls without sleeping, so that its own timers add nothing to a measured latency.
"""

from __future__ import annotations

import random
import selectors
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# connections at once; a request that finds none free is not sent, and counted
MAX_OPEN = 256
_HEADER_END = b"\r\n\r\n"


@dataclass(slots=True)
class LoadResult:
    """Seconds from the time a request was due to the last byte of its answer."""

    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    duration_s: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.duration_s

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        if not ordered:
            return float("inf")
        return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class _Connection:
    __slots__ = ("data", "due_at", "need", "socket", "status")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.data = b""
        self.due_at = 0.0
        # bytes of the whole answer, once its headers are there
        self.need: int | None = None
        self.status = 0

    def send(self, request: bytes, due_at: float) -> None:
        self.data, self.need, self.due_at = b"", None, due_at
        self.socket.send(request)

    def take(self) -> bool:
        """Read what is there. Whether the answer is whole."""
        received = self.socket.recv(65536)
        if not received:
            raise ConnectionError("the server closed the connection")
        self.data += received
        if self.need is None:
            end = self.data.find(_HEADER_END)
            if end < 0:
                return False
            head = self.data[:end].lower()
            self.status = int(head[9:12])
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            self.need = end + len(_HEADER_END) + int(length)
        return len(self.data) >= self.need


def post(path: str, body: bytes, key: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def run(port: int, requests: Sequence[bytes], rate: float, seconds: float, seed: int) -> LoadResult:
    """Send `requests` in turn, `rate` a second on average (Poisson); at the end, wait for what is
    open, at most as long again."""
    rng, result = random.Random(seed), LoadResult()
    selector = selectors.DefaultSelector()
    idle: list[_Connection] = []
    num_open = sent = 0
    begun = time.perf_counter()
    due_at, end_at = begun + rng.expovariate(rate), begun + seconds
    while True:
        now = time.perf_counter()
        while due_at <= min(now, end_at):
            connection = idle.pop() if idle else None
            if connection is None and num_open < MAX_OPEN:
                connection = _Connection(port)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            if connection is None:
                result.unanswered += 1
            else:
                connection.send(requests[sent % len(requests)], due_at)
                num_open += 1
            sent += 1
            due_at += rng.expovariate(rate)
        if now >= end_at and (not num_open or now >= end_at + seconds):
            break
        for key, _ in selector.select(0):
            connection = key.data
            try:
                is_whole = connection.take()
            except ConnectionError:
                # a server may close a connection that is idle for long
                selector.unregister(connection.socket)
                connection.socket.close()
                if connection in idle:
                    idle.remove(connection)
                else:
                    num_open -= 1
                    result.unanswered += 1
                continue
            if is_whole:
                result.latencies_s.append(time.perf_counter() - connection.due_at)
                result.statuses[connection.status] += 1
                num_open -= 1
                idle.append(connection)
    result.unanswered += num_open
    result.duration_s = max(time.perf_counter() - begun, seconds)
    for key in list(selector.get_map().values()):
        key.data.socket.close()
    return result
