"""Every way a request can be wrong: its documented 4xx in the dialect of its endpoint, never a 500,
and the server answers as before."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.serving.server_process import Served, chat

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT = "/v1/messages/count_tokens"
LONG = "word " * 3000
DEEP = b"[" * 20_000 + b"]" * 20_000


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 4} | fields


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def called(argument: Any) -> list[dict[str, Any]]:
    """A conversation with a call of a tool, as Anthropic's clients send it."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": argument}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "y"}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


# bodies that are wrong for OpenAI: (path, body, status, param, code)
OPENAI: list[tuple[str, Any, int, str | None, str | None]] = [
    (CHAT, chat(messages=[]), 400, "messages", None),
    (CHAT, b"{", 400, None, None),
    (CHAT, b"", 400, None, None),
    (CHAT, b"[]", 400, None, None),
    (CHAT, b'"text"', 400, None, None),
    (CHAT, DEEP, 400, None, None),
    (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}', 400, None, None),
    (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', 400, None, None),
    (CHAT, b'{"model":"tiny","temperature":NaN,"messages":[]}', 400, None, None),
    (CHAT, b'{"model":"tiny","temperature":Infinity,"messages":[]}', 400, None, None),
    (CHAT, b'{"model":"tiny","temperature":1e999,"messages":[]}', 400, None, None),
    (CHAT, chat(model="nobody"), 404, "model", "model_not_found"),
    (CHAT, chat(model=5), 400, "model", None),
    (CHAT, {"messages": [{"role": "user", "content": "x"}]}, 400, "model", None),
    (CHAT, {"model": "tiny"}, 400, "messages", None),
    (CHAT, chat(messages="hello"), 400, "messages", None),
    (CHAT, chat(messages=[5]), 400, "messages.0", None),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages.0.content", None),
    (CHAT, chat(messages=[{"content": "x"}]), 400, "messages.0.role", None),
    (CHAT, chat(messages=[{"role": "king", "content": "x"}]), 400, "messages.0.role", None),
    (CHAT, chat(temperature="hot"), 400, "temperature", None),
    (CHAT, chat(temperature=-0.1), 400, "temperature", None),
    (CHAT, chat(temperature=2.1), 400, "temperature", None),
    (CHAT, chat(top_p=1.5), 400, "top_p", None),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens", None),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", None),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens", None),
    (CHAT, chat(max_tokens="8"), 400, "max_tokens", None),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens", None),
    (CHAT, chat(max_tokens=100_000), 400, None, "context_length_exceeded"),
    (CHAT, chat(LONG), 400, None, "context_length_exceeded"),
    (CHAT, chat(n=0), 400, "n", None),
    (CHAT, chat(n=1000), 400, "n", None),
    (CHAT, chat(n=True), 400, "n", None),
    (CHAT, chat(seed=10**40), 400, "seed", None),
    (CHAT, chat(stop=""), 400, "stop", None),
    (CHAT, chat(stop=["a"] * 100), 400, "stop", None),
    (CHAT, chat(stop=[1]), 400, "stop.0", None),
    (CHAT, chat(logit_bias={"word": 1}), 400, "logit_bias", None),
    (CHAT, chat(logit_bias={"5": 1000}), 400, "logit_bias", None),
    (CHAT, chat(logit_bias={"999999": 1}), 400, "logit_bias", None),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs", None),
    (CHAT, chat(logprobs=True, top_logprobs=50), 400, "top_logprobs", None),
    (CHAT, chat(stream="yes"), 400, "stream", None),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", None),
    (CHAT, chat(min_p=3), 400, "min_p", None),
    (CHAT, chat(typical_p=0), 400, "typical_p", None),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", None),
    (CHAT, chat(min_tokens=9), 400, "min_tokens", None),
    (CHAT, chat(continue_final_message=True), 400, "continue_final_message", None),
    (CHAT, chat(chat_template_kwargs={"a": nested(100)}), 400, "chat_template_kwargs", None),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", None),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function", None),
    (CHAT, chat(tools=[tool({"required": [{}], "properties": {}})]), 400, "tools.0", None),
    (CHAT, chat(tools=[tool({"properties": {"a": 5}})]), 400, "tools.0", None),
    (CHAT, chat(tools=[{"type": "custom", "custom": {}}]), 400, "tools.0", "unsupported"),
    (CHAT, chat(functions=[{"name": "f"}]), 400, "functions", "unsupported"),
    (CHAT, chat(modalities=["audio"]), 400, "modalities", "unsupported"),
    (CHAT, chat(response_format={"type": "xml"}), 400, "response_format.type", None),
    (TEXT, text(response_format={"type": "xml"}), 400, "response_format.type", None),
    (CHAT, chat(logits_processors=["x"]), 400, "logits_processors", "unsupported"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages.0.content.0",
        "unsupported",
    ),
    (
        CHAT,
        chat(messages=[{"role": "tool", "content": "5", "tool_call_id": "a"}]),
        400,
        "messages",
        None,
    ),
    (TEXT, text(prompt=[]), 400, "prompt", None),
    (TEXT, text(prompt=[-1]), 400, "prompt.0", None),
    (TEXT, text(prompt=[10**9]), 400, "prompt", None),
    (TEXT, text(prompt=[1, "a"]), 400, "prompt.1", None),
    (TEXT, text(prompt={"text": "a"}), 400, "prompt", None),
    (TEXT, text(prompt=["a"] * 1000), 400, "prompt", None),
    (TEXT, text(prompt=LONG), 400, None, "context_length_exceeded"),
    (TEXT, text(best_of=3), 400, "best_of", "unsupported"),
    (TEXT, text(suffix="end"), 400, "suffix", "unsupported"),
    (TEXT, text(max_tokens=0), 400, "max_tokens", None),
    (TEXT, text(logprobs=100), 400, "logprobs", None),
    (TEXT, text(model="nobody", stream=True), 404, "model", "model_not_found"),
    ("/tokenize", {}, 400, "prompt", None),
    ("/tokenize", {"prompt": 5}, 400, "prompt", None),
    ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model", "model_not_found"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens.0", None),
    ("/detokenize", {"tokens": "a"}, 400, "tokens", None),
]

