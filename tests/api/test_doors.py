"""Keys, full queues, shutdown and what the logs may hold."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from coterie.api import door
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import KEYS, Reply, Served, chat, frames

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SECRET = "the-prompt-nobody-may-log"
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
# seconds of work for the tiny model, also on a fast and idle machine
SECONDS = LONG | {"max_tokens": 2000}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_keys(strict_server: Served) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
        assert strict_server.get(path).status == 401, path
        assert strict_server.get(path, authorization="Bearer wrong").status == 401, path
    assert strict_server.get("/v1/models", **bearer(KEYS[0])).status == 200
    assert strict_server.get("/v1/models", x_api_key=KEYS[1]).status == 200
    assert strict_server.get("/v1/models", authorization=f"Basic {KEYS[0]}").status == 401
    for path in ("/health", "/health/live", "/health/ready", "/ping"):
        assert strict_server.get(path).status == 200, path
    refused = strict_server.post(CHAT, chat())
    assert refused.json["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    other = strict_server.post(MESSAGES, chat(), x_api_key="wrong")
    assert other.json["error"]["type"] == "authentication_error"
    for path in ("/v1/models", "/v1/models/tiny"):
        listed = strict_server.get(path, x_api_key="wrong", anthropic_version="2023-06-01")
        assert listed.json["error"]["type"] == "authentication_error"


def test_tenants_share_no_prefix(strict_server: Served) -> None:
    body = chat("A model answers a question; another model checks the answer. " * 3, max_tokens=2)

    def cached(key: str, **fields: str) -> int:
        usage = strict_server.post(CHAT, body | fields, **bearer(key)).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[1], cache_salt="apart") == 0
    assert cached(KEYS[1], cache_salt="apart") > 0


class Busy:
    """Holds the strict server's only place and its queue of one."""

    def __init__(self, served: Served, requests: int = 2) -> None:
        self.replies: list[int] = []
        self.threads = [
            threading.Thread(target=self._ask, args=(served, i)) for i in range(requests)
        ]
        for thread in self.threads:
            thread.start()
            time.sleep(0.15)

    def _ask(self, served: Served, index: int) -> None:
        body = chat(f"busy {index}", **SECONDS)
        self.replies.append(served.post(CHAT, body, **bearer(KEYS[0])).status)

    def wait(self) -> None:
        for thread in self.threads:
            thread.join(60)


def test_a_full_queue_is_told_when_to_return(strict_server: Served) -> None:
    busy = Busy(strict_server)
    refused = strict_server.post(CHAT, chat(), **bearer(KEYS[0]))
    other = strict_server.post(MESSAGES, chat(), **bearer(KEYS[0]))
    streamed = strict_server.post(CHAT, chat(stream=True), **bearer(KEYS[0]))
    busy.wait()
    assert busy.replies == [200, 200]
    for reply in (refused, streamed):
        assert reply.status == 429
        assert reply.json["error"]["code"] == "rate_limit_exceeded"
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        assert reply.headers["x-ratelimit-limit-requests"] == "1"
    assert (other.status, other.json["error"]["type"]) == (429, "rate_limit_error")
    assert other.headers["anthropic-ratelimit-requests-limit"] == "1"
    for reply in (refused, other, streamed):
        assert 1 <= int(reply.headers["retry-after"]) <= 30
        assert 0 < int(reply.headers["retry-after-ms"]) <= 30_000
        assert reply.headers["x-should-retry"] == "true"


def until_refused(served: Served, refusal: type[Exception], ask: Callable[[], object]) -> Busy:
    """Busy while a client was refused. On a busy machine its work may end before the client has
    asked: then once more."""
    for _ in range(5):
        busy = Busy(served)
        try:
            ask()
        except refusal:
            return busy
        busy.wait()
    raise AssertionError("never refused")


