"""openai-agents: `OpenAIResponsesModel` with a client of its own; its default API is Responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import openai
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel
from tried import LONG_MODEL, LONG_URL, MODEL, QUESTION, SENTENCE, TOO_LONG, URL, raised, spoken
from tried import tried as tried_here

set_tracing_disabled(True)


def model(name: str = MODEL, url: str = URL) -> OpenAIResponsesModel:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return OpenAIResponsesModel(model=name, openai_client=client)


def agent(most: int = 12, **fields: Any) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=most, **fields.pop("settings", {}))
    kept = {"model": model(), "instructions": "You answer briefly."} | fields
    return Agent(name="one", model_settings=settings, **kept)


def done(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@tried_here("plain")
def _() -> str:
    answer = done(Runner.run(agent(), QUESTION))
    assert answer.raw_responses[0].usage.output_tokens > 0
    return spoken(answer.final_output)


@tried_here("stream")
def _() -> str:
    async def streamed() -> tuple[str, str]:
        running = Runner.run_streamed(agent(), QUESTION)
        texts = [
            event.data.delta
            async for event in running.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return "".join(texts), running.final_output

    text, final = done(streamed())
    assert text == final
    return spoken(final)


@tried_here("tool round trip")
def _() -> str:
    called: list[str] = []

    @function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        called.append(city)
        return "sunny"

    told = agent(
        60, tools=[weather], settings={"tool_choice": "required"}, tool_use_behavior="run_llm_again"
    )
    answer = done(Runner.run(told, QUESTION, max_turns=3))
    assert called, "no call"
    return f"weather({called[0]}), {spoken(answer.final_output)[:40]}"


class Place(BaseModel):
    city: str


@tried_here("output type")
def _() -> str:
    typed = agent(60, output_type=AgentOutputSchema(Place))
    place = done(Runner.run(typed, QUESTION)).final_output
    assert isinstance(place, Place)
    return place.city


@tried_here("conversation by previous_response_id")
def _() -> str:
    async def two_turns() -> Any:
        first = await Runner.run(agent(), QUESTION)
        return await Runner.run(
            agent(), "And of Italy?", previous_response_id=first.last_response_id
        )

    answer = done(two_turns())
    assert answer.raw_responses[0].usage.input_tokens > 40
    return spoken(answer.final_output)


@tried_here("a handoff")
def _() -> str:
    second = Agent(name="second", model=model(LONG_MODEL, LONG_URL), instructions="Say it.")
    first = agent(60, handoffs=[second], settings={"tool_choice": "required"})
    answer = done(Runner.run(first, QUESTION, max_turns=3))
    assert answer.last_agent.name == "second" and answer.final_output == SENTENCE
    return str(answer.final_output)


@tried_here("unknown model")
def _() -> str:
    lost = agent(model=model("nobody"))
    error = raised(openai.NotFoundError, lambda: done(Runner.run(lost, QUESTION)))
    return str(error.code)


@tried_here("too long")
def _() -> str:
    error = raised(openai.BadRequestError, lambda: done(Runner.run(agent(), TOO_LONG)))
    assert error.code == "context_length_exceeded"
    return str(error.code)
