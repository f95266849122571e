"""Clients that go away: their work stops at once and nothing of theirs stays behind."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
# the same where the end of a text cannot be ignored
ENDLESS = {"type": "array", "items": {"type": "integer"}, "minItems": 900}


class Client:
    """A bare socket: it can vanish at any byte."""

    def __init__(self, served: Served, body: dict[str, object], path: str = CHAT) -> None:
        where = urlsplit(served.url)
        self.socket = socket.create_connection((where.hostname, where.port), timeout=60)
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
        self.socket.sendall(head.encode() + raw)
        self.received = b""

    def read_until(self, mark: bytes) -> None:
        while mark not in self.received:
            piece = self.socket.recv(65536)
            assert piece, f"closed after {self.received[-200:]!r}"
            self.received += piece

    def vanish(self) -> None:
        self.socket.close()


@pytest.fixture(scope="module")
def crowd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Room for many, and set up by a file: every stream of these tests can wait."""
    config = tmp_path_factory.mktemp("crowd") / "coterie.toml"
    config.write_text(
        f"""
        [server]
        cors_origins = ["https://example.com"]
        [engine]
        max_queue = 400
        [[specialists]]
        name = "tiny"
        model = "{tiny_checkpoint("llama")}"
        """
    )
    served = Served("--config", str(config))
    yield served
    served.stop()


def holdings(served: Served) -> dict[str, float]:
    """Everything a finished request must have given back."""
    pid = served.process.pid
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "streams": served.metric("coterie_gateway_open_streams"),
        "running": served.metric("vllm:num_requests_running"),
        "waiting": served.metric("vllm:num_requests_waiting"),
        "kv": served.metric("vllm:kv_cache_usage_perc"),
    }


def given_back(served: Served, before: dict[str, float], within_s: float) -> bool:
    """Whether it comes to hold no more than before; a connection of the tests before may have
    been closed meanwhile."""
    deadline = time.monotonic() + within_s
    while not (done := all(now <= before[name] for name, now in holdings(served).items())):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return done


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
def test_one_that_vanishes_is_aborted(crowd_server: Served, stream: bool, path: str) -> None:
    body = chat(stream=stream, **LONG)
    if path == "/api/chat":
        # it has other names for the rest
        body = {name: body[name] for name in ("model", "messages", "stream")} | {"format": ENDLESS}
    client = Client(crowd_server, body, path)
    while crowd_server.metric("vllm:num_requests_running") < 1:
        time.sleep(0.01)
    made = crowd_server.metric("vllm:generation_tokens_total")
    client.vanish()
    deadline = time.monotonic() + 60
    while crowd_server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert crowd_server.metric("vllm:num_requests_running") == 0
    # 900 tokens take seconds; what is lost to a client that left is a few steps
    assert crowd_server.metric("vllm:generation_tokens_total") - made < 400
    assert crowd_server.metric("coterie_gateway_open_streams") == 0
    assert '"status":499' in crowd_server.log()


def test_several_prompts_in_one_request_are_all_aborted(crowd_server: Served) -> None:
    body = {"model": "tiny", "prompt": ["a", "b", "c", "d"], "stream": True, **LONG}
    client = Client(crowd_server, body, "/v1/completions")
    client.read_until(b"data: ")
    client.vanish()
    # the second is what the worker said last
    for name in ("coterie_gateway_open_streams", "vllm:num_requests_running"):
        deadline = time.monotonic() + 60
        while crowd_server.metric(name) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert crowd_server.metric(name) == 0


def test_a_body_that_never_ends(crowd_server: Served) -> None:
    where = urlsplit(crowd_server.url)
    with socket.create_connection((where.hostname, where.port)) as half:
        half.sendall(
            b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{"
        )
    assert crowd_server.post(CHAT, chat()).status == 200
    left = [line for line in crowd_server.log().splitlines() if '"route":"/v1/messages"' in line]
    assert '"status":499' in left[-1]


def test_cors_when_it_is_asked_for(crowd_server: Served) -> None:
    asked = {"origin": "https://example.com", "access_control_request_method": "POST"}
    allowed = crowd_server.send("OPTIONS", CHAT, None, **asked)
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == "https://example.com"
    other = crowd_server.get("/v1/models", origin="https://elsewhere.com")
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.full
def test_half_of_a_crowd_leaves(crowd_server: Served) -> None:
    """Half disconnect midway, the others are served to the end; then everything is given back."""
    clients = 200
    crowd_server.post(CHAT, chat())
    idle = {"fds": math.inf, "threads": math.inf, "streams": 0, "running": 0, "waiting": 0}
    assert given_back(crowd_server, idle | {"kv": math.inf}, 20)
    before = holdings(crowd_server)
    crowd = [
        Client(crowd_server, chat(f"crowd {i}", stream=True, max_tokens=40, ignore_eos=True))
        for i in range(clients)
    ]
    for index in range(0, clients, 2):
        # some after their first tokens, some while they still wait
        if index % 8 == 0:
            crowd[index].read_until(b'"content":"')
        crowd[index].vanish()
    for client in crowd[1::2]:
        client.read_until(b"data: [DONE]")
        assert client.received.count(b'"finish_reason":"length"') == 1
        client.vanish()
    assert given_back(crowd_server, before, 20), (before, holdings(crowd_server))
