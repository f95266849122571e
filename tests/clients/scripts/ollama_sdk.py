"""ollama for Python: OLLAMA_HOST, or the constructor's argument."""

from __future__ import annotations

import json
from typing import Any

import ollama
from tried import MODEL, QUESTION, TOO_LONG, URL, WEATHER, raised, spoken, tried

client = ollama.Client(host=URL)
user: list[Any] = [{"role": "user", "content": QUESTION}]
asked: dict[str, Any] = {"model": MODEL, "options": {"num_predict": 12, "temperature": 0}}


@tried("models")
def _() -> str:
    names = [model.model or "" for model in client.list().models]
    assert f"{MODEL}:latest" in names and client.ps().models
    shown = client.show(MODEL)
    assert shown.capabilities and shown.modelinfo
    return ", ".join(names)


@tried("plain")
def _() -> str:
    answer = client.chat(messages=user, **asked)
    assert answer.eval_count and answer.prompt_eval_count and answer.done_reason
    return spoken(answer.message.content)


@tried("stream")
def _() -> str:
    parts = list(client.chat(messages=user, stream=True, **asked))
    assert parts[-1].done and parts[-1].total_duration
    return spoken("".join(part.message.content or "" for part in parts))


@tried("generate")
def _() -> str:
    first = client.generate(prompt=QUESTION, **asked)
    second = client.generate(prompt="And of Italy?", context=first.context, **asked)
    assert (second.prompt_eval_count or 0) > (first.prompt_eval_count or 0)
    return spoken(second.response)


@tried("schema")
def _() -> str:
    wanted = {**asked, "options": {"num_predict": 60, "temperature": 0}}
    answer = client.chat(messages=user, format=WEATHER, **wanted)
    return str(json.loads(answer.message.content or "")["city"])


@tried("result of a tool")
def _() -> str:
    called = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    told = [
        *user,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    described = {"name": "weather", "description": "The weather", "parameters": WEATHER}
    tools: list[Any] = [{"type": "function", "function": described}]
    answer = client.chat(messages=told, tools=tools, **asked)
    return spoken(answer.message.content or str(answer.message.tool_calls))


@tried("unknown model")
def _() -> str:
    error = raised(
        ollama.ResponseError, lambda: client.chat(messages=user, **{**asked, "model": "nobody"})
    )
    assert error.status_code == 404 and "not found" in error.error
    return str(error.status_code)


@tried("too long")
def _() -> str:
    long: list[Any] = [{"role": "user", "content": TOO_LONG}]
    error = raised(ollama.ResponseError, lambda: client.chat(messages=long, **asked))
    assert error.status_code == 400
    return str(error.error)[:60]
