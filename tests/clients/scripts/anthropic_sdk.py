"""anthropic: ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, or the constructor's arguments."""

from __future__ import annotations

from typing import Any

import anthropic
from tried import MODEL, QUESTION, TOO_LONG, URL, WEATHER, raised, spoken, tried

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
user: list[Any] = [{"role": "user", "content": QUESTION}]
asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}}


@tried("models")
def _() -> str:
    names = [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL and MODEL in names
    return ", ".join(names)


@tried("plain")
def _() -> str:
    answer: Any = client.messages.create(messages=user, **asked)
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
    return spoken(answer.content[0].text)


@tried("stream")
def _() -> str:
    with client.messages.stream(messages=user, **asked) as events:
        text = "".join(events.text_stream)
        answer: Any = events.get_final_message()
    assert answer.content[0].text == text and answer.usage.output_tokens > 0
    return spoken(text)


@tried("tool round trip")
def _() -> str:
    tools: list[Any] = [{"name": "weather", "description": "The weather", "input_schema": WEATHER}]
    forced: Any = {"type": "tool", "name": "weather"}
    wanted = {**asked, "max_tokens": 60}
    first: Any = client.messages.create(messages=user, tools=tools, tool_choice=forced, **wanted)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert len(calls) == 1 and first.stop_reason == "tool_use", first
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"}
    told: list[Any] = [
        *user,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    none: Any = {"type": "none"}
    second: Any = client.messages.create(messages=told, tools=tools, tool_choice=none, **asked)
    return f"weather({calls[0].input['city']}), {spoken(second.content[0].text)}"


@tried("count_tokens")
def _() -> str:
    count = client.messages.count_tokens(model=MODEL, messages=user).input_tokens
    assert count > 5
    return str(count)


@tried("unknown model")
def _() -> str:
    error = raised(
        anthropic.NotFoundError,
        lambda: client.messages.create(messages=user, **{**asked, "model": "nobody"}),
    )
    return str(error.body["error"]["type"])


@tried("too long")
def _() -> str:
    long: list[Any] = [{"role": "user", "content": TOO_LONG}]
    error = raised(
        anthropic.BadRequestError, lambda: client.messages.create(messages=long, **asked)
    )
    said = str(error.body["error"]["message"])
    assert said.startswith("prompt is too long: "), said
    return said
