"""openai: OPENAI_BASE_URL and OPENAI_API_KEY, or the constructor's arguments."""

from __future__ import annotations

import json
from typing import Any

import openai
from tried import MODEL, QUESTION, TOO_LONG, URL, WEATHER, raised, spoken, tried

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
user: list[Any] = [{"role": "user", "content": QUESTION}]
asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}


@tried("models")
def _() -> str:
    names = [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL and MODEL in names
    return ", ".join(names)


@tried("plain")
def _() -> str:
    answer = client.chat.completions.create(messages=user, **asked)
    assert answer.usage and answer.usage.total_tokens > answer.usage.prompt_tokens > 0
    return spoken(answer.choices[0].message.content)


@tried("stream")
def _() -> str:
    with client.chat.completions.stream(
        messages=user, stream_options={"include_usage": True}, **asked
    ) as events:
        answer = events.get_final_completion()
    assert answer.usage and answer.usage.completion_tokens > 0
    return spoken(answer.choices[0].message.content)


@tried("tool round trip")
def _() -> str:
    described = {"name": "weather", "description": "The weather", "parameters": WEATHER}
    tools: list[Any] = [{"type": "function", "function": described}]
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    call_of: dict[str, Any] = {**asked, "max_tokens": 60, "tools": tools}
    first = client.chat.completions.create(messages=user, tool_choice=forced, **call_of).choices[0]
    calls = first.message.tool_calls or []
    assert len(calls) == 1, f"{len(calls)} calls"
    city = json.loads(calls[0].function.arguments)["city"]
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}
    told = [*user, first.message.to_dict(exclude_none=True), result]
    second = client.chat.completions.create(
        messages=told, tool_choice="none", tools=tools, **asked
    ).choices[0]
    return f"weather({city}), {spoken(second.message.content)}"


@tried("schema")
def _() -> str:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "place", "strict": True, "schema": WEATHER},
    }
    wanted = {**asked, "max_tokens": 60}
    answer = client.chat.completions.create(messages=user, response_format=form, **wanted)
    return str(json.loads(answer.choices[0].message.content or "")["city"])


@tried("response")
def _() -> str:
    first = client.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=12, temperature=0
    )
    with client.responses.stream(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0
    ) as events:
        second = events.get_final_response()
    client.responses.delete(first.id)
    assert second.usage and first.usage
    assert second.usage.input_tokens > first.usage.total_tokens
    return f"{spoken(first.output_text)}, {spoken(second.output_text)[:40]}"


@tried("unknown model")
def _() -> str:
    error = raised(
        openai.NotFoundError,
        lambda: client.chat.completions.create(messages=user, **{**asked, "model": "nobody"}),
    )
    assert error.code == "model_not_found"
    return str(error.code)


@tried("too long")
def _() -> str:
    long: list[Any] = [{"role": "user", "content": TOO_LONG}]
    error = raised(
        openai.BadRequestError, lambda: client.chat.completions.create(messages=long, **asked)
    )
    assert error.code == "context_length_exceeded"
    return str(error.code)
