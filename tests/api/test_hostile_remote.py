"""A remote server that floods the gateway with what is no answer: the request ends with a typed
error, and the gateway's other callers are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.http_peer import DONE, HEAD, PeerRequest, chunk, serving
from tests.helpers.serving.server_process import Probe, Served, chat

CHUNKED = HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
# how many requests the hostile server gets at once
CALLERS = 16
SETTINGS = """
[engine]
kv_bytes = "8MB"
[[specialists]]
name = "far"
[specialists.remote]
context = 1024
url = "{url}"
timeout_s = {timeout_s}
max_running = 16
[[specialists]]
name = "near"
model = "{tiny}"
"""


def framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


# what the server sends first, and then again and again
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "comments": (HEAD, b":\n"),
    "tokens": (HEAD, chunk("a")),
    "tokens without text": (HEAD, chunk("")),
    "answers 100": (b"", b"HTTP/1.1 100 \r\n\r\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "bytes in a chunk each": (CHUNKED, framed(b"\n")),
    "empty data": (HEAD, b"data:\n"),
    "comments after the end": (HEAD + chunk("a") + chunk(end="stop") + DONE, b":\n"),
    "a body without end": (HEAD.replace(b"text/event-stream", b"application/json"), b"[" * 64),
    "a fault without end": (CHUNKED.replace(b"200 OK", b"500 No"), framed(b"x")),
    "choices": (HEAD, b'data: {"choices":[' + b",".join([b'{"text":"a"}'] * 9999) + b"]}\n"),
}


class HostileServer:
    """Floods every request with `FLOODS[flood]`, from a thread of its own."""

    def __init__(self) -> None:
        self.flood, self.pause_s = "comments", 0.0
        self.url = ""
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._listening.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        self._loop.close()

    async def _run(self) -> None:
        async with serving(self._answer) as peer:
            self.url = peer.url
            self._listening.set()
            await self._ended.wait()

    async def _answer(self, _: PeerRequest, writer: asyncio.StreamWriter) -> None:
        first, again = FLOODS[self.flood]
        writer.write(first)
        if not self.pause_s:
            again *= max(65536 // len(again), 1)
        while True:
            writer.write(again)
            await writer.drain()
            await asyncio.sleep(self.pause_s)


@pytest.fixture(scope="module")
def hostile() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.stop()


@contextmanager
def gateway_to(server: HostileServer, folder: Any, timeout_s: float) -> Iterator[Served]:
    file = folder / "coterie.toml"
    tiny = tiny_checkpoint("llama")
    file.write_text(SETTINGS.format(url=server.url, tiny=tiny, timeout_s=timeout_s))
    served = Served("--config", str(file))
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def gateway(hostile: HostileServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with gateway_to(hostile, tmp_path_factory.mktemp("hostile"), 60.0) as served:
        yield served


def worst_nap(stop: threading.Event) -> float:
    """How late a thread of this machine comes that asked to sleep for a moment."""
    worst, begun = 0.0, time.monotonic()
    while not stop.wait(0.01):
        now = time.monotonic()
        worst, begun = max(worst, now - begun - 0.01), now
    return worst


def asked(gateway: Served, model: str) -> tuple[int, Any]:
    reply = gateway.post("/v1/chat/completions", chat(model=model))
    return reply.status, json.loads(reply.body)


SLICE = ("comments", "answers 100")


@pytest.mark.parametrize(
    "flood",
    [pytest.param(name, marks=() if name in SLICE else pytest.mark.full) for name in FLOODS],
)
def test_a_flood_ends_and_holds_nobody_up(
    gateway: Served, hostile: HostileServer, flood: str
) -> None:
    hostile.flood = flood
    _, usual = asked(gateway, "near")
    stop = threading.Event()
    with ThreadPoolExecutor(CALLERS + 1) as pool, Probe(gateway) as probe:
        lag = pool.submit(worst_nap, stop)
        floods = [pool.submit(asked, gateway, "far") for _ in range(CALLERS)]
        others = 0
        while not others or not all(one.done() for one in floods):
            begun = time.monotonic()
            status, answer = asked(gateway, "near")
            assert status == 200 and answer["choices"] == usual["choices"]
            others += 1
            assert time.monotonic() - begun < 30, f"after {others} answers"
        stop.set()
    for one in floods:
        status, answer = one.result()
        if flood == "comments after the end":
            assert status == 200 and answer["choices"][0]["message"]["content"] == "a"
        else:
            assert status in (500, 503), answer
            assert answer["error"]["code"] in ("specialist_unavailable", "worker_crashed"), answer
    print(f"{flood}: {others} other answers, worst probe {probe.worst_s:.3f} s, {lag.result():.3f}")
    assert probe.worst_s < max(1.0, 8 * lag.result()), (probe.worst_s, lag.result())


def test_drips_of_comments_do_not_outlive_the_limit(hostile: HostileServer, tmp_path: Any) -> None:
    """Each byte comes in time, the answer never: ten times `timeout_s` and a second a token."""
    with gateway_to(hostile, tmp_path, 0.2) as gateway:
        for flood, code in (("comments", 503), ("tokens without text", 500), ("empty data", 503)):
            hostile.flood, hostile.pause_s = flood, 0.02
            begun = time.monotonic()
            reply = gateway.post("/v1/chat/completions", chat(model="far", max_tokens=2))
            assert reply.status == code, reply.body
            assert time.monotonic() - begun < 15
    hostile.pause_s = 0.0
