"""Translation without a server: reasoning, finish reasons, merged streams, failures, speed."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
import weakref
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.api import errors
from coterie.api.anthropic.parse import prompt_of
from coterie.api.anthropic.render import MessageShape, MessageStream, stop_fields
from coterie.api.anthropic.types import CountBody
from coterie.api.auth import AccessKeys, KeyRing, check_exposure, tenant_of
from coterie.api.dialect import MAX_WAITING, CollectedAnswer, WholeAnswer, merged
from coterie.api.door import Door, Exchange, exchange_of, new_id
from coterie.api.openai.chat import ChatShape, ChatStream
from coterie.api.openai.render import LegacyLogprobs, chat_logprobs, finish_fields
from coterie.api.openai.text import TextShape, TextStream
from coterie.api.tools.read import AnswerSyntax, ReasoningSplitter
from coterie.api.transport.sse import Events
from coterie.core.errors import (
    ERRORS,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from coterie.core.events import Delta, Failed, Finished, Started, Timings, TokenLogprob, Usage
from coterie.core.request import KeyRights, Text
from coterie.engine.detokenize import TextOffsets, TokenPieces
from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import frames

MARKS = ("<think>", "</think>")


def split(pieces: list[str], inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(MARKS, inside)
    found = [piece for text in pieces for piece in splitter.feed(text)] + splitter.finish()
    return (
        "".join(text for kind, text in found if kind == "reasoning"),
        "".join(text for kind, text in found if kind == "content"),
    )


@pytest.mark.parametrize(
    ("text", "inside", "wanted"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", False, ("why", "because")),
        ("why\n</think>\n\nbecause", True, ("why", "because")),
        ("\n\njust this", False, ("", "just this")),
        ("<think>cut sh", False, ("cut sh", "")),
        ("<think></think>answer", False, ("", "answer")),
        ("<thi", False, ("", "<thi")),
        ("no <think> here", False, ("", "no <think> here")),
        ("a </think> b </think> c", True, ("a", "b </think> c")),
    ],
)
def test_reasoning_is_parted(text: str, inside: bool, wanted: tuple[str, str]) -> None:
    assert split([text], inside) == wanted
    assert split(list(text), inside) == wanted


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "\n", " ", "a", "</"])))
def test_reasoning_does_not_depend_on_the_cuts(pieces: list[str]) -> None:
    for inside in (False, True):
        assert split(pieces, inside) == split(["".join(pieces)], inside)


def test_every_error_has_a_row_or_is_ours() -> None:
    ours = {"config_error", "missing_dependency"}
    assert set(ERRORS) - ours == set(errors.ROWS)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("/srv/models/tiny/config.json: missing. Fetch it.", "config.json: missing. Fetch it."),
        ("worker e0r0 died while loading /srv/m/x.gguf (exit 1)",
         "worker e0r0 died while loading x.gguf (exit 1)"),
        ("jobs: '/home/a-b/.cache/coterie/state/jobs.db': disk full", "jobs: 'jobs.db': disk full"),
        ("see https://example.org/a/b/c and /v1/models, 3/4/5 of it",
         "see https://example.org/a/b/c and /v1/models, 3/4/5 of it"),
    ],
)  # fmt: skip
def test_a_fault_of_the_server_tells_no_folder(
    message: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for dialect in (errors.OPENAI, errors.ANTHROPIC):
        body = json.loads(errors.body_of(Unavailable(message), dialect, "r"))
        assert body["error"]["message"] == said
    logged = [getattr(record, "reason", None) for record in caplog.records]
    assert (message in logged) == (said != message)


def test_a_path_of_the_caller_is_told_back() -> None:
    body = json.loads(errors.body_of(InvalidRequest("/a/b/c: no such directory"), "openai", "r"))
    assert body["error"]["message"] == "/a/b/c: no such directory"


def test_retry_advice_is_capped() -> None:
    headers = errors.headers_of(Overloaded("full", retry_after_s=900), errors.OPENAI)
    assert headers["retry-after"] == "120" and headers["retry-after-ms"] == "120000"
    assert headers["x-ratelimit-reset-requests"] == "2m0s"
    assert errors.headers_of(Unavailable("bye"), errors.ANTHROPIC) == {"x-should-retry": "false"}
    soon = errors.headers_of(Overloaded("full", retry_after_s=0.25), errors.OPENAI)
    assert (soon["retry-after"], soon["retry-after-ms"]) == ("1", "250")
    assert soon["x-ratelimit-reset-requests"] == "250ms"
    assert "x-ratelimit-limit-requests" not in soon


def test_a_full_queue_names_its_limit() -> None:
    error = Overloaded("full", retry_after_s=30)
    ours = errors.headers_of(error, errors.OPENAI, 256)
    assert ours["x-ratelimit-limit-requests"] == "256"
    theirs = errors.headers_of(error, errors.ANTHROPIC, 256)
    assert theirs["anthropic-ratelimit-requests-limit"] == "256"
    assert theirs["anthropic-ratelimit-requests-remaining"] == "0"
    reset = datetime.fromisoformat(theirs["anthropic-ratelimit-requests-reset"])
    assert 28 <= (reset - datetime.now(UTC)).total_seconds() <= 30
    rate = errors.headers_of(
        Overloaded("slow down", param="user_id", retry_after_s=1), errors.OPENAI, 256
    )
    assert rate["retry-after"] == "1" and "x-ratelimit-limit-requests" not in rate


def test_finish_reasons() -> None:
    assert finish_fields("stop", None) == {"finish_reason": "stop"}
    assert finish_fields("stop", "END") == {"finish_reason": "stop", "stop_reason": "END"}
    assert finish_fields("timeout", None) == {"finish_reason": "length", "stop_reason": "timeout"}
    assert stop_fields("stop", "END")["stop_reason"] == "stop_sequence"
    assert stop_fields("stop", 5)["stop_reason"] == "end_turn"
    assert stop_fields("timeout", None)["stop_reason"] == "max_tokens"


def test_logprobs_of_impossible_tokens_are_numbers() -> None:
    token = TokenLogprob(3, "a", b"a", float("-inf"), ((3, "a", b"a", float("-inf")),))
    assert json.loads(json.dumps(chat_logprobs([token]), allow_nan=False))
    legacy = LegacyLogprobs(
        TextOffsets(TokenPieces(load_tokenizer(tiny_checkpoint("llama")))), num_top=1
    )
    unscored = replace(token, logprob=math.nan)
    assert legacy.lists([unscored, token], [0, 3])["token_logprobs"] == [None, -9999.0]


def delta(request_id: str, choice: int, text: str, reason: str | None = None) -> Delta:
    return Delta(request_id, choice, text, (1,), None, reason)


def finished(request_id: str, tokens: int = 1) -> Finished:
    return Finished(request_id, ("length",), Usage(2, tokens, 1), Timings(total_s=1.0))


async def play(*events: object) -> Events:
    for event in events:
        await asyncio.sleep(0)
        if isinstance(event, Exception):
            raise event
        yield event  # type: ignore[misc]


async def collect(events: Events, num_choices: int) -> CollectedAnswer:
    """What a `WholeAnswer` writes, for a client that stays until its end."""
    written: list[CollectedAnswer] = []

    def write(answer: CollectedAnswer) -> bytes:
        written.append(answer)
        return b"{}"

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    async def send(message: object) -> None:
        pass

    response = WholeAnswer(events, num_choices, write, Exchange("id", errors.OPENAI, 0.0))
    await response({"type": "http"}, receive, send)
    return written[0]


def test_merged_requests_are_one() -> None:
    async def run() -> None:
        first = play(Started("a", "r", 2, 1), delta("a", 0, "x", "length"), finished("a"))
        second = play(Started("b", "r", 2, 1), delta("b", 1, "y", "length"), finished("b"))
        answer = await collect(merged([first, second], 2), 4)
        assert ["".join(choice.text) for choice in answer.choices] == ["x", "", "", "y"]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 2)

    asyncio.run(run())


def test_a_slow_reader_holds_merged_requests_back() -> None:
    async def run() -> None:
        made = 0

        async def endless() -> Events:
            nonlocal made
            while True:
                made += 1
                yield delta("a", 0, "x")

        events = merged([endless(), endless()], 1)
        await anext(events)
        for _ in range(500):
            await asyncio.sleep(0)
        assert made <= MAX_WAITING + 3
        await events.aclose()

    asyncio.run(run())


def test_one_failure_ends_a_merged_request() -> None:
    async def run() -> None:
        closed: list[str] = []

        async def endless() -> Events:
            try:
                while True:
                    await asyncio.sleep(0)
                    yield delta("a", 0, "x")
            finally:
                closed.append("a")

        with pytest.raises(Overloaded):
            await collect(merged([endless(), play(Overloaded("full"))], 1), 2)
        assert closed == ["a"]

    asyncio.run(run())


def test_failures_are_raised() -> None:
    async def run() -> None:
        with pytest.raises(Unavailable):
            await collect(play(Started("a", "r", 1, 0), Failed("a", "unavailable", "gone")), 1)
        late = Delta("a", 0, "", (), None, "timeout")
        with pytest.raises(DeadlineExceeded):
            await collect(play(late, finished("a", 0)), 1)

    asyncio.run(run())


def test_an_error_in_a_stream() -> None:
    [(_, frame)] = frames(ChatStream(ChatShape("i", 0, "m", 1)).error(Unavailable("gone")))
    assert frame["error"]["code"] == "specialist_unavailable"
    stream = MessageStream(MessageShape("i", "m", "req_1"))
    [(name, event)] = frames(stream.error(Unavailable("gone")))
    assert (name, event["error"]["type"]) == ("error", "overloaded_error")
    assert event["request_id"] == "req_1"


def test_a_thinking_message_has_two_blocks() -> None:
    stream = MessageStream(MessageShape("i", "m", "r", AnswerSyntax((MARKS, False))))
    parts = ["<thi", "nk>why", "</think>", "\nso", ""]
    raw = stream.render(Started("i", "r", 5, 0))
    for index, text in enumerate(parts):
        raw += stream.render(delta("i", 0, text, "stop" if index == len(parts) - 1 else None))
    raw += stream.render(finished("i", 5))
    found = [(name, data.get("delta", {}).get("type")) for name, data in frames(raw)]
    assert found == [
        ("message_start", None),
        ("content_block_start", None),
        ("ping", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("message_delta", None),
        ("message_stop", None),
    ]


def test_neighbours_of_one_role_are_one_turn_in_linear_time() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "y"}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    messages = [
        *[{"role": "user", "content": "word"}] * 9_000,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, result]},
    ]
    body = CountBody.model_validate({"model": "tiny", "messages": messages})
    begun = time.process_time()
    chat = prompt_of(body)
    assert time.process_time() - begun < 2.0
    assert [turn.role for turn in chat.messages] == ["user", "assistant", "tool", "tool"]
    assert chat.messages[0].content == "\n".join(["word"] * 9_000)
    assert (chat.messages[1].content, len(chat.messages[1].tool_calls)) == ("I look.", 1)


def test_loopback_rule() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        check_exposure(host, has_keys=False, insecure=False)
    for host in ("0.0.0.0", "::", "::1234", "192.168.1.5", "example.com", "localhost.example", ""):
        with pytest.raises(ConfigError):
            check_exposure(host, has_keys=False, insecure=False)
        check_exposure(host, has_keys=True, insecure=False)
        check_exposure(host, has_keys=False, insecure=True)


def test_a_restart_echoes_the_prompt_once() -> None:
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    shape = TextShape("i", 0, "m", 1, (Text("Once"),), tokenizer, echo=True)
    ids = tuple(tokenizer.encode("Once"))
    stream, started = TextStream(shape), Started("i", "r0", len(ids), 0, prompt_ids=ids)
    assert b"Once" in stream.render(started)
    assert stream.render(started) == b""


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError):
        KeyRing.load(path)
    path.write_text("\n# only a comment\n")
    with pytest.raises(ConfigError):
        KeyRing.load(path)
    path.write_text("one\r\n two \n")
    ring = KeyRing.load(path)
    tenants = {ring.tenant([(b"x-api-key", key)]) for key in (b"one", b"two")}
    assert len(tenants) == 2 and not any("one" in tenant for tenant in tenants)
    path.write_text("one priority=9 max_running=8\ntwo max_running=2\nthree\n")
    rights = [KeyRing.load(path).rights[tenant_of(key)] for key in (b"one", b"two", b"three")]
    assert rights == [KeyRights(9, 8), KeyRights(5, 2), KeyRights()]


def test_keys_of_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one tenant=acme\ntwo tenant=acme\nthree tenant=łódź\nfour\n", encoding="utf-8")
    ring = KeyRing.load(path)
    keys = (b"one", b"two", b"three", b"four")
    tenants = [ring.tenant([(b"x-api-key", key)]) for key in keys]
    assert tenants == ["acme", "acme", "łódź", tenant_of(b"four")]
    # their rights are in the settings
    assert list(ring.rights) == [tenant_of(b"four")] and ring.tenants == {"acme", "łódź"}
    with pytest.raises(ConfigError, match="'łódź'"):
        AccessKeys(ring).check_tenants(["acme"])
    AccessKeys(ring).check_tenants(["acme", "łódź"])


@pytest.mark.parametrize(
    "line",
    [
        "k priority=10",
        "k priority=",
        "k priority",
        "k max_running=0",
        "k fast",
        "k priority=9,8",
        "k tenant=",
        "k tenant=a+b",
        "k tenant=fast/x",
        "k tenant=a priority=3",
    ],
)
def test_a_right_that_is_not_known_is_refused_and_not_repeated(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"first\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        KeyRing.load(path)
    # it may be a piece of somebody's key
    assert "fast" not in caught.value.message


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_rendering_a_token_is_cheap(dialect: str) -> None:
    """The gateway's whole budget is 40 microseconds of CPU per token; rendering may take 8."""
    stream: ChatStream | MessageStream = ChatStream(ChatShape("i" * 40, 1, "model", 1))
    if dialect == "anthropic":
        stream = MessageStream(MessageShape("i" * 40, "model", "req"))
    stream.render(Started("i", "r", 5, 0))
    event = delta("i", 0, " token")
    best = 1.0
    for _ in range(5):
        started = time.process_time()
        for _ in range(2000):
            stream.render(event)
        best = min(best, (time.process_time() - started) / 2000)
    assert best < 8e-6


def test_a_request_leaves_nothing_to_the_garbage_collector() -> None:
    """A server keeps the scope of a request as long as what its answer is sent through."""

    class Connection:
        scope: dict[str, Any]

        async def send(self, message: Any) -> None:
            assert exchange_of(self.scope).send is not None

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    def ended() -> weakref.ref[Connection]:
        connection = Connection()
        connection.scope = {"type": "http", "path": "/health", "method": "GET", "headers": []}
        asyncio.run(Door(answer)(connection.scope, receive, connection.send))
        return weakref.ref(connection)

    gc.collect()
    gc.disable()
    try:
        assert ended()() is None
    finally:
        gc.enable()


def test_later_ids_are_behind_earlier_ones() -> None:
    first = [new_id("a_") for _ in range(200)]
    time.sleep(0.002)
    later = [new_id("a_") for _ in range(200)]
    assert max(first) < min(later)
    assert len({*first, *later}) == 400 and {len(one) for one in first} == {34}