@pytest.mark.full
def test_clients_return_and_are_served(strict_server: Served) -> None:
    messages = [{"role": "user", "content": "again"}]
    with openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key=KEYS[0], max_retries=0) as hasty:
        hasty.models.list()
        busy = until_refused(
            strict_server,
            openai.RateLimitError,
            lambda: hasty.chat.completions.create(model="tiny", messages=messages, max_tokens=2),
        )
        patient = hasty.with_options(max_retries=6)
        answer = patient.chat.completions.create(
            model="tiny", messages=messages, max_tokens=2, temperature=0
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 2
    busy.wait()
    with anthropic.Anthropic(
        base_url=strict_server.url, api_key=KEYS[0], max_retries=0
    ) as hasty_too:
        # the first use of a client imports and connects: done before the queue is filled
        hasty_too.messages.count_tokens(model="tiny", messages=messages)
        busy = until_refused(
            strict_server,
            anthropic.RateLimitError,
            lambda: hasty_too.messages.create(model="tiny", messages=messages, max_tokens=2),
        )
        patient_too = hasty_too.with_options(max_retries=6)
        message = patient_too.messages.create(
            model="tiny", messages=messages, max_tokens=2, extra_body={"temperature": 0}
        )
        assert message.usage.output_tokens == 2
    busy.wait()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_deadline_spent_in_the_queue(strict_server: Served, stream: bool) -> None:
    # too short for an idle engine too: a cut of the answer, which nobody has promised
    body = chat(stream=stream, **SECONDS)
    busy = Busy(strict_server, requests=1)
    reply = strict_server.post(CHAT, body, x_deadline_ms="50", **bearer(KEYS[1]))
    other = strict_server.post(MESSAGES, body, x_deadline_ms="50", **bearer(KEYS[1]))
    busy.wait()
    assert reply.status == 504, reply.body
    assert reply.json["error"]["code"] == "deadline_exceeded"
    assert reply.headers["x-should-retry"] == "false"
    assert (other.status, other.json["error"]["type"]) == (504, "timeout_error")


def test_the_log_holds_no_prompts_and_no_keys(strict_server: Served) -> None:
    replies = [
        strict_server.post(f"{CHAT}?q={SECRET}", chat(SECRET), **bearer(KEYS[0])),
        strict_server.post(CHAT, chat(SECRET, temperature=SECRET), **bearer(KEYS[0])),
        strict_server.post("/v1/nothing", chat(SECRET), **bearer(KEYS[0])),
        strict_server.post(CHAT, chat(model=f"a {SECRET}"), **bearer(KEYS[0])),
        strict_server.post(CHAT, b'{"broken": "' + SECRET.encode(), x_api_key=KEYS[1]),
        strict_server.get("/v1/models", x_api_key=SECRET),
    ]
    ids = [reply.headers["x-request-id"] for reply in replies]
    give_up_at = time.monotonic() + 60
    # a request's line is written behind its answer
    while not all(f'"request_id":"{name}"' in strict_server.log() for name in ids):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    written = strict_server.log() + strict_server.out()
    assert SECRET not in written
    assert not any(key in written for key in KEYS)
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    requests = {line["request_id"]: line for line in lines if line["event"] == "request"}
    asked, refused, unknown, misnamed, broken, denied = (requests[name] for name in ids)
    assert (asked["route"], asked["status"], asked["completion_tokens"]) == (CHAT, 200, 8)
    assert (refused["status"], unknown["status"], broken["status"]) == (400, 404, 400)
    assert (denied["status"], misnamed["status"]) == (401, 404)
    assert unknown["path"] == "/v1/nothing" and "no route POST /v1/nothing" in unknown["reason"]
    assert refused["reason"].startswith("invalid_request: temperature: must")
    assert broken["path"] == CHAT and "not valid JSON" in broken["reason"]
    assert "path" not in asked and "reason" not in asked
    assert asked["tenant_digest"] == refused["tenant_digest"] != broken["tenant_digest"]
    assert asked["duration_ms"] > 0 and asked["request_id"].startswith("req_")


def running(served: Served, body: dict[str, Any]) -> tuple[threading.Thread, list[Reply]]:
    """A request that the server's metrics count as running. One that ends before they are asked, on
    a fast machine, is sent again."""
    for _ in range(20):
        replies: list[Reply] = []
        ask = partial(served.post, CHAT, body)
        thread = threading.Thread(target=lambda ask=ask, to=replies: to.append(ask()))
        thread.start()
        while thread.is_alive():
            if served.metric("vllm:num_requests_running") >= 1:
                return thread, replies
            time.sleep(0.02)
    raise AssertionError("no request was seen while it ran")


def test_not_ready_yet_then_drained() -> None:
    """Before the model is loaded: 503 and 529 with a hint. At SIGTERM: the stream ends whole."""
    served = Served(str(tiny_checkpoint("llama")), "--name", "tiny", wait_ready=False)
    try:
        early = served.post(CHAT, chat())
        other = served.post(MESSAGES, chat())
        assert served.get("/health/live").status == 200
        if served.get("/health/ready").status == 503:
            assert early.status == 503
            assert early.json["error"]["code"] == "specialist_unavailable"
            assert (other.status, other.json["error"]["type"]) == (529, "overloaded_error")
            assert int(early.headers["retry-after"]) >= 1
            assert early.headers["x-should-retry"] == "true"
        served.wait_ready()
        thread, replies = running(served, chat(stream=True, **LONG))
        assert served.stop() == 0
        thread.join(30)
        assert replies[0].body.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in replies[0].body
    finally:
        served.stop()


@pytest.mark.full
def test_a_stream_that_outlasts_the_drain_ends_with_an_error(tmp_path: Path) -> None:
    config = tmp_path / "coterie.toml"
    config.write_text(
        f"""
        [server]
        drain_s = 0.2
        [[specialists]]
        name = "tiny"
        model = "{tiny_checkpoint("llama")}"
        """
    )
    served = Served("--config", str(config))
    try:
        body = chat(stream=True, n=16, max_tokens=900, ignore_eos=True, temperature=1)
        thread, replies = running(served, body)
        assert served.stop() == 0
        thread.join(30)
        *_, (_, last) = frames(replies[0].body)
        assert last["error"]["code"] == "specialist_unavailable"
        assert "Traceback" not in served.log()
    finally:
        served.stop()


def test_callers_without_a_key_do_not_fill_the_log(strict_server: Served) -> None:
    for _ in range(40):
        assert strict_server.get("/one-of-forty").status == 401
    strict_server.get("/v1/models", **bearer(KEYS[0]))
    lines = [line for line in strict_server.log().splitlines() if '"/one-of-forty"' in line]
    assert len(lines) <= door.MAX_UNKNOWN_LINES


def test_the_log_has_the_number_of_callers_without_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(door, "UNKNOWN_LINES_S", 0.05)
    monkeypatch.setattr(door, "log", lambda event, **fields: told.append((event, fields)))
    monkeypatch.setattr(door, "_unknown_callers", door._UnknownCallerLines())

    async def drill() -> list[bool]:
        exchange = door.Exchange("req_1", "openai", time.monotonic(), status=401)
        known = replace(exchange, tenant="t", status=403)
        logged = [door.is_logged(exchange) for _ in range(50)]
        assert door.is_logged(known) and door.is_logged(replace(exchange, status=404))
        while not told:
            await asyncio.sleep(0.01)
        return logged

    logged = asyncio.run(drill())
    assert logged.count(True) == door.MAX_UNKNOWN_LINES
    assert told == [("unknown_callers_refused", {"level": "warning", "attempt": 30})]