# bodies that are wrong for Anthropic: (path, body, status, type)
ANTHROPIC: list[tuple[str, Any, int, str]] = [
    (MESSAGES, chat(messages=[]), 400, "invalid_request_error"),
    (MESSAGES, b"{", 400, "invalid_request_error"),
    (MESSAGES, DEEP, 400, "invalid_request_error"),
    (MESSAGES, b'{"model":"tiny","max_tokens":4,"x":"\xff"}', 400, "invalid_request_error"),
    (MESSAGES, b'{"model":"tiny","max_tokens":4,"temperature":NaN}', 400, "invalid_request_error"),
    (MESSAGES, chat(model="nobody"), 404, "not_found_error"),
    (MESSAGES, {"model": "tiny", "messages": []}, 400, "invalid_request_error"),
    (MESSAGES, chat(max_tokens=-5), 400, "invalid_request_error"),
    (MESSAGES, chat(max_tokens=100_000), 400, "invalid_request_error"),
    (MESSAGES, chat(temperature=1.5), 400, "invalid_request_error"),
    (MESSAGES, chat(LONG), 400, "invalid_request_error"),
    (MESSAGES, chat(LONG, stream=True), 400, "invalid_request_error"),
    (MESSAGES, chat(messages=[{"role": "user", "content": 5}]), 400, "invalid_request_error"),
    (MESSAGES, chat(messages=[{"role": "tool", "content": "x"}]), 400, "invalid_request_error"),
    (MESSAGES, chat(messages=[{"role": "system", "content": "x"}]), 400, "invalid_request_error"),
    (MESSAGES, chat(system=5), 400, "invalid_request_error"),
    (MESSAGES, chat(stop_sequences=[""]), 400, "invalid_request_error"),
    (MESSAGES, chat(tools=[{"name": "f"}]), 400, "invalid_request_error"),
    (
        MESSAGES,
        chat(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        400,
        "invalid_request_error",
    ),
    (MESSAGES, chat(messages=called(nested(65))), 400, "invalid_request_error"),
    (COUNT, chat(messages=called(nested(800))), 400, "invalid_request_error"),
    (COUNT, {"model": "tiny"}, 400, "invalid_request_error"),
    (COUNT, chat(model="nobody"), 404, "not_found_error"),
]


def _name(case: tuple[Any, ...]) -> str:
    return f"{case[0]} {str(case[1])[:60]}"


@pytest.mark.parametrize("case", OPENAI, ids=_name)
def test_openai(server: Served, case: tuple[str, Any, int, str | None, str | None]) -> None:
    path, body, status, param, code = case
    reply = server.post(path, body)
    error = reply.json["error"]
    assert reply.status == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code), error
    assert "x-should-retry" not in reply.headers


