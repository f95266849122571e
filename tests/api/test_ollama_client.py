"""The official ollama package, unmodified, against the real server process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import ollama
import pytest
from pydantic import BaseModel

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.models.tool_callers import (
    BOTH,
    DONE,
    GREETING,
    ONE,
    OPENAI_TOOLS,
    RESULTS,
    SPOKEN,
    TALK,
    TWO,
)
from tests.helpers.serving.server_process import KEYS, Served, chat

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello there"}]
GREEDY = {"temperature": 0, "num_predict": 8}
CHAT, GENERATE = "/api/chat", "/api/generate"


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as made:
        yield made


@pytest.fixture(scope="module")
def caller(taught_server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=taught_server.url) as made:
        yield made


@pytest.fixture(scope="module")
def thinker(strict_server: Served) -> Iterator[ollama.Client]:
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    with ollama.Client(host=strict_server.url, headers=headers) as made:
        yield made


def lines(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.decode().splitlines()]


def test_lists_of_models(client: ollama.Client, server: Served) -> None:
    [model] = client.list().models
    assert model.model == "tiny:latest" and model.size and model.modified_at
    assert model.details is not None and model.details.family == "llama"
    assert model.digest and len(model.digest) == 64
    [running] = client.ps().models
    assert (running.name, running.context_length, running.size_vram) == ("tiny:latest", 1024, 0)
    assert running.expires_at is not None and running.expires_at.year > 2300
    shown = client.show("tiny")
    assert shown.capabilities == ["completion", "tools"] and "num_ctx" in (shown.parameters or "")
    assert (shown.modelinfo or {})["llama.context_length"] == 1024
    assert "<|turn|>" in (shown.template or "")
    assert server.post("/api/show", {"name": "tiny:latest"}).json["details"]["family"] == "llama"
    version = server.get("/api/version").json["version"].split(".")
    assert [int(part) for part in version] >= [0, 6, 4]
    assert server.send("HEAD", "/api/version", None).status == 200


def test_the_tokens_of_the_other_dialects(client: ollama.Client, server: Served) -> None:
    theirs = server.post("/v1/chat/completions", chat(max_tokens=24)).json
    options = {"temperature": 0, "num_predict": 24}
    whole = client.chat(model="tiny", messages=HELLO, options=options)
    assert whole.message.content == theirs["choices"][0]["message"]["content"]
    assert (whole.done, whole.done_reason, whole.model) == (True, "length", "tiny")
    assert whole.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    assert whole.eval_count == theirs["usage"]["completion_tokens"] == 24
    assert whole.total_duration and whole.load_duration and whole.eval_duration
    assert whole.prompt_eval_duration and whole.total_duration >= whole.eval_duration
    parts = list(client.chat(model="tiny:latest", messages=HELLO, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 24 and parts[0].model == "tiny:latest"
    assert all(part.message.role == "assistant" and part.created_at for part in parts)
    # with the text of a system message, and as one question
    asked = [{"role": "system", "content": "be brief"}, *HELLO]
    theirs = server.post("/v1/chat/completions", chat(messages=asked)).json
    one = client.generate(model="tiny", prompt="hello there", system="be brief", options=GREEDY)
    assert one.response == theirs["choices"][0]["message"]["content"]


def test_a_stream_is_lines_of_json(server: Served) -> None:
    body = {"model": "tiny", "messages": HELLO, "options": GREEDY}
    reply = server.post(CHAT, body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert "content-length" not in reply.headers
    *parts, last = lines(reply.body)
    assert set(parts[0]) == {"model", "created_at", "message", "done"}
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["coterie"]["receipt"]["plan"]["specialist"] == "tiny"
    assert reply.headers["x-coterie-receipt"] == last["coterie"]["receipt"]["request_id"]
    whole = server.post(CHAT, body | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert set(whole.json) == set(last)


def test_generate(client: ollama.Client, server: Served) -> None:
    first = client.generate(model="tiny", prompt="hello", options=GREEDY)
    assert first.context and len(first.context) == (first.prompt_eval_count or 0) + 8
    *parts, last = client.generate(model="tiny", prompt="hello", options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == first.response
    assert last.context == first.context and last.done_reason == "length"
    # the next turn is read after the tokens of the first
    second = client.generate(model="tiny", prompt="more", context=first.context, options=GREEDY)
    assert second.context and second.context[: len(first.context)] == first.context
    assert second.prompt_eval_count == len(second.context) - 8
    # without a template: as /v1/completions
    raw = client.generate(model="tiny", prompt="The fox", raw=True, options=GREEDY)
    text = {"model": "tiny", "prompt": "The fox", "max_tokens": 8, "temperature": 0}
    assert raw.response == server.post("/v1/completions", text).json["choices"][0]["text"]
    assert raw.context is None
    # loads nothing, because everything is loaded
    assert client.generate(model="tiny").done_reason == "load"
    assert client.chat(model="tiny", messages=[]).done_reason == "load"


def test_options(client: ollama.Client, server: Served) -> None:
    def said(**options: Any) -> Any:
        return client.chat(model="tiny", messages=HELLO, options=GREEDY | options).message.content

    plain = said()
    assert said(top_k=1, temperature=1.0) == plain
    assert said(temperature=1.0, seed=7) == said(temperature=1.0, seed=7)
    assert said(temperature=1.0, seed=7, num_predict=30) != said(
        temperature=1.0, seed=8, num_predict=30
    )
    assert said(repeat_penalty=5.0, num_predict=60) != said(num_predict=60)
    assert said(repeat_penalty=5.0, repeat_last_n=0) == plain
    # all of what there is, a window over all of it, and a part of it
    long = {"repeat_penalty": 5.0, "num_predict": 60}
    whole = said(**long)
    assert said(**long, repeat_last_n=-1) == said(**long, repeat_last_n=2000) == whole
    assert said(**long, repeat_last_n=2) not in (whole, said(num_predict=60))
    stop = plain[2:4]
    cut = client.chat(model="tiny", messages=HELLO, options=GREEDY | {"stop": [stop]})
    assert cut.message.content == plain[: plain.index(stop)] and cut.done_reason == "stop"
    # how to load a model is not for the caller to say, and no limit is none
    assert said(num_thread=4, num_gpu=1, num_ctx=512, use_mmap=True, num_keep=3) == plain
    fields = {"model": "tiny", "messages": HELLO, "stream": False}
    # values that say nothing
    nothing = {"tool_choice": "auto", "n": 1, "raw": False, "suffix": "", "stop": None}
    assert server.post(CHAT, fields | nothing | {"options": GREEDY}).status == 200
    beside = server.post(CHAT, fields | {"num_predict": 3, "options": {"temperature": 0}})
    assert beside.json["eval_count"] == 3
    filled = server.post(CHAT, fields | {"options": {"num_predict": -1, "num_ctx": 64}}).json
    assert filled["prompt_eval_count"] + filled["eval_count"] <= 64
    # more than the model has is all that it has
    assert said(num_ctx=131_072) == plain
    # Ollama takes whole numbers from any number, and passes over names that it does not know
    assert said(num_predict=8.9, top_k=40.0, num_batch=2.5) == plain
    assert said(max_tokens=1, format="json", numa=True, made_up={"a": [1]}) == plain
    scores = client.chat(
        model="tiny", messages=HELLO, options=GREEDY, logprobs=True, top_logprobs=2
    ).logprobs
    assert scores is not None and len(scores) == 8 and len(scores[0].top_logprobs or ()) == 2
    assert scores[0].logprob == (scores[0].top_logprobs or [])[0].logprob


@pytest.mark.full
def test_a_window_of_penalties_outlasts_its_worker() -> None:
    served = Served(str(tiny_checkpoint("llama")), "--name", "tiny")
    options: dict[str, Any] = {
        "repeat_penalty": 3.0,
        "frequency_penalty": 0.5,
        "repeat_last_n": 6,
        "seed": 1,
    }
    body = {"model": "tiny", "messages": HELLO, "options": options | {"num_predict": 800}}

    def said(fields: dict[str, Any] = body) -> str:
        return "".join(part["message"]["content"] for part in lines(served.post(CHAT, fields).body))

    try:
        alone = said()
        assert alone != said(
            body | {"options": options | {"num_predict": 800, "repeat_last_n": -1}}
        )
        with ThreadPoolExecutor(1) as callers:
            running = callers.submit(said)
            while served.metric("vllm:num_requests_running") < 1:
                assert not running.done()
            assert served.kill_workers() == 1
            assert running.result() == alone
        assert served.metric("coterie_recoveries_total", kind="request_continued") > 0
    finally:
        served.stop()


def test_ignored_options_are_in_the_log_once(server: Served) -> None:
    old = {"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "penalize_newline": False}
    fields = {"model": "tiny", "messages": HELLO, "stream": False}
    plain, *others = (
        server.post(CHAT, fields | {"options": GREEDY | options}).json["message"]
        for options in ({}, old, old, {"mirostat": None, "tfs_z": None})
    )
    assert others == [plain] * 3
    logged = [
        json.loads(line)["reason"]
        for line in server.log().splitlines()
        if '"event":"option_ignored"' in line
    ]
    assert sorted(reason.partition(":")[0] for reason in logged) == sorted(old)


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        (300, 300), (0.5e3, 500), ("5m", 300), ("90", 90), ("1h30m", 5400), ("1.5h", 5400),
        ("2m500ms", 120.5), ("+10m", 600), ("90000000\u00b5s", 90),
    ],
)  # fmt: skip
def test_how_long_a_model_is_wanted(server: Served, keep_alive: Any, seconds: float) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    body = {"model": "tiny", "messages": [], "keep_alive": keep_alive}
    assert server.post(CHAT, body).json["done_reason"] == "load"
    [running] = server.get("/api/ps").json["models"]
    until = datetime.fromisoformat(running["expires_at"]) - timedelta(seconds=seconds)
    # times are shown in whole seconds
    assert before - timedelta(seconds=1) <= until <= datetime.now(UTC)


def test_models_are_never_unloaded(client: ollama.Client, server: Served) -> None:
    def year() -> int:
        [running] = client.ps().models
        assert running.expires_at is not None
        return running.expires_at.year

    def keep(value: Any, path: str = GENERATE, **fields: Any) -> Any:
        body = {"model": "tiny", "keep_alive": value, "stream": False} | fields
        return server.post(path, body).json

    for forever in (-1, -0.5, "-1m", "-1", 10**12, "9999999h"):
        assert keep("5m")["done_reason"] == "load" and year() < 2300
        assert keep(forever)["done_reason"] == "load" and year() > 2300
    for now in (0, "0", "0s", "0m", 0.0):
        keep("5m")
        answer = keep(now)
        assert (answer["done_reason"], answer["done"], answer["response"]) == ("unload", True, "")
        assert year() > 2300
    unloaded = keep(0, CHAT, messages=[])
    assert unloaded["done_reason"] == "unload"
    assert unloaded["message"] == {"role": "assistant", "content": ""}
    # an answer counts too, by any of the model's names; the last request decides
    said = keep("5m", CHAT, model="tiny:latest", messages=HELLO, options=GREEDY)
    assert said["done_reason"] == "length" and year() < 2300
    assert keep(0, CHAT, messages=HELLO, options=GREEDY)["done_reason"] == "length"
    assert year() > 2300


def test_wishes_of_tenants_are_apart(strict_server: Served) -> None:
    one, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    strict_server.post(CHAT, {"model": "tiny", "keep_alive": "5m"}, **one)
    mine, theirs = (
        strict_server.get("/api/ps", **key).json["models"][0]["expires_at"] for key in (one, other)
    )
    assert mine < "2300" < theirs


def test_formats(client: ollama.Client) -> None:
    class Place(BaseModel):
        city: str
        size: int

    schema = Place.model_json_schema()
    schema["properties"]["city"]["maxLength"] = 6
    schema["properties"]["size"]["maximum"] = 999
    options = {"temperature": 0, "num_predict": 80}
    answer = client.chat(model="tiny", messages=HELLO, format=schema, options=options)
    Place.model_validate_json(answer.message.content or "")
    parts = client.generate(
        model="tiny", prompt="hello", format=schema, options=options, stream=True
    )
    Place.model_validate_json("".join(part.response or "" for part in parts))
    free = client.generate(model="tiny", prompt="a", format="json", options={"num_predict": 5})
    assert (free.response or "").lstrip()[:1] == "{"


def test_tools(caller: ollama.Client, taught_server: Served) -> None:
    greedy = {"temperature": 0}
    first = caller.chat(
        model="tiny",
        messages=[{"role": "user", "content": ONE}],
        tools=OPENAI_TOOLS,
        options=greedy,
    )
    assert first.message.content == SPOKEN and first.done_reason == "stop"
    [call] = first.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    result = {"role": "tool", "content": RESULTS["Paris"], "tool_name": "weather"}
    told: list[Any] = [{"role": "user", "content": ONE}, first.message, result]
    second = caller.chat(model="tiny", messages=told, tools=OPENAI_TOOLS, options=greedy)
    assert second.message.content == DONE and not second.message.tool_calls
    # two calls in a stream, each in one piece; results without names answer them in order
    parts = list(
        caller.chat(
            model="tiny",
            messages=[{"role": "user", "content": TWO}],
            tools=OPENAI_TOOLS,
            options=greedy,
            stream=True,
        )
    )
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [dict(call.function.arguments) for call in calls] == [
        {"city": "Paris"},
        {"city": "Rome"},
    ]
    results = [{"role": "tool", "content": RESULTS[city]} for city in ("Paris", "Rome")]
    turns: list[Any] = [
        {"role": "user", "content": TWO},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
    ]
    third = caller.chat(model="tiny", messages=turns, tools=OPENAI_TOOLS, options=greedy)
    assert third.message.content == BOTH
    talk = [{"role": "user", "content": TALK}]
    parts = list(
        caller.chat(model="tiny", messages=talk, tools=OPENAI_TOOLS, options=greedy, stream=True)
    )
    assert "".join(part.message.content or "" for part in parts) == GREETING
    # an answer that ends inside of a call says what was written
    body = {"model": "tiny", "messages": turns[:1], "tools": OPENAI_TOOLS, "stream": False}
    cut = taught_server.post(CHAT, body | {"options": {"temperature": 0, "num_predict": 14}}).json
    assert cut["done_reason"] == "length" and "tool_calls" not in cut["message"]


def test_thoughts(thinker: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 8}
    thought = thinker.chat(model="tiny", messages=HELLO, options=options, think=True)
    assert thought.message.thinking and not thought.message.content
    parts = list(thinker.chat(model="tiny", messages=HELLO, options=options, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == thought.message.thinking
    plain = thinker.chat(model="tiny", messages=HELLO, options=options, think=False)
    assert plain.message.content and not plain.message.thinking
    one = thinker.generate(model="tiny", prompt="hello there", options=options, think="high")
    assert one.thinking == thought.message.thinking and one.response == ""
    assert "thinking" in (thinker.show("tiny").capabilities or ())


LONG_TURNS = [{"role": "user", "content": f"{n} " + "word " * 100} for n in range(12)]


def test_the_oldest_turns_are_left_out(client: ollama.Client, server: Served) -> None:
    kept = client.chat(model="tiny", messages=LONG_TURNS, options=GREEDY)
    assert 100 < (kept.prompt_eval_count or 0) < 1024
    body = {"model": "tiny", "messages": LONG_TURNS, "options": GREEDY, "truncate": False}
    reply = server.post(CHAT, body)
    assert reply.status == 400 and "1024" in reply.json["error"]
    # one turn that is too long alone
    alone = [{"role": "user", "content": "word " * 2000}]
    assert server.post(CHAT, {"model": "tiny", "messages": alone}).status == 400


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"model": "nobody", "messages": HELLO}, 404, "not found"),
    (CHAT, {"messages": HELLO}, 400, "model: is required"),
    (CHAT, {"model": "tiny", "messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "images": ["aGk="]}]}, 400, "images"),
    (CHAT, {"model": "tiny", "messages": [{"role": "tool", "content": "x"}]}, 400, "no call"),
    (CHAT, {"model": "tiny", "messages": HELLO, "options": {"num_ctx": "big"}}, 400, "num_ctx"),
    (CHAT, {"model": "tiny", "messages": HELLO, "options": {"num_gpu": "all"}}, 400, "num_gpu"),
    (CHAT, {"model": "tiny", "messages": HELLO, "options": {"use_mmap": 1}}, 400, "use_mmap"),
    (CHAT, {"model": "tiny", "messages": HELLO, "options": {"stop": [1]}}, 400, "stop"),
    (CHAT, {"model": "tiny", "messages": HELLO, "options": [1]}, 400, "options"),
    (CHAT, {"model": "tiny", "messages": HELLO, "mirostat": 2}, 400, "mirostat"),
    (CHAT, {"model": "tiny", "messages": HELLO, "options": {"top_p": 3}}, 400, "top_p"),
    (CHAT, {"model": "tiny", "messages": HELLO, "think": True}, 400, "does not support thinking"),
    (CHAT, {"model": "tiny", "messages": HELLO, "keep_alive": "soon"}, 400, "keep_alive"),
    (CHAT, {"model": "tiny", "messages": HELLO, "format": {"type": 5}}, 400, "schema"),
    (CHAT, {"model": "tiny", "messages": HELLO, "format": "yaml"}, 400, "format"),
    (CHAT, {"model": "tiny", "messages": [], "keep_alive": True}, 400, "keep_alive"),
    (CHAT, {"model": "nobody", "messages": [], "keep_alive": 0}, 404, "not found"),
    ("/api/embed", {"model": "tiny", "input": "x", "keep_alive": "soon"}, 400, "keep_alive"),
    # fields of other APIs, and of other places, that would change the answer
    (CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 5}, 400, "options.num_predict"),
    (CHAT, {"model": "tiny", "messages": HELLO, "temperature": 0}, 400, "options.temperature"),
    (CHAT, {"model": "tiny", "messages": HELLO, "stop": ["x"]}, 400, "options.stop"),
    (CHAT, {"model": "tiny", "messages": HELLO, "response_format": {"x": 1}}, 400, "use format"),
    (CHAT, {"model": "tiny", "messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"model": "tiny", "messages": HELLO, "n": 2}, 400, "one answer"),
    (CHAT, {"model": "tiny", "messages": HELLO, "raw": True}, 400, "/api/generate"),
    (GENERATE, {"model": "tiny", "prompt": "x", "tools": [{"type": "x"}]}, 400, "/api/chat"),
    (GENERATE, {"model": "tiny", "prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
    (GENERATE, {"model": "tiny", "prompt": "x", "suffix": "y"}, 400, "gaps"),
    (GENERATE, {"model": "tiny", "prompt": "x", "raw": True, "system": "y"}, 400, "raw mode"),
    (GENERATE, {"model": "tiny", "prompt": "x", "context": [99999]}, 400, "99999"),
    ("/api/show", {}, 400, "model: is required"),
    ("/api/show", {"model": "nobody"}, 404, "not found"),
    ("/api/embed", {"model": "tiny", "input": "x"}, 400, "no encoder"),
    (GENERATE, {"model": "tiny", "prompt": "x", "images": ["aGk="]}, 400, "images"),
    (GENERATE, {"model": "tiny", "prompt": "x", "width": 64}, 400, "width"),
    ("/api/push", {"model": "tiny"}, 400, "publish"),
    ("/api/create", {"model": "new", "from": "tiny"}, 400, "settings"),
    ("/api/create", {"model": "new", "from": "tiny", "quantize": "q4_K_M"}, 400, "quantize"),
    ("/api/create", {"name": "new", "quantization": "q4_0"}, 400, "stored bits"),
    ("/api/pull", {"model": "tiny"}, 404, "no route"),
    ("/api/copy", {"source": "tiny", "destination": "new"}, 404, "no route"),
    ("/api/tags", {}, 405, "takes GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals(
    server: Served, path: str, body: dict[str, Any], status: int, words: str, stream: bool
) -> None:
    reply = server.post(path, body | {"stream": stream})
    assert reply.status == status, reply.body
    assert list(reply.json) == ["error"] and words in reply.json["error"], reply.body
    assert reply.headers["content-type"] == "application/json"


def test_errors_of_the_package(client: ollama.Client, strict_server: Served) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="nobody", messages=HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as caught:
        list(client.chat(model="nobody", messages=HELLO, stream=True))
    assert caught.value.status_code == 404 and "not found" in caught.value.error
    locked = strict_server.post(CHAT, {"model": "tiny", "messages": HELLO})
    assert locked.status == 401 and list(locked.json) == ["error"]
    assert strict_server.get("/api/tags").status == 401


def test_open_webui(server: Served) -> None:
    """The calls that its backend makes: the connection's check, the lists, a chat as it builds it
    from a form with advanced parameters, and a title for it."""
    headers = {"content_type": "application/json", "user_agent": "Open WebUI"}
    assert server.get("/api/version", **headers).json["version"]
    [model] = server.get("/api/tags", **headers).json["models"]
    assert server.get("/api/ps", **headers).json["models"][0]["model"] == model["model"]
    assert server.post("/api/show", {"name": model["model"]}, **headers).status == 200
    turn = {
        "model": model["model"],
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello there", "images": []},
        ],
        "stream": True,
        "options": {"temperature": 0, "top_k": 40, "top_p": 0.9, "seed": 42, "num_predict": 8},
        "keep_alive": "5m",
        "metadata": {"chat_id": "x"},
    }
    *parts, last = lines(server.post(CHAT, turn, **headers).body)
    text = "".join(part["message"]["content"] for part in parts)
    assert text and last["done"] and last["eval_count"] == 8
    speed = last["eval_count"] / (last["eval_duration"] / 1e9)
    assert speed > 0
    title = {
        "model": model["model"],
        "messages": [{"role": "user", "content": "A title, please"}],
        "stream": False,
        "num_predict": 5,
        "metadata": {"task": "title_generation"},
    }
    made = server.post(CHAT, title, **headers).json
    assert made["message"]["content"] and made["eval_count"] == 5
