"""workers/remote over real sockets: peers that answer well, badly, late, half or not at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from coterie.core.ensemble import RemoteSettings
from coterie.core.errors import ConfigError, InvalidRequest, UnsupportedFeature
from coterie.core.events import CALL_TOKEN, Delta, Event, Failed, Finished, Started
from coterie.core.plan import Admitted, Rejected, RemoteAssignment
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Limits,
    Message,
    Prompt,
    ResponseFormat,
    RouteHints,
    Sampling,
    Text,
    TextRules,
    TokenRules,
    Tokens,
    ToolCall,
    ToolRules,
)
from coterie.workers.remote import server as server_module
from coterie.workers.remote.body import check_request, path_and_body
from coterie.workers.remote.failure import retry_after
from coterie.workers.remote.health import FIRST_BACKOFF_S, MAX_BACKOFF_S, RemoteHealth
from coterie.workers.remote.places import MAX_PASSED, PlaceQueue
from coterie.workers.remote.replica import RemoteReplica, RemoteSpec
from coterie.workers.remote.server import key_of
from tests.helpers.serving.http_peer import (
    DONE,
    HEAD,
    Peer,
    PeerRequest,
    Script,
    chunk,
    saying,
    serving,
    status,
)

COUNT = iter(range(10**6))
CHAT = Chat((Message("user", "hello"),))
WEATHER = {"name": "weather", "description": "", "parameters": {"type": "object"}}
TOOLS = replace(CHAT, tools=(WEATHER,), tool_rules=ToolRules(("weather",)))
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9}}\n\n'
KEY = "sk-very-secret-key"


def assignment(prompt: Prompt = CHAT, **options: Any) -> RemoteAssignment:
    values: dict[str, Any] = {
        "request_id": f"remote-{next(COUNT)}",
        "lane": "far",
        "prompt_ids": (),
        "sampling": Sampling(n=1),
        "limits": Limits(max_tokens=20),
        "adapters": (),
        "session": "",
        "tenant": "t",
        "deadline": None,
        "arrived_at": time.monotonic(),
        "prompt": prompt,
        "estimated_tokens": 3,
    }
    return RemoteAssignment(**(values | options))


def run(test: Awaitable[None]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test, 60)

    asyncio.run(whole())


@asynccontextmanager
async def replica_of(url: str, max_queue: int = 4, **settings: Any) -> AsyncIterator[RemoteReplica]:
    given = RemoteSettings(url=url, model="model-there", **({"timeout_s": 5.0} | settings))
    replica = RemoteReplica(RemoteSpec("remote-far", "far", given, max_queue))
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close()


class Answer:
    """The events of one request."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = asyncio.Event()

    def put(self, event: Event) -> None:
        assert not self.ended.is_set(), "an event after the last one"
        self.events.append(event)
        if isinstance(event, (Finished, Failed)):
            self.ended.set()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def failed(self) -> Failed:
        assert isinstance(self.events[-1], Failed), self.events
        return self.events[-1]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished), self.events
        return self.events[-1]


async def ask(replica: RemoteReplica, asked: RemoteAssignment | None = None) -> Answer:
    answer = Answer()
    verdict = await replica.submit(asked or assignment(), answer.put)
    assert isinstance(verdict, Admitted), verdict
    await answer.ended.wait()
    return answer


def answers(script: Script, asked: RemoteAssignment | None = None, **settings: Any) -> Answer:
    """The answer of a peer that runs `script`."""
    found: list[Answer] = []

    async def test() -> None:
        async with serving(script) as peer, replica_of(peer.url, **settings) as replica:
            found.append(await ask(replica, asked))
            assert replica.in_flight() == 0

    run(test())
    return found[0]


# good answers


def test_a_stream_becomes_events() -> None:
    comment = b": keep alive\r\n\r\n"
    # a chunk that arrives in pieces
    half = chunk(" you")
    script = saying(HEAD, comment, chunk("hel"), half[:9], half[9:], chunk(end="stop"), USAGE, DONE)
    answer = answers(script)
    assert isinstance(answer.events[0], Started)
    assert answer.text == "hel you"
    assert answer.finished.choices == ("stop",)
    usage = answer.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 9)
    timings = answer.finished.timings
    assert 0 < timings.first_token_s <= timings.total_s


