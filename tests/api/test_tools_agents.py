"""Stock agent loops of both vendors' clients against a real server, in both formats of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.helpers.models.tool_callers import (
    ANTHROPIC_TOOLS,
    BOTH,
    DONE,
    GREETING,
    ONE,
    OPENAI_TOOLS,
    RESULTS,
    SPOKEN,
    TALK,
    TWO,
    taught_checkpoint,
)
from tests.helpers.serving.server_process import Served, frames


@pytest.fixture(scope="module", params=["hermes", pytest.param("llama", marks=pytest.mark.full)])
def taught(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    if request.param == "hermes":
        yield "hermes", request.getfixturevalue("taught_server")
        return
    served = Served(str(taught_checkpoint(request.param)), "--name", "tiny")
    yield request.param, served
    served.stop()


@pytest.fixture
def style(taught: tuple[str, Served]) -> str:
    return taught[0]


@pytest.fixture
def client(taught: tuple[str, Served]) -> Iterator[openai.OpenAI]:
    url = f"{taught[1].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def claude(taught: tuple[str, Served]) -> Iterator[anthropic.Anthropic]:
    url = taught[1].url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as found:
        yield found


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def weather(arguments: str) -> str:
    return RESULTS[json.loads(arguments)["city"]]


def openai_loop(client: openai.OpenAI, question: str, stream: bool) -> tuple[str, list[str]]:
    """The loop of the vendor's guide: call, answer each call, ask again until it is said."""
    messages = user(question)
    called: list[str] = []
    asked: dict[str, Any] = {
        "model": "tiny",
        "tools": OPENAI_TOOLS,
        "temperature": 0,
        "max_tokens": 200,
    }
    for _ in range(4):
        if stream:
            with client.chat.completions.stream(messages=messages, **asked) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(messages=messages, **asked).choices[0]
        message = choice.message
        if choice.finish_reason != "tool_calls":
            return message.content or "", called
        messages.append(message.to_dict(exclude_none=True))
        for call in message.tool_calls or []:
            called.append(call.function.arguments)
            result = weather(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("the loop did not end")


def anthropic_loop(
    claude: anthropic.Anthropic, question: str, stream: bool
) -> tuple[str, list[Any]]:
    messages = user(question)
    called: list[str] = []
    asked: dict[str, Any] = {
        "model": "tiny",
        "tools": ANTHROPIC_TOOLS,
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
    }
    for _ in range(4):
        if stream:
            with claude.messages.stream(messages=messages, **asked) as events:
                answer: Any = events.get_final_message()
        else:
            answer = claude.messages.create(messages=messages, **asked)
        if answer.stop_reason != "tool_use":
            return answer.content[0].text, called
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        called += [block.input for block in uses]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": RESULTS[block.input["city"]]}],
            }
            for block in uses
        ]
        messages.append({"role": "user", "content": results})
    raise AssertionError("the loop did not end")


LOOPS = [(ONE, DONE, ["Paris"]), (TWO, BOTH, ["Paris", "Rome"]), (TALK, GREETING, [])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("question", "answer", "cities"), LOOPS)
def test_openai_loop(
    client: openai.OpenAI, question: str, answer: str, cities: list[str], stream: bool
) -> None:
    said, called = openai_loop(client, question, stream)
    assert said == answer
    assert called == [json.dumps({"city": city}) for city in cities]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("question", "answer", "cities"), LOOPS)
def test_anthropic_loop(
    claude: anthropic.Anthropic, question: str, answer: str, cities: list[str], stream: bool
) -> None:
    said, called = anthropic_loop(claude, question, stream)
    assert said == answer
    assert called == [{"city": city} for city in cities]


def test_anthropic_tool_runner(claude: anthropic.Anthropic) -> None:
    """The client's own loop, with its own tool."""

    @anthropic.beta_tool(name="weather", description="Tells it")
    def tell(city: str) -> str:
        return RESULTS[city]

    runner = claude.beta.messages.tool_runner(
        model="tiny",
        max_tokens=200,
        tools=[tell],
        messages=user(TWO),
        extra_body={"temperature": 0},
    )
    turns = list(runner)
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert [block.input for block in turns[0].content] == [{"city": "Paris"}, {"city": "Rome"}]
    assert turns[1].content[0].text == BOTH


def test_words_before_a_call(
    client: openai.OpenAI, claude: anthropic.Anthropic, style: str
) -> None:
    expected = SPOKEN if style == "hermes" else None
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": user(ONE)}
    choice = client.chat.completions.create(**asked, tools=OPENAI_TOOLS, temperature=0).choices[0]
    assert choice.message.content == expected
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    answer = claude.messages.create(**asked, tools=ANTHROPIC_TOOLS, extra_body={"temperature": 0})
    kinds = [block.type for block in answer.content]
    assert kinds == (["text", "tool_use"] if expected else ["tool_use"])
    if expected:
        assert answer.content[0].text == expected


