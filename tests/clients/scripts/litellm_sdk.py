"""litellm: `openai/MODEL` with api_base URL/v1, `anthropic/MODEL` with api_base URL."""

from __future__ import annotations

import json
from typing import Any

import litellm
from tried import MODEL, QUESTION, TOO_LONG, URL, WEATHER, raised, spoken, tried

user = [{"role": "user", "content": QUESTION}]
tools = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather", "parameters": WEATHER},
    }
]
forced = {"type": "function", "function": {"name": "weather"}}


def try_side(side: str, base: str) -> None:
    asked: dict[str, Any] = {
        "model": f"{side}/{MODEL}",
        "api_base": base,
        "api_key": "none",
        "max_tokens": 12,
        "temperature": 0,
        "num_retries": 0,
    }

    @tried(f"plain ({side})")
    def _() -> str:
        answer: Any = litellm.completion(messages=user, **asked)
        assert answer.usage.completion_tokens > 0
        return spoken(answer.choices[0].message.content)

    @tried(f"stream ({side})")
    def _() -> str:
        chunks = list(litellm.completion(messages=user, stream=True, **asked))
        answer: Any = litellm.stream_chunk_builder(chunks, messages=user)
        return spoken(answer.choices[0].message.content)

    @tried(f"tool round trip ({side})")
    def _() -> str:
        wanted = {**asked, "max_tokens": 60}
        first: Any = litellm.completion(messages=user, tools=tools, tool_choice=forced, **wanted)
        message = first.choices[0].message
        calls = message.tool_calls or []
        assert len(calls) == 1, f"{len(calls)} calls"
        city = json.loads(calls[0].function.arguments)["city"]
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}
        told = [*user, message.model_dump(exclude_none=True), result]
        second: Any = litellm.completion(messages=told, tools=tools, tool_choice="none", **asked)
        return f"weather({city}), {spoken(second.choices[0].message.content)}"

    @tried(f"unknown model ({side})")
    def _() -> str:
        unknown = {**asked, "model": f"{side}/nobody"}
        error = raised(litellm.NotFoundError, lambda: litellm.completion(messages=user, **unknown))
        return type(error).__name__

    @tried(f"too long ({side})")
    def _() -> str:
        long = [{"role": "user", "content": TOO_LONG}]
        error = raised(
            litellm.ContextWindowExceededError,
            lambda: litellm.completion(messages=long, **asked),
        )
        return type(error).__name__


@tried("responses")
def _() -> str:
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    answer: Any = litellm.responses(input=QUESTION, max_output_tokens=12, temperature=0, **asked)
    assert answer.usage.output_tokens > 0
    return spoken(answer.output[0].content[0].text)


@tried("messages through the bridge")
def _() -> str:
    """Anthropic's API in front, which litellm answers with OpenAI's Responses API behind it."""
    answer: Any = litellm.anthropic.messages.create(
        model=f"openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="none",
        messages=user,
        max_tokens=12,
        temperature=0,
    )
    return spoken(answer["content"][0]["text"])


try_side("openai", f"{URL}/v1")
try_side("anthropic", URL)