def test_a_whole_body_is_an_answer_too() -> None:
    """A server that does not stream."""
    message = {"content": "hello", "reasoning_content": "hm"}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
    answer = answers(saying(status(200, body)))
    assert answer.text == "<think>hm</think>hello"
    assert answer.finished.choices == ("length",)
    # nobody told the counts: each chunk was a token
    assert answer.finished.usage.prompt_tokens == 3


def test_calls_of_tools_and_thoughts_become_text_with_marks() -> None:
    def call(index: int, name: str | None, arguments: str) -> bytes:
        function = {"arguments": arguments} | ({"name": name} if name else {})
        return chunk(delta={"tool_calls": [{"index": index, "function": function}]})

    pieces = [
        chunk(delta={"reasoning_content": "why"}),
        chunk("I look"),
        call(0, "weather", ""),
        call(0, None, '{"city": '),
        call(0, None, '"Rome"}'),
        call(1, "weather", ""),
        chunk(end="tool_calls"),
    ]
    answer = answers(saying(HEAD, *pieces, DONE), assignment(TOOLS))
    assert answer.text == (
        '<think>why</think>I look{"name": "weather", "arguments": {"city": "Rome"}}\n'
        '{"name": "weather", "arguments": {}}\n'
    )
    marks = [e for e in answer.events if isinstance(e, Delta) and CALL_TOKEN in e.token_ids]
    assert len(marks) == 1 and answer.finished.choices == ("stop",)


def test_logprobs_and_several_choices() -> None:
    score = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    scored = {"content": [score | {"top_logprobs": [score]}]}
    pieces = [
        chunk("a", index=1, logprobs=scored),
        chunk("a", logprobs=scored),
        chunk(end="stop", stop_reason="END"),
        chunk(end="length", index=1),
    ]
    asked = assignment(sampling=Sampling(n=2, logprobs=1))
    answer = answers(saying(HEAD, *pieces, DONE), asked)
    assert answer.finished.choices == ("stop", "length")
    deltas = [event for event in answer.events if isinstance(event, Delta)]
    assert deltas[0].choice == 1 and deltas[0].logprobs is not None
    assert deltas[0].logprobs[0].data == b"a" and len(deltas[0].logprobs[0].top) == 1
    assert deltas[2].stop_match == "END"
    # asked for, and not sent
    answer = answers(saying(HEAD, chunk("a"), chunk(end="stop"), DONE), asked)
    assert answer.failed.code == "unsupported" and "logprobs" in answer.failed.message
    assert answer.text == ""


# faults of the server


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        # half answers: never a Finished, and typed by whether a token came before
        ([HEAD, chunk("half")], "worker_crashed"),
        ([HEAD, chunk("half"), DONE], "worker_crashed"),
        ([HEAD, chunk("half"), b'data: {"choi'], "worker_crashed"),
        ([HEAD], "unavailable"),
        ([b"HTTP/1.1 200 OK\r\ncontent-le"], "unavailable"),
        ([b"\x00\x16garbage that is no HTTP\r\n\r\n"], "unavailable"),
        ([HEAD, b"data: {not json}\n\n"], "unavailable"),
        ([HEAD, b'data: {"choices": [{"index": "x"}]}\n\n'], "unavailable"),
        ([HEAD, b"data: " + b"[" * 100_000 + b"\n\n"], "unavailable"),
        ([HEAD, b"data: \xff\xfe\n\n"], "unavailable"),
        ([HEAD, chunk("x", index=1)], "unavailable"),
        ([HEAD, chunk("x", index=-1)], "unavailable"),
        ([HEAD, chunk("x"), chunk("x", index=-1)], "worker_crashed"),
        ([HEAD, chunk(end="stop"), chunk("more"), DONE], None),
        ([HEAD, b"data: " + b"x" * (server_module.MAX_LINE_BYTES + 1)], "unavailable"),
        ([HEAD, chunk("y" * 900_000), chunk("y" * 900_000)], "worker_crashed"),
        ([HEAD.replace(b"text/event-stream", b"text/html"), b"<html>"], "unavailable"),
        ([HEAD.replace(b"connection", b"content-encoding: gzip\r\nconnection")], "unavailable"),
        ([status(200, {"choices": []})], "unavailable"),
        ([status(200, {"error": {"message": "no", "code": 500}})], "unavailable"),
        ([HEAD, b'data: {"error":{"message":"late","code":429}}\n\n'], "overloaded"),
        ([HEAD, chunk("a"), b'data: {"error":"broken"}\n\n'], "worker_crashed"),
        ([HEAD, b'data: {"error":{"message":"no","type":"invalid_request_error"}}\n\n'],
         "invalid_request"),
        ([status(302, None, location="http://127.0.0.1:1/v1/chat/completions")], "unavailable"),
        ([status(400, {"error": {"message": "temperature"}})], "invalid_request"),
        ([status(400, {"error": {"message": "x", "code": "context_length_exceeded"}})],
         "context_length_exceeded"),
        ([status(400, {"error": {"message": "This model's maximum context length is 5"}})],
         "context_length_exceeded"),
        ([status(401, {"error": {"message": "bad key"}})], "unavailable"),
        ([status(404, {"error": {"message": "no model"}})], "unavailable"),
        ([status(413, {"detail": "large"})], "request_too_large"),
        ([status(422, {"detail": [{"msg": "field required"}]})], "invalid_request"),
        ([status(500, "boom")], "unavailable"),
        ([b"HTTP/1.1 503 X\r\ncontent-length: 99\r\n\r\nhalf"], "unavailable"),
    ],
)  # fmt: skip
def test_a_fault_of_the_server_ends_typed(pieces: list[bytes], code: str | None) -> None:
    answer = answers(saying(*pieces), max_running=2)
    if code is None:
        # it had ended: what comes behind changes nothing
        assert answer.finished.choices == ("stop",) and answer.text == ""
        return
    assert answer.failed.code == code, answer.failed
    assert len(answer.failed.message) < 600


