"""langchain: ChatOpenAI(base_url=URL/v1), ChatAnthropic(base_url=URL)."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tried import MODEL, QUESTION, TOO_LONG, URL, raised, spoken, tried


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def try_side(side: str, chat: Any, errors: Any, **settings: Any) -> None:
    model = chat(model=MODEL, max_tokens=12, temperature=0, **settings)

    @tried(f"plain ({side})")
    def _() -> str:
        answer = model.invoke(QUESTION)
        assert answer.usage_metadata["output_tokens"] > 0
        return spoken(answer.text if isinstance(answer.text, str) else answer.text())

    @tried(f"stream ({side})")
    def _() -> str:
        whole: Any = None
        for chunk in model.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        return spoken(whole.text if isinstance(whole.text, str) else whole.text())

    @tried(f"tool round trip ({side})")
    def _() -> str:
        user = HumanMessage(QUESTION)
        roomy = chat(model=MODEL, max_tokens=90, temperature=0, **settings)
        first = roomy.bind_tools([weather], tool_choice="weather").invoke([user])
        assert len(first.tool_calls) == 1, first.tool_calls
        call = first.tool_calls[0]
        result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
        second = model.invoke([user, first, result])
        assert second.usage_metadata["output_tokens"] > 0
        return f"weather({call['args']['city'][:20]}), {str(second.content)[:40]}"

    @tried(f"unknown model ({side})")
    def _() -> str:
        unknown = chat(model="nobody", max_tokens=12, temperature=0, **settings)
        return type(raised(errors.NotFoundError, lambda: unknown.invoke(QUESTION))).__name__

    @tried(f"too long ({side})")
    def _() -> str:
        return type(raised(errors.BadRequestError, lambda: model.invoke(TOO_LONG))).__name__


try_side("openai", ChatOpenAI, openai, base_url=f"{URL}/v1", api_key="none", max_retries=0)
try_side("anthropic", ChatAnthropic, anthropic, base_url=URL, api_key="none", max_retries=0)
