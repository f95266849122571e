"""Bodies of four megabytes made to be slow: each is answered, others are served meanwhile, and what
they took is given back."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import connect

from coterie.api.body import TRIM_AFTER_S
from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import MAX_PROBE_S, Probe, Served, chat

LIMIT = 4_000_000
RESPONSES, OLLAMA = "/v1/responses", "/api/chat"
CHAT, TEXT, MESSAGES, INFER = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/infer"
# seconds of processor time that one body may cost the gateway
MAX_CPU_S = 1.5


def filled(before: str, item: str, after: str, last: str | None = None) -> bytes:
    """`item` as often as there is room for it."""
    room = LIMIT - len(before) - len(after) - len(last or item) - 10
    items = [item] * (room // (len(item) + 1))
    return (before + ",".join([*items, last or item]) + after).encode()


def keys(seed: random.Random) -> bytes:
    names = ",".join(f'"{seed.randrange(10**9):x}":0' for _ in range(LIMIT // 16))
    return ('{"model":"tiny","messages":[{"role":"user","content":"x"}],' + names + "}").encode()


TURN = '{"role":"user","content":"x"}'
# name -> (path, body): the statuses are those of a refusal
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ids with a bad last one": (
        TEXT, lambda: filled('{"model":"tiny","prompt":[', "1", "]}", '"x"')),
    "three hundred thousand ids, bad last": (
        TEXT, lambda: ('{"model":"tiny","prompt":[' + "31234," * 299_000 + '"x"]}').encode()),
    "two million ids": (TEXT, lambda: filled('{"model":"tiny","prompt":[', "1", "]}")),
    "lists of ids": (TEXT, lambda: filled('{"model":"tiny","prompt":[', "[1]", "]}", '["x"]')),
    "empty lists": (TEXT, lambda: filled('{"model":"tiny","prompt":[', "[]", "]}")),
    "texts": (TEXT, lambda: filled('{"model":"tiny","prompt":[', '"a"', "]}", "1")),
    "wrong texts": (
        CHAT, lambda: filled('{"model":"tiny","stop":[', "1", f'],"messages":[{TURN}]}}')),
    "messages": (CHAT, lambda: filled('{"model":"tiny","messages":[', TURN, "]}")),
    "messages, bad last": (CHAT, lambda: filled('{"model":"tiny","messages":[', TURN, "]}", "5")),
    "numbers for messages": (CHAT, lambda: filled('{"model":"tiny","messages":[', "7", "]}")),
    "parts": (
        CHAT,
        lambda: filled(
            '{"model":"tiny","messages":[{"role":"user","content":[',
            '{"type":"text","text":"x"}', "]}]}")),
    "tools": (CHAT, lambda: filled(f'{{"model":"tiny","messages":[{TURN}],"tools":[', "5", "]}")),
    "logit bias": (
        CHAT,
        lambda: (
            f'{{"model":"tiny","messages":[{TURN}],"logit_bias":{{'
            + ",".join(f'"{i}":"x"' for i in range(50_000)) + "}}").encode()),
    "keys": (CHAT, lambda: keys(random.Random(3))),
    "deep": (CHAT, lambda: b'{"x":' * (LIMIT // 6)),
    "deep lists": (CHAT, lambda: b"[" * (LIMIT // 2) + b"]" * (LIMIT // 2)),
    "digits": (CHAT, lambda: b'{"model":"tiny","n":' + b"9" * (LIMIT - 30) + b"}"),
    "fraction": (CHAT, lambda: b'{"model":"tiny","top_p":0.' + b"9" * (LIMIT - 30) + b"}"),
    "a long text": (
        CHAT, lambda: json.dumps(chat("The quick brown fox. " * 180_000)).encode()),
    "one long word": (
        TEXT, lambda: json.dumps({"model": "tiny", "prompt": "a" * 3_900_000}).encode()),
    "escapes": (
        CHAT,
        lambda: b'{"model":"tiny","messages":[{"role":"user","content":"'
        + b'\\",[{' * 750_000 + b'"}]}'),
    "commas in a text": (
        CHAT, lambda: json.dumps(chat("a,b[c{" * 600_000)).encode()),
    "blanks": (CHAT, lambda: b"{" + b" " * (LIMIT - 10) + b"}x"),
    "quotes": (CHAT, lambda: b'"' * LIMIT),
    "Anthropic's turns": (
        MESSAGES,
        lambda: filled('{"model":"tiny","max_tokens":4,"messages":[', TURN, "]}", "1")),
    "Anthropic's long text": (
        MESSAGES, lambda: json.dumps(chat("The quick brown fox. " * 180_000)).encode()),
    "Anthropic's system": (
        MESSAGES,
        lambda: filled(
            f'{{"model":"tiny","max_tokens":4,"messages":[{TURN}],"system":[', "5", "]}")),
    "items": (RESPONSES, lambda: filled('{"model":"tiny","input":[', TURN, "]}")),
    "items, bad last": (RESPONSES, lambda: filled('{"model":"tiny","input":[', TURN, "]}", "5")),
    "thoughts": (
        RESPONSES,
        lambda: filled(
            '{"model":"tiny","input":[', '{"type":"reasoning","summary":[]}', "]}")),
    "references": (
        RESPONSES,
        lambda: (
            '{"model":"tiny","input":['
            + ",".join(f'{{"type":"item_reference","id":"msg_{i}"}}' for i in range(9_000))
            + "]}").encode()),
    "an item of its own fields": (
        RESPONSES,
        lambda: (
            '{"model":"tiny","input":[{"role":"user","content":"x","deep":'
            + "[" * 900 + "]" * 900 + "}]}").encode()),
    "a tool that is never called": (
        RESPONSES,
        lambda: json.dumps({
            "model": "tiny", "input": "x",
            "tools": [{"type": "web_search", "where": "a" * 3_900_000}]}).encode()),
    "a deep format": (
        RESPONSES,
        lambda: (
            '{"model":"tiny","input":"x","text":{"format":'
            + '{"type":' * 900 + "1" + "}" * 900 + "}}").encode()),
    "metadata": (
        RESPONSES,
        lambda: (
            '{"model":"tiny","input":"x","metadata":{'
            + ",".join(f'"{i}":"x"' for i in range(50_000)) + "}}").encode()),
    "a long item": (
        RESPONSES,
        lambda: json.dumps(
            {"model": "tiny", "input": "The quick brown fox. " * 180_000}).encode()),
    "a long item to cut": (
        RESPONSES,
        lambda: json.dumps(
            {"model": "tiny", "input": "The quick brown fox. " * 180_000,
             "truncation": "auto"}).encode()),
    "items to count": (
        "/v1/responses/input_tokens",
        lambda: filled('{"model":"tiny","input":[', TURN, "]}", "5")),
    "Ollama's turns": (OLLAMA, lambda: filled('{"model":"tiny","messages":[', TURN, "]}", "5")),
    "Ollama's long text": (
        OLLAMA,
        lambda: json.dumps({
            "model": "tiny",
            "messages": [{"role": "user", "content": "The quick brown fox. " * 180_000}],
        }).encode()),
    "turns to leave out": (
        OLLAMA,
        lambda: json.dumps({
            "model": "tiny",
            "messages": [{"role": "user", "content": "word " * 80}] * 9_000
            + [{"role": "user", "content": "word " * 2_000}]}).encode()),
    "calls and results": (
        OLLAMA,
        lambda: json.dumps({
            "model": "tiny",
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": f"f{i % 7}"}}] * 3}
                for i in range(2_000)]
            + [{"role": "tool", "content": "x", "tool_name": "f6"}] * 2_000}).encode()),
    "unknown options": (
        OLLAMA,
        lambda: (
            f'{{"model":"tiny","messages":[{TURN}],"options":{{"num_gpu":"x",'
            + ",".join(f'"o{i}":1' for i in range(50_000)) + "}}").encode()),
    "a context of ids": (
        "/api/generate", lambda: filled('{"model":"tiny","prompt":"x","context":[', "1", "]}")),
    "a raw prompt": (
        "/api/generate",
        lambda: json.dumps({"model": "tiny", "prompt": "a b " * 900_000, "raw": True}).encode()),
    "parts of a prompt": (
        "/completion", lambda: filled('{"prompt":[1,', '"a b c d e f g h"', "]}")),
    "a gap": (
        "/infill", lambda: json.dumps({"input_prefix": "a b " * 900_000}).encode()),
    "biases": ("/completion", lambda: filled('{"prompt":"x","logit_bias":[', "[1,2]", "]}")),
    "unknown fields": (INFER, lambda: keys(random.Random(4))),
    "unknown fields of a grammar": (
        INFER,
        lambda: ('{"prompt":"x","grammar":{'
        + ",".join(f'"f{i}":1' for i in range(50_000)) + "}}").encode()),
    "names of experts": (INFER, lambda: filled('{"prompt":"x","force_experts":[', "1", "]}")),
    "a long prompt": (INFER, lambda: json.dumps({"prompt": "fox " * 900_000}).encode()),
    "marks": (INFER, lambda: json.dumps({"prompt": "\u0301\u0323" * 300_000}).encode()),
    "ids to read": ("/detokenize", lambda: filled('{"tokens":[', "1", "]}", '"x"')),
    "a text to tokenise": (
        "/tokenize", lambda: json.dumps({"prompt": "The quick brown fox. " * 180_000}).encode()),
    "a chat to tokenise": (
        "/tokenize", lambda: json.dumps(chat("The quick brown fox. " * 180_000)).encode()),
    "a text to count": (
        "/v1/messages/count_tokens",
        lambda: json.dumps(chat("The quick brown fox. " * 180_000)).encode()),
    "feedback": ("/v1/feedback", lambda: keys(random.Random(5))),
    "messages to count": ("/v1/messages/count_tokens", lambda: filled('{"messages":[', "1", "]}")),
}  # fmt: skip


def cpu_s(served: Served) -> float:
    return served.metric("coterie_gateway_cpu_seconds_total")


def rss(served: Served) -> int:
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body(server: Served, name: str) -> None:
    path, make = BODIES[name]
    body = make()
    assert len(body) <= LIMIT
    with Probe(server) as probe:
        before = cpu_s(server)
        reply = server.post(path, body)
        spent_s = cpu_s(server) - before
    assert reply.status in (400, 413), (reply.status, reply.body[:300])
    error = reply.json["error"]
    # Ollama's errors are a text
    assert error if isinstance(error, str) else error["message"]
    assert len(reply.body) < 2000
    assert probe.worst_s < MAX_PROBE_S
    assert spent_s < MAX_CPU_S


def test_what_does_not_fit_is_still_counted_right(server: Served) -> None:
    """Who wants to know how much to cut."""
    context = server.get("/v1/models").json["data"][0]["max_model_len"]
    text = "fox " * (2 * context)
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    exact = len(tokenizer.encode(text, special=False))
    assert exact > context
    body = {"prompt": text, "add_special_tokens": False}
    assert server.post("/tokenize", body).json["count"] == exact
    counted = [
        server.post("/v1/messages/count_tokens", chat(part)).json["input_tokens"]
        for part in ("", text)
    ]
    # a template may strip the last blank
    assert counted[1] - counted[0] in (exact, exact - 1)


def test_unfinished_bodies_give_their_memory_back(server: Served) -> None:
    """Bodies in small chunks, whose clients leave before the end."""
    where = urlsplit(server.url)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n"
        "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    body = head.encode() + (b"40\r\n" + b"a" * 64 + b"\r\n") * 24_000
    all_sent = threading.Barrier(24)

    def send() -> None:
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall(body)
            all_sent.wait()

    # what is free now is returned to the system
    path, make = BODIES["unknown fields"]
    assert server.post(path, make()).status in (400, 413)
    time.sleep(2 * TRIM_AFTER_S)
    before = rss(server)
    threads = [threading.Thread(target=send) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # what had arrived is parsed first
    deadline = time.monotonic() + 60
    while server.metric("coterie_connections") > 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    deadline = time.monotonic() + 10
    while rss(server) > before + 20_000_000 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert rss(server) <= before + 20_000_000, (before, rss(server))


def test_memory_comes_back(server: Served) -> None:
    """After all of the above, eight at a time."""
    server.post(CHAT, chat())
    bodies = [BODIES[name] for name in sorted(BODIES)]
    before = rss(server)
    statuses: list[int] = []

    def send(part: list[tuple[str, Callable[[], bytes]]]) -> None:
        statuses.extend(server.post(path, make()).status for path, make in part)

    threads = [threading.Thread(target=send, args=(bodies[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == len(bodies) and set(statuses) <= {400, 413, 429}
    deadline = time.monotonic() + 60
    while rss(server) > before + 60_000_000 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert rss(server) <= before + 60_000_000, (before, rss(server))
    assert server.post(CHAT, chat()).status == 200
    assert '"status":500' not in server.log()


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 4 else 5)
    if kind < 5:
        number, share = draw.randrange(-5, 10**6), draw.random()
        return [number, share, "x" * draw.randrange(20), None, True][kind]
    if kind < 7:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(6))]
    return {str(i): random_value(draw, depth + 1) for i in range(draw.randrange(6))}


FIELDS = (
    "messages",
    "input",
    "prompt",
    "stop",
    "tools",
    "logit_bias",
    "experts",
    "metadata",
    "other",
)


def random_body(draw: random.Random) -> bytes:
    """A field of a body filled with one random value, as often as there is room."""
    item = json.dumps(random_value(draw))
    start, field = json.dumps(chat())[:-1], draw.choice(FIELDS)
    count = min((LIMIT - len(start) - 50) // (len(item) + 1), 2_000_000)
    return f'{start},"{field}":[{",".join([item] * count)}]}}'.encode()


def fires(served: Served, seed: int) -> None:
    draw = random.Random(seed)
    with Probe(served) as probe:
        reply = served.post(draw.choice([CHAT, TEXT, MESSAGES, RESPONSES]), random_body(draw))
    assert reply.status in (200, 400, 413), reply.body[:300]
    assert probe.worst_s < MAX_PROBE_S


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(server: Served, seed: int) -> None:
    fires(server, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6, 200))
def test_many_random_shapes(server: Served, seed: int) -> None:
    fires(server, seed)


def test_sockets_take_no_hostile_messages(server: Served) -> None:
    """The same thread and the same bounds behind a WebSocket."""
    url = server.url.replace("http://", "ws://") + "/v1/infer/ws"
    with Probe(server) as probe, connect(url, max_size=None) as socket:
        for name in ("names of experts", "unknown fields", "a long prompt", "deep", "marks"):
            socket.send(BODIES[name][1]().decode())
            event = json.loads(socket.recv(timeout=60))
            assert event["event"] == "error", event
            assert len(json.dumps(event)) < 3000
    assert probe.worst_s < MAX_PROBE_S