def test_a_busy_server_says_when() -> None:
    answer = answers(saying(status(429, {"error": {"message": "slow down"}}, retry_after="17")))
    assert (answer.failed.code, answer.failed.retry_after_s) == ("overloaded", 17.0)
    assert "slow down" in answer.failed.message
    assert retry_after({"retry-after": "nan"}) is None
    assert retry_after({"retry-after": "-3"}) is None
    assert retry_after({"retry-after": "x" * 999}) is None
    assert retry_after({"retry-after": "1e9"}) == 3600.0
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) is None


@pytest.mark.parametrize(
    "calls",
    [
        [{"index": 1, "function": {"name": "weather", "arguments": "{}"}}],
        [{"index": 0, "function": {"name": "rm", "arguments": "{}"}}],
        [{"index": 0, "function": {"arguments": "{}"}}],
        [{"index": 0, "function": {"name": "weather", "arguments": "[1]"}}],
        [{"index": 0, "function": {"name": "weather", "arguments": '{"a": '}}],
    ],
)
def test_a_bad_call_of_a_tool_ends_typed(calls: list[dict[str, Any]]) -> None:
    pieces = [chunk(delta={"tool_calls": calls}), chunk(end="tool_calls"), DONE]
    answer = answers(saying(HEAD, *pieces), assignment(TOOLS))
    assert answer.failed.code == "worker_crashed"
    # one that the limit cut off is what the caller asked for
    if calls[0]["function"]["arguments"] == '{"a": ':
        cut = [chunk(delta={"tool_calls": calls}), chunk(end="length"), DONE]
        assert answers(saying(HEAD, *cut), assignment(TOOLS)).finished.choices == ("length",)


