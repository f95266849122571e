"""When the Python client asks again, and how it reads what comes in pieces."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import coterie_client as sdk
import httpx
import pytest
from coterie_client.aio import AsyncExperts
from coterie_client.attempts import Attempts
from coterie_client.calls import Call
from coterie_client.client import Experts
from coterie_client.errors import retry_after_s
from coterie_client.frames import Frames
from coterie_client.settings import Settings
from hypothesis import given
from hypothesis import strategies as st

# status, headers, body; None closes the connection without a word
Step = tuple[int, dict[str, str], bytes] | None


class Scripted(ThreadingHTTPServer):
    """Answers what it is told to, for what a healthy server never does."""

    daemon_threads = True

    def __init__(self, steps: list[Step]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.steps = steps
        # (method, path, headers, body) of what came
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        named = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.command, self.path, named, body))
        step = self.server.steps.pop(0)
        if step is None:
            self.close_connection = True
            return
        status, headers, answer = step
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_DELETE = do_PATCH = _answer

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def scripted(*steps: Step) -> Iterator[Scripted]:
    server = Scripted(list(steps))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(status: int, **headers: str) -> Step:
    error = {"message": "not now", "type": "requests", "param": None, "code": "x"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps({"error": error}).encode()


def answer(**fields: Any) -> Step:
    return 200, {"content-type": "application/json"}, json.dumps(fields).encode()


GOOD = answer(
    job_id="j", text="t", tokens_generated=1, experts_used=[], latency_ms=1, finish_reason="stop",
    model="m", task_type="", confidence=1, degraded=[], seed=0,
    validation=None, metrics=None, telemetry=None,
    field_of_tomorrow=1,
)  # fmt: skip
LIST = answer(object="list", data=[], aliases={})


def ask(*steps: Step, method: str = "infer", retries: int = 2) -> tuple[Any, int]:
    """What a client gets, an error or a result, and how often it asked."""
    with scripted(*steps) as server, sdk.ExpertClient("k", server.url, 5, retries) as client:
        try:
            result: Any = client.infer("x") if method == "infer" else client.experts.list()
        except sdk.CoterieError as error:
            result = error
        return result, len(server.seen)


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_asked_again_when_the_server_says(status: int) -> None:
    began = time.monotonic()
    result, times = ask(refusal(status, retry_after_ms="150", retry_after="25"), GOOD)
    assert (result.text, times) == ("t", 2)
    assert 0.15 <= time.monotonic() - began < 20


def test_patience_ends() -> None:
    error, times = ask(*[refusal(429, retry_after_ms="1")] * 3)
    assert (type(error), times) == (sdk.RateLimited, 3)
    assert error.retry_after_s == 0.001
    error, times = ask(refusal(429, retry_after="3600"))
    assert (type(error), times) == (sdk.RateLimited, 1)


def test_the_server_may_say_that_it_is_no_use() -> None:
    error, times = ask(refusal(503, x_should_retry="false"))
    assert (type(error), times) == (sdk.Unavailable, 1)


@pytest.mark.parametrize("step", [None, refusal(500), refusal(502), refusal(504)])
def test_what_may_have_run_is_not_sent_twice(step: Step) -> None:
    error, times = ask(step, GOOD)
    assert isinstance(error, sdk.CoterieError)
    assert times == 1


@pytest.mark.parametrize("step", [None, refusal(502), refusal(504)])
def test_a_question_may_be_asked_twice(step: Step) -> None:
    result, times = ask(step, LIST, method="list")
    assert (result.object, times) == ("list", 2)


def test_nobody_there_is_tried_again() -> None:
    settings = Settings("http://127.0.0.1:1", None, None, 1.0, 1)
    attempts = Attempts(Call("POST", "/v1/infer", dict), settings)
    assert 0.1 < attempts.failed(httpx.ConnectError("refused")) < 0.3
    with pytest.raises(sdk.ConnectionFailed, match="refused"):
        attempts.failed(httpx.ConnectError("refused"))


def job(status: str) -> Step:
    times = dict.fromkeys(("started_at", "finished_at", "user_id", "result", "error"))
    return answer(job_id="j", status=status, submitted_at="", text="", **times)


def test_waiting_outlasts_a_server_that_starts_again() -> None:
    steps = [job("queued"), None, refusal(503), None, job("processing"), job("succeeded")]
    with scripted(*steps) as server, sdk.ExpertClient("k", server.url, max_retries=0) as client:
        assert client.wait("j", timeout=20).status == "succeeded"
        assert len(server.seen) == len(steps)
    with (
        scripted(refusal(404)) as server,
        sdk.ExpertClient("k", server.url) as client,
        pytest.raises(sdk.NotFound),
    ):
        client.wait("j")


def test_both_clients_can_do_the_same() -> None:
    for plain, other in ((sdk.ExpertClient, sdk.AsyncExpertClient), (Experts, AsyncExperts)):
        names = [{name for name in vars(kind) if name[0] != "_"} for kind in (plain, other)]
        assert names[0] - {"close"} == names[1] - {"aclose"}


def test_keys_are_sent_to_whom_they_are_for() -> None:
    with (
        scripted(LIST, GOOD) as server,
        sdk.ExpertClient("caller", server.url + "/v1/", admin_key="admin") as client,
    ):
        client.experts.list()
        client.infer("x")
        sent = [(path, headers["authorization"]) for _, path, headers, _ in server.seen]
    assert sent == [("/v1/experts", "Bearer admin"), ("/v1/infer", "Bearer caller")]


def test_other_servers_are_told_apart() -> None:
    for body in (b"<html>", b"[]", b"{}"):
        error, _ = ask((200, {}, body))
        assert isinstance(error, sdk.UnexpectedAnswer)


def test_retry_after_in_all_its_forms() -> None:
    assert retry_after_s({"retry-after-ms": "250", "retry-after": "9"}) == 0.25
    assert retry_after_s({"retry-after-ms": "soon", "retry-after": "9"}) == 9
    assert retry_after_s({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0
    assert retry_after_s({"retry-after": "later"}) is None
    assert retry_after_s({}) is None


TEXT = "a\u2028b\x85c\nd\re é 🙂"
STREAM = (
    ": keepalive\r\n\r\nevent: delta\r\ndata: "
    + json.dumps({"text": TEXT}, ensure_ascii=False)
    + '\n\nevent: later\ndata: {}\n\nevent:delta\rdata:{\rdata: "text": "z"}\r\r'
    "event: error\ndata: "
    + json.dumps({"error": {"message": "full", "code": "rate_limit_exceeded"}})
    + "\n\n"
).encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_may_be_cut_anywhere(cuts: list[int]) -> None:
    frames, texts = Frames("req_1"), []
    edges = [0, *sorted(cuts), len(STREAM)]
    with pytest.raises(sdk.RateLimited, match="full") as told:
        for start, end in pairwise(edges):
            for chunk in frames.feed(STREAM[start:end]):
                texts.append(chunk.text)
    assert texts == [TEXT, "z"]
    assert told.value.request_id == "req_1"


def test_a_proxy_may_pack_a_stream() -> None:
    body = gzip.compress(b'event: delta\ndata: {"text": "whole"}\n\n')
    with (
        scripted((200, {"content-encoding": "gzip"}, body)) as server,
        sdk.ExpertClient("k", server.url) as client,
        client.infer_stream("x") as stream,
    ):
        assert next(stream).text == "whole"


def test_a_stream_without_an_end_is_no_answer() -> None:
    body = b'event: delta\ndata: {"text": "half"}\n\n'
    with scripted((200, {}, body)) as server, sdk.ExpertClient("k", server.url) as client:
        stream = client.infer_stream("x")
        assert next(stream).text == "half"
        with pytest.raises(sdk.ConnectionFailed, match="broke off"):
            next(stream)
