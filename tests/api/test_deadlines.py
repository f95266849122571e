"""Deadlines on a real server: what is started, what is cut, and what a restart remembers. The tests
run in the order of this file."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Reply, Served, own_home

# its prompt alone is expected to take longer than the deadlines below
LONG = "word " * 1500


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_home(tmp_path_factory.mktemp("deadlines") / "home")


def serve(home: Path) -> Served:
    model = tiny_checkpoint("llama", max_position_embeddings=8192)
    return Served(str(model), "--name", "tiny", COTERIE_HOME=str(home))


class Restarted:
    """The server, and the same one started again."""

    def __init__(self, home: Path) -> None:
        self.home, self.served = home, serve(home)

    def restart(self) -> Served:
        assert self.served.stop() == 0
        self.served = serve(self.home)
        return self.served


@pytest.fixture(scope="module")
def running(home: Path) -> Iterator[Restarted]:
    made = Restarted(home)
    yield made
    made.served.stop()


@pytest.fixture
def served(running: Restarted) -> Served:
    return running.served


def infer(served: Served, prompt: str, **fields: Any) -> Reply:
    body = {"prompt": prompt, "model": "tiny", "max_tokens": 200} | fields
    return served.post("/v1/infer", body)


def chat(served: Served, prompt: str, timeout_ms: int) -> Reply:
    body = {"model": "tiny", "messages": [{"role": "user", "content": prompt}]}
    return served.post("/v1/chat/completions", body, x_deadline_ms=str(timeout_ms))


@pytest.mark.parametrize("timeout_ms", [1, 5, 20, 80])
def test_on_an_idle_engine_every_deadline_is_started(served: Served, timeout_ms: int) -> None:
    text = f"{timeout_ms} {LONG}"
    answer = infer(served, text, timeout_ms=timeout_ms)
    assert answer.status == 200, answer.body
    assert answer.json["finish_reason"] == answer.json["metrics"]["finish_reason"] == "timeout"
    assert answer.json["tokens_generated"] < 200
    # also if it passed on the way to the engine
    reply = chat(served, f"chat {text}", timeout_ms)
    assert reply.status == 200, reply.body
    [choice] = reply.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    assert reply.json["usage"]["prompt_tokens"] > 1500
    body = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": text}]}
    for stream in (False, True):
        other = served.post(
            "/v1/messages", body | {"stream": stream}, x_deadline_ms=str(timeout_ms)
        )
        assert other.status == 200 and b'"stop_reason":"max_tokens"' in other.body, other.body
    response = served.post(
        "/v1/responses", {"model": "tiny", "input": text}, x_deadline_ms=str(timeout_ms)
    )
    assert response.status == 200 and response.json["status"] == "incomplete", response.body
    answered = served.post(
        "/api/chat",
        {"model": "tiny", "messages": body["messages"], "stream": False},
        x_deadline_ms=str(timeout_ms),
    )
    assert answered.status == 200 and answered.json["done_reason"] == "length", answered.body
    with connect(served.url.replace("http", "ws", 1) + "/v1/infer/ws", open_timeout=30) as socket:
        socket.send(json.dumps({"prompt": text, "max_tokens": 200, "timeout_ms": timeout_ms}))
        while (event := json.loads(socket.recv(timeout=30)))["event"] not in ("finished", "error"):
            pass
    assert event["event"] == "finished" and event["finish_reason"] == "timeout", event


def outcome(served: Served, name: str) -> float:
    text = served.get("/metrics").body.decode()
    found = re.findall(rf'^coterie_deadlines_total{{.*outcome="{name}".*}} (\S+)$', text, re.M)
    return sum(float(value) for value in found)


def reasons(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    found: list[str] = reply.json["telemetry"]["receipt"]["plan"]["reasons"]
    return [reason for reason in found if reason.startswith("deadline not promised: ")]


def test_what_no_promise_covers_is_counted_and_told(served: Served) -> None:
    before = outcome(served, "cut")
    assert before >= 4, "the deadlines of the test above"
    [reason] = reasons(infer(served, LONG, timeout_ms=30))
    assert re.search(r"\d of 12 requests measured so far$", reason)
    assert outcome(served, "cut") == before + 1
    # nobody is promised anything yet, and who ended in time was not cut
    assert len(reasons(infer(served, "short", max_tokens=2, timeout_ms=60_000))) == 1
    assert outcome(served, "cut") == before + 1
    assert outcome(served, "met") == outcome(served, "missed") == 0


def test_a_restart_keeps_what_was_measured(running: Restarted) -> None:
    served = running.served
    for count in range(14):
        assert infer(served, f"measured {count}", max_tokens=20).status == 200
    assert reasons(infer(served, "a", max_tokens=2, timeout_ms=60_000)) == []
    served = running.restart()
    # the first request is promised its time, or told that it will be cut
    assert reasons(infer(served, "b", max_tokens=2, timeout_ms=60_000)) == []
    assert outcome(served, "met") == 1
    [reason] = reasons(infer(served, LONG, timeout_ms=1))
    assert reason.endswith(" s expected on an idle engine, 0.0 s left")
    # on another kind of machine that was not measured
    state = running.home / "state" / "ensemble.db"
    assert running.served.stop() == 0
    with closing(sqlite3.connect(state)) as db, db:
        [(text,)] = db.execute("SELECT value FROM state WHERE key = 'speed tiny'").fetchall()
        other = json.dumps(json.loads(text) | {"of": "another machine"})
        db.execute("UPDATE state SET value = ? WHERE key = 'speed tiny'", (other,))
    running.served = serve(running.home)
    [reason] = reasons(infer(running.served, "c", max_tokens=2, timeout_ms=60_000))
    assert reason.endswith(" 0 of 12 requests measured so far")