def test_openai_chunks(taught: tuple[str, Served]) -> None:
    """Ids and names once, arguments piece by piece, by index; n choices stay apart."""
    _, server = taught
    body = {
        "model": "tiny",
        "messages": user(TWO),
        "tools": OPENAI_TOOLS,
        "temperature": 0,
        "max_tokens": 200,
        "stream": True,
        "n": 2,
        "logprobs": True,
        "return_token_ids": True,
    }
    got = frames(server.post("/v1/chat/completions", body).body)
    chunks = [data["choices"][0] for _, data in got if data != "[DONE]" and data["choices"]]
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": None, "refusal": None}
        assert not any(chunk["delta"].get("content") for chunk in own)
        calls = [call for chunk in own for call in chunk["delta"].get("tool_calls", ())]
        named = [call for call in calls if "id" in call]
        assert [call["index"] for call in named] == [0, 1]
        assert [call["function"]["name"] for call in named] == ["weather", "weather"]
        assert named[0]["id"] != named[1]["id"]
        pieces = [[c["function"]["arguments"] for c in calls if c["index"] == i] for i in (0, 1)]
        assert [json.loads("".join(parts)) for parts in pieces] == [
            {"city": "Paris"},
            {"city": "Rome"},
        ]
        assert all(parts[0] == "" for parts in pieces)
        ids = [token for chunk in own for token in chunk.get("token_ids", ())]
        scored = [
            item for chunk in own if chunk["logprobs"] for item in chunk["logprobs"]["content"]
        ]
        assert len(ids) == len(scored) > 20
        assert own[-1]["finish_reason"] == "tool_calls"


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "tools": OPENAI_TOOLS,
        "temperature": 0,
        "max_tokens": 200,
    }
    for question in (ONE, TWO, TALK):
        whole = client.chat.completions.create(messages=user(question), **asked).choices[0]
        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(messages=user(question), stream=True, **asked):
            state.handle_chunk(chunk)
        built = state.get_final_completion().choices[0]
        assert built.finish_reason == whole.finish_reason
        assert built.message.content == whole.message.content
        calls = [
            [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            for message in (built.message, whole.message)
        ]
        assert calls[0] == calls[1]


def test_anthropic_events(taught: tuple[str, Served]) -> None:
    style, server = taught
    body = {
        "model": "tiny",
        "messages": user(ONE),
        "tools": ANTHROPIC_TOOLS,
        "temperature": 0,
        "max_tokens": 200,
        "stream": True,
    }
    events = [data for _, data in frames(server.post("/v1/messages", body).body)]
    starts = [data for data in events if data["type"] == "content_block_start"]
    assert [data["index"] for data in starts] == list(range(len(starts)))
    assert len(starts) == (2 if style == "hermes" else 1)
    block = starts[-1]["content_block"]
    assert block["type"] == "tool_use" and block["name"] == "weather" and block["input"] == {}
    assert block["id"].startswith("toolu_")
    deltas = [data["delta"] for data in events if data["type"] == "content_block_delta"]
    parts = [item["partial_json"] for item in deltas if item["type"] == "input_json_delta"]
    assert json.loads("".join(parts)) == {"city": "Paris"}
    last = next(data for data in events if data["type"] == "message_delta")
    assert last["delta"]["stop_reason"] == "tool_use"
    assert events[-1]["type"] == "message_stop"


def test_a_call_is_whole_or_is_none(
    client: openai.OpenAI, claude: anthropic.Anthropic, style: str
) -> None:
    """However few tokens there are, no part of a call gets into the words."""
    asked: dict[str, Any] = {"model": "tiny", "messages": user(TWO)}
    given: dict[str, Any] = {"tools": OPENAI_TOOLS, "temperature": 0}
    full = client.chat.completions.create(**asked, **given, max_tokens=200)
    seen = set()
    for size in range(1, full.usage.completion_tokens, 9):
        choice = client.chat.completions.create(**asked, **given, max_tokens=size).choices[0]
        message = choice.message
        called = [json.loads(call.function.arguments) for call in message.tool_calls or ()]
        seen.add((choice.finish_reason, len(called)))
        assert len(message.content or "") < 22 and "tool_" not in (message.content or "")
        for city, call in zip(RESULTS, called, strict=False):
            # a call is brought to its end in the tokens that are left, and told as cut
            assert call == {"city": city} or (
                choice.finish_reason == "length" and city.startswith(call["city"])
            )
    assert (
        {("length", 0), ("tool_calls", 1)}
        <= seen
        <= {("length", 0), ("tool_calls", 1), ("length", 2)}
    )
    cut = claude.messages.create(
        **asked, tools=ANTHROPIC_TOOLS, max_tokens=20, extra_body={"temperature": 0}
    )
    assert cut.stop_reason == "max_tokens" and cut.content[0].type == "text"


def test_auto_leaves_words_alone(taught: tuple[str, Served]) -> None:
    """Any words are as likely with the grammar of tools as without: the same tokens come out."""
    _, server = taught
    seen = 0
    for seed in range(6):
        body = {
            "model": "tiny",
            "messages": user("zebra"),
            "tools": OPENAI_TOOLS,
            "temperature": 1.9,
            "seed": seed,
            "max_tokens": 40,
            "return_token_ids": True,
        }
        answer = server.post("/v1/chat/completions", body).json
        [choice] = answer["choices"]
        if choice["message"].get("tool_calls"):
            continue
        seen += 1
        free = {key: body[key] for key in ("model", "temperature", "seed", "max_tokens")}
        free |= {"prompt": answer["prompt_token_ids"], "return_token_ids": True}
        [plain] = server.post("/v1/completions", free).json["choices"]
        assert choice["token_ids"] == plain["token_ids"]
        assert choice["message"]["content"] == plain["text"]
    assert seen > 2