def test_silence_and_drips_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALLED", 2)

    async def silent(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def half(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk("half"))
        await asyncio.sleep(60)

    async def drips(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while True:
            writer.write(b": ")
            await asyncio.sleep(0.05)

    for script, code in ((silent, "unavailable"), (half, "worker_crashed"), (drips, "unavailable")):
        started = time.monotonic()
        answer = answers(script, timeout_s=0.2)
        assert answer.failed.code == code
        assert time.monotonic() - started < 5


def test_a_deadline_ends_an_answer_with_what_is_there() -> None:
    async def slow(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk("so far"))
        await asyncio.sleep(60)

    asked = assignment(deadline=time.monotonic() + 0.3)
    answer = answers(slow, asked)
    assert answer.text == "so far" and answer.finished.choices == ("timeout",)


def test_an_empty_stream_is_asked_once_more_without_streaming() -> None:
    """As llama-cpp-python's server: it says what is wrong only in a whole body."""

    async def script(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        fault = {"message": "too long", "code": "context_length_exceeded"}
        writer.write(HEAD if request.body.get("stream") else status(400, {"error": fault}))
        await writer.drain()
        writer.close()

    assert answers(script).failed.code == "context_length_exceeded"
    # and only once
    assert answers(saying(HEAD)).failed.code == "unavailable"


# connections, queue, abort


def test_the_key_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAR_KEY", KEY)

    async def test() -> None:
        script = saying(status(400, {"error": {"message": f"wrong: {KEY}\n\x1b[31m" + "x" * 999}}))
        async with serving(script) as peer, replica_of(peer.url, key_env="FAR_KEY") as replica:
            answer = await ask(replica)
            assert all(r.headers["authorization"] == f"Bearer {KEY}" for r in peer.requests)
            message = answer.failed.message
            assert KEY not in message and "wrong: ***" in message
            assert "\x1b" not in message and len(message) < 400
            peer.script = saying(status(401, {"error": {"message": KEY}}))
            assert "refuses this server's key" in (await ask(replica)).failed.message

    run(test())
    shown = capfd.readouterr()
    assert KEY not in shown.out + shown.err


def test_a_key_that_cannot_be_used_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "key"
    for text in ("", "two\nlines", "schlüssel"):
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            key_of(RemoteSettings(url="http://x", key_file=str(file)))
        assert "schl" not in refused.value.message
    file.write_text(f" {KEY}\n")
    assert key_of(RemoteSettings(url="http://x", key_file=str(file))) == KEY


def test_places_are_bounded_and_given_by_priority() -> None:
    gate = asyncio.Event()
    order: list[str] = []

    async def held(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        order.append(request.body["messages"][0]["content"])
        await gate.wait()
        writer.write(HEAD + chunk("x") + chunk(end="stop") + DONE)
        await writer.drain()
        writer.close()

    def named(name: str, priority: int = 5) -> RemoteAssignment:
        limits = Limits(max_tokens=4, priority=priority)
        return assignment(Chat((Message("user", name),)), limits=limits)

    async def test() -> None:
        async with (
            serving(held) as peer,
            replica_of(peer.url, max_queue=2, max_running=1) as replica,
        ):
            waiting = [asyncio.ensure_future(ask(replica, named("first")))]
            while not order:
                await asyncio.sleep(0.01)
            waiting += [asyncio.ensure_future(ask(replica, named("low", 1)))]
            await asyncio.sleep(0.01)
            waiting += [asyncio.ensure_future(ask(replica, named("high", 9)))]
            await asyncio.sleep(0.01)
            verdict = await replica.submit(named("refused"), Answer().put)
            assert isinstance(verdict, Rejected) and verdict.code == "overloaded"
            state = replica.lane_states()["far"]
            assert (state.queued, state.free_tokens) == (2, 0)
            # a waiting one that is aborted leaves no trace
            gone = named("gone", 9)
            gone = replace(gone, tenant="other")
            assert isinstance(await replica.submit(gone, Answer().put), Admitted)
            await asyncio.sleep(0.01)
            await replica.abort(gone.request_id)
            gate.set()
            for answer in await asyncio.gather(*waiting):
                assert answer.text == "x"
            assert order == ["first", "high", "low"]
            assert replica.lane_states()["far"].queued == 0

    run(test())


def test_a_flow_of_urgent_requests_keeps_nobody_out() -> None:
    async def test() -> None:
        queue = PlaceQueue(1)
        await queue.take(5)
        normal = asyncio.ensure_future(queue.take(5))
        urgent = [asyncio.ensure_future(queue.take(9)) for _ in range(3)]
        await asyncio.sleep(0)
        for _ in range(MAX_PASSED + 1):
            assert not normal.done()
            queue.give_back()
            urgent.append(asyncio.ensure_future(queue.take(9)))
            await asyncio.sleep(0)
        assert normal.done() and sum(one.done() for one in urgent) == MAX_PASSED
        for one in urgent:
            one.cancel()
        await asyncio.sleep(0)
        assert queue.num_waiting == 0

    run(test())


def test_an_abort_closes_the_connection_and_ends_the_events() -> None:
    async def endless(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while True:
            writer.write(chunk("x"))
            await asyncio.sleep(0.01)

    async def test() -> None:
        async with serving(endless) as peer, replica_of(peer.url) as replica:
            asked, answer = assignment(), Answer()
            await replica.submit(asked, answer.put)
            while not answer.text:
                await asyncio.sleep(0.01)
            await replica.abort(asked.request_id)
            seen = len(answer.events)
            while not peer.num_left:
                await asyncio.sleep(0.01)
            assert len(answer.events) == seen and replica.in_flight() == 0
            # and one that runs when the server is closed fails
            other = Answer()
            await replica.submit(assignment(), other.put)
            await asyncio.sleep(0.05)
            await replica.close()
            assert other.failed.code == "unavailable"

    run(test())


def test_a_connection_is_used_again_and_a_stale_one_replaced() -> None:
    head = HEAD.replace(b"connection: close", b"transfer-encoding: chunked")

    def framed(data: bytes) -> bytes:
        return f"{len(data):x}\r\n".encode() + data + b"\r\n"

    async def keeps(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for data in (chunk("x"), chunk(end="stop"), DONE, b""):
            writer.write(framed(data))
        await writer.drain()

    async def closes(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        await keeps(request, writer)
        writer.close()

    async def test() -> None:
        async with serving(keeps) as peer, replica_of(peer.url) as replica:
            for _ in range(5):
                assert (await ask(replica)).text == "x"
            # that of the probe too
            assert peer.num_connections == 1
            peer.script = closes
            for _ in range(5):
                assert (await ask(replica)).text == "x"

    run(test())


def test_eight_callers_at_once() -> None:
    async def echo(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for letter in request.body["messages"][0]["content"]:
            writer.write(chunk(letter))
            await asyncio.sleep(0.001)
        writer.write(chunk(end="stop") + DONE)
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with (
            serving(echo) as peer,
            replica_of(peer.url, max_queue=64, max_running=8) as replica,
        ):
            texts = [f"caller {index} " * 4 for index in range(24)]
            asked = [assignment(Chat((Message("user", text),))) for text in texts]
            got = await asyncio.gather(*(ask(replica, one) for one in asked))
            assert [answer.text for answer in got] == texts

    run(test())


# death and return


def test_death_and_return() -> None:
    good = saying(HEAD, chunk("x"), chunk(end="stop"), DONE)

    async def until(replica: RemoteReplica, state: str) -> None:
        while replica.state() != state:
            await asyncio.sleep(0.01)

    async def test() -> None:
        async with serving(good) as peer, replica_of(peer.url) as replica:
            assert (await ask(replica)).text == "x"
            # it answers 500 to everything: a request sees it, the next probe takes it out
            peer.script, peer.probe_status = saying(status(500)), 503
            assert (await ask(replica)).failed.code == "unavailable"
            await until(replica, "silent")
            assert replica.retry_after_s() >= 1 and not replica.healthy()
            verdict = await replica.submit(assignment(), Answer().put)
            assert isinstance(verdict, Rejected) and verdict.code == "unavailable"
            peer.script, peer.probe_status = good, 200
            await until(replica, "up")
            port = peer.port
            assert (await ask(replica)).text == "x"
        assert replica.stats()["restarts"] == 1
        # nobody listens when it starts
        async with replica_of(f"http://127.0.0.1:{port}/v1") as replica:
            assert replica.state() == "silent"
            async with serving(good, port):
                await until(replica, "up")
                assert (await ask(replica)).text == "x"
            # and nobody listens any more: the first request sees it
            assert (await ask(replica)).failed.code == "unavailable"
            assert replica.state() == "silent" and replica.stats()["deaths"] == 2

    run(test())


def test_probes_back_off() -> None:
    now = [100.0]
    health = RemoteHealth(lambda: now[0])
    assert health.is_up is None and health.probe_in_s == 0
    assert health.failed("gone")
    waits = []
    for _ in range(12):
        waits.append(health.probe_in_s)
        now[0] += health.probe_in_s
        assert not health.failed("gone")
    assert waits[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert health.probe_in_s == MAX_BACKOFF_S
    assert health.succeeded() and not health.succeeded()
    assert (health.num_deaths, health.num_returns) == (1, 1)
    health.suspect()
    assert health.probe_in_s == 0
    health.failed("again")
    assert health.probe_in_s == FIRST_BACKOFF_S and health.num_deaths == 2
    # while it is out, requests do not hurry the probes
    health.suspect()
    assert health.probe_in_s == FIRST_BACKOFF_S
    assert health.succeeded() and (health.num_deaths, health.num_returns) == (2, 2)


# bodies


def test_every_field_is_passed_on() -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, typical_p=0.9, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3, logit_bias=((5, -1.0),), seed=7, n=2,
        logprobs=3, constraint=ResponseFormat("json_schema", '{"type":"integer"}'),
        rules=TokenRules((1, 2), ("bad",)),
    )  # fmt: skip
    limits = Limits(
        max_tokens=9, min_tokens=2, stop=("END",), stop_token_ids=(3,), ignore_eos=True,
        text=TextRules(skip_special=False, include_stop=True),
    )  # fmt: skip
    turns = (
        Message("user", "a"),
        Message("assistant", "", (ToolCall("c1", "weather", "{}"),)),
        Message("tool", "sunny", tool_call_id="c1"),
        Message("assistant", "It is"),
    )
    rules = ToolRules(("weather",), required=True, parallel=False, strict=("weather",))
    prompt = Chat(
        turns, {"k": 1}, add_generation_prompt=False, tools=(WEATHER, WEATHER | {"name": "b"}),
        tool_rules=rules, template="T", template_defaults={"enable_thinking": False},
    )  # fmt: skip
    path, body = path_and_body(assignment(prompt, sampling=sampling, limits=limits), "m")
    assert path == "/chat/completions"
    assert json.loads(json.dumps(body)) == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "typical_p": 0.9,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "logit_bias": {"5": -1.0}, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "integer"}, "strict": True},
        },
        "allowed_token_ids": [1, 2], "bad_words": ["bad"], "max_tokens": 9, "min_tokens": 2,
        "stop": ["END"], "stop_token_ids": [3], "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "chat_template_kwargs": {"k": 1},
        "chat_template": "T", "add_generation_prompt": False, "continue_final_message": True,
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant", "content": None,
                "tool_calls": [
                    {
                        "id": "c1", "type": "function",
                        "function": {"name": "weather", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
            {"role": "assistant", "content": "It is"},
        ],
        "tools": [
            {"type": "function", "function": WEATHER | {"strict": True}},
            {"type": "function", "function": WEATHER | {"name": "b"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
    }  # fmt: skip
    # nothing that nobody asked for
    _, plain = path_and_body(assignment(is_limited=False), "m")
    assert plain.keys() == {"model", "stream", "stream_options", "messages"}
    path, body = path_and_body(assignment(Text("once", add_special_tokens=False)), "m")
    assert (path, body["prompt"], body["add_special_tokens"]) == ("/completions", "once", False)
    assert path_and_body(assignment(Tokens((1, 2))), "m")[1]["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("names", "required", "expected"),
    [
        (("weather", "b"), False, None),
        (("weather", "b"), True, "required"),
        (("b",), False, "auto"),
    ],
)
def test_the_choice_of_tools_is_told(
    names: tuple[str, ...], required: bool, expected: str | None
) -> None:
    chat = replace(
        CHAT, tools=(WEATHER, WEATHER | {"name": "b"}), tool_rules=ToolRules(names, required)
    )
    choice: Any = path_and_body(assignment(chat), "m")[1].get("tool_choice")
    if expected == "auto":
        assert choice["allowed_tools"]["mode"] == "auto"
        assert [tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]] == ["b"]
    else:
        assert choice == expected


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"sampling": Sampling(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"sampling": Sampling(num_beams=2)}, "use_beam_search"),
        ({"sampling": Sampling(logprobs=1), "prompt": Text("a")}, "logprobs"),
        ({"limits": Limits(context_size=10)}, "context_size"),
        ({"sampling": Sampling(presence_penalty=1.0, penalty_window=9)}, "repeat_last_n"),
        ({"response_format": ResponseFormat("regex", "a+")}, "response_format"),
        ({"response_format": ResponseFormat("lark", "start: /a/")}, "response_format"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(changes: dict[str, Any], param: str) -> None:
    request = InferenceRequest(
        "a", CHAT, Sampling(), Limits(), RouteHints(), None, None, "t", time.monotonic()
    )
    request = replace(request, **changes)
    with pytest.raises(UnsupportedFeature) as refused:
        check_request(request, request.prompt, 100)
    assert refused.value.param == param


def test_a_window_without_penalties_is_nothing_to_pass_on() -> None:
    sampling = Sampling(repetition_penalty=1.0, penalty_window=64)
    request = InferenceRequest(
        "a", CHAT, sampling, Limits(), RouteHints(), None, None, "t", time.monotonic()
    )
    check_request(request, request.prompt, 100)


def test_a_replica_takes_no_tokens_and_no_id_twice() -> None:
    async def endless(request: PeerRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def test() -> None:
        async with serving(endless) as peer, replica_of(peer.url) as replica:
            asked = assignment()
            await replica.submit(asked, Answer().put)
            with pytest.raises(InvalidRequest):
                await replica.submit(asked, Answer().put)
            assert isinstance(peer, Peer)

    run(test())