@pytest.mark.parametrize("case", ANTHROPIC, ids=_name)
def test_anthropic(server: Served, case: tuple[str, Any, int, str]) -> None:
    path, body, status, kind = case
    reply = server.post(path, body)
    assert reply.status == status, reply.body
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == kind
    assert reply.json["request_id"] == reply.headers["request-id"]


def test_every_odd_key_of_logit_bias_is_named(server: Served) -> None:
    reply = server.post(CHAT, chat(logit_bias={"first": 1, "5": 1, "second": 2}))
    message = reply.json["error"]["message"]
    assert "'first', 'second'" in message
    assert "'5'" not in message


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("chunked", [False, True], ids=["sized", "chunked"])
def test_ten_megabytes(server: Served, path: str, chunked: bool) -> None:
    body = b'{"model":"tiny","x":"' + b"a" * 10_000_000 + b'"}'
    host = urlsplit(server.url).netloc
    connection = http.client.HTTPConnection(host, timeout=30)
    try:
        if chunked:
            pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
            connection.request("POST", path, pieces, encode_chunked=True)
        else:
            connection.request("POST", path, body)
        answer = connection.getresponse()
        assert answer.status == 413
        kind = "request_too_large" if path == MESSAGES else "invalid_request_error"
        assert kind.encode() in answer.read()
    finally:
        connection.close()


def test_headers_that_are_wrong(server: Served) -> None:
    for name, value in (
        ("x_deadline_ms", "soon"),
        ("x_deadline_ms", "-5"),
        ("x_deadline_ms", "nan"),
        ("x_vllm_priority", "high"),
    ):
        reply = server.post(CHAT, chat(), **{name: value})
        assert reply.status == 400, (name, value)
        assert reply.json["error"]["param"] == name.replace("_", "-")


def test_unknown_routes_and_methods(server: Served) -> None:
    missing = server.get("/v1/nothing")
    assert (missing.status, missing.json["error"]["type"]) == (404, "invalid_request_error")
    assert "GET /v1/nothing" in missing.json["error"]["message"]
    doubled = server.post("/v1/v1/messages", chat(), anthropic_version="2023-06-01")
    assert (doubled.status, doubled.json["error"]["type"]) == (404, "not_found_error")
    assert "did you mean /v1/messages?" in doubled.json["error"]["message"]
    odd = server.get("/v1/%00%0a%e2%82%ac" + "a" * 500)
    assert odd.status == 404 and len(odd.body) < 600 and "\n" not in odd.json["error"]["message"]
    wrong = server.get(CHAT)
    assert (wrong.status, wrong.json["error"]["code"]) == (405, "method_not_supported")
    assert wrong.headers["allow"] == "POST"
    other = server.get(MESSAGES)
    assert (other.status, other.json["error"]["type"]) == (405, "invalid_request_error")
    beyond = server.get("/v1/messages/nothing")
    assert (beyond.status, beyond.json["error"]["type"]) == (404, "not_found_error")


def test_the_server_is_unharmed(server: Served) -> None:
    """Runs after the table above: everything still works and nothing is left behind."""
    assert server.post(CHAT, chat()).status == 200
    assert server.post(MESSAGES, chat()).status == 200
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("coterie_gateway_open_streams") == 0
    assert '"status":500' not in server.log()
