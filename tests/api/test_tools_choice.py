"""Which tools are called, what is refused, and formats of answers, on both vendors' APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from coterie.api.anthropic.parse import tool_set_of
from coterie.api.anthropic.types import MessagesBody
from tests.helpers.serving.server_process import KEYS, Served, chat

CHAT, TEXT, MESSAGES, COUNT = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"$ref": "#/$defs/note"},
    },
    "required": ["city", "days"],
    "$defs": {"note": {"type": "object", "properties": {"text": {"const": "dry"}}}},
}
NAMES = ("weather", "trip")


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [function(name) for name in NAMES]
CLAUDE_TOOLS = [{"name": name, "input_schema": SCHEMA} for name in NAMES]


@pytest.fixture
def client(taught_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{taught_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(item["function"]["name"], json.loads(item["function"]["arguments"])) for item in calls]


FORCED: list[tuple[Any, set[str]]] = [
    ("required", {"weather", "trip"}),
    (named("trip"), {"trip"}),
    (
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [named("weather")]},
        },
        {"weather"},
    ),
]


@pytest.mark.parametrize(("choice", "names"), FORCED)
def test_openai_is_held_to_its_choice(taught_server: Served, choice: Any, names: set[str]) -> None:
    """At temperature 2 a random model still calls nothing else, with arguments that fit."""
    body = chat(tools=TOOLS, tool_choice=choice, temperature=2, seed=3, max_tokens=300, n=4)
    answer = taught_server.post(CHAT, body).json
    ids = []
    for found in answer["choices"]:
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None
        assert called(found)
        for name, arguments in called(found):
            assert name in names
            jsonschema.validate(arguments, SCHEMA)
            assert set(arguments) <= set(SCHEMA["properties"])
        ids += [item["id"] for item in found["message"]["tool_calls"]]
    assert len(ids) == len(set(ids))


def test_one_call_where_parallel_ones_are_off(taught_server: Served) -> None:
    body = chat(tools=TOOLS, tool_choice="required", max_tokens=300, temperature=2, n=4, seed=1)
    off = taught_server.post(CHAT, body | {"parallel_tool_calls": False}).json
    assert [len(called(found)) for found in off["choices"]] == [1] * 4
    given = {"type": "any", "disable_parallel_tool_use": True}
    for seed in range(3):
        ask = chat(tools=CLAUDE_TOOLS, tool_choice=given, temperature=1, seed=seed, max_tokens=300)
        answer = taught_server.post(MESSAGES, ask).json
        assert [block["type"] for block in answer["content"]] == ["tool_use"]
        assert answer["stop_reason"] == "tool_use"
        jsonschema.validate(answer["content"][0]["input"], SCHEMA)


@pytest.mark.parametrize("choice", ["required", named("trip")], ids=["required", "named"])
def test_a_forced_call_is_one_call(taught_server: Served, choice: Any) -> None:
    """More only where they are asked for: two equal calls were what a small model made of it."""
    body = chat(tools=TOOLS, tool_choice=choice, max_tokens=300, temperature=2, n=4, seed=1)
    once = taught_server.post(CHAT, body).json
    assert [len(called(found)) for found in once["choices"]] == [1] * 4
    often = taught_server.post(CHAT, body | {"parallel_tool_calls": True}).json
    assert max(len(called(found)) for found in often["choices"]) > 1
    kind = {"type": "any"} if choice == "required" else {"type": "tool", "name": "trip"}
    ask = chat(tools=CLAUDE_TOOLS, tool_choice=kind, temperature=1, seed=1, max_tokens=300)
    answer = taught_server.post(MESSAGES, ask).json
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    wanted = {"type": "any", "disable_parallel_tool_use": False}
    found = tool_set_of(MessagesBody.model_validate(ask | {"tool_choice": wanted}))
    assert found is not None and found.parallel


def test_anthropic_names_one_tool(taught_server: Served) -> None:
    given = {"type": "tool", "name": "trip"}
    answer = taught_server.post(
        MESSAGES, chat(tools=CLAUDE_TOOLS, tool_choice=given, max_tokens=300)
    ).json
    assert {block["name"] for block in answer["content"]} == {"trip"}


def test_none_means_no_tools(taught_server: Served) -> None:
    """Neither the grammar nor the prompt knows of them."""
    plain = taught_server.post(CHAT, chat()).json
    for body in (chat(tools=TOOLS, tool_choice="none"), chat(tools=[]), chat(tool_choice="auto")):
        answer = taught_server.post(CHAT, body).json
        assert answer["choices"] == plain["choices"]
        assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    claude = taught_server.post(
        MESSAGES, chat(tools=CLAUDE_TOOLS, tool_choice={"type": "none"})
    ).json
    assert claude["content"] == [
        {"type": "text", "text": plain["choices"][0]["message"]["content"]}
    ]


def test_tools_are_counted(taught_server: Served) -> None:
    free = taught_server.post(COUNT, chat()).json["input_tokens"]
    body = chat(tools=CLAUDE_TOOLS)
    told = taught_server.post(COUNT, body).json["input_tokens"]
    usage = taught_server.post(MESSAGES, body | {"max_tokens": 1}).json["usage"]
    assert told > free + 10
    assert told == usage["input_tokens"] + usage["cache_read_input_tokens"]
    none = taught_server.post(COUNT, body | {"tool_choice": {"type": "none"}}).json["input_tokens"]
    assert none == free


def test_a_pydantic_tool_is_parsed(client: openai.OpenAI) -> None:
    class Trip(BaseModel):
        city: Literal["Paris", "Rome"]
        nights: int
        far: bool

    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "Go"}],
        tools=[openai.pydantic_function_tool(Trip)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Trip)


def test_formats_of_answers(taught_server: Served, client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        city: Literal["Paris", "Rome"]
        sure: bool

    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}]}
    parsed = client.chat.completions.parse(**asked, response_format=Answer, max_tokens=100)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 60, "temperature": 1, "seed": 5}
    texts = taught_server.post(TEXT, body | {"response_format": {"type": "json_object"}}).json[
        "choices"
    ]
    assert [type(json.loads(choice["text"])) for choice in texts] == [dict, dict]
    with anthropic.Anthropic(base_url=taught_server.url, api_key="none", max_retries=0) as claude:
        given = {"type": "json_schema", "schema": Answer.model_json_schema()}
        for extra in ({"output_config": {"format": given}}, {"output_format": given}):
            answer = claude.messages.create(**asked, max_tokens=100, extra_body=extra)
            Answer.model_validate_json(answer.content[0].text)
        found = claude.messages.parse(**asked, max_tokens=100, output_format=Answer)
        assert isinstance(found.parsed_output, Answer)


def test_a_format_beside_tools(taught_server: Served) -> None:
    """An answer that calls nothing keeps to the format; a forced call needs none."""
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for seed in range(3):
        body = chat(tools=TOOLS, response_format=given, max_tokens=300, temperature=1, seed=seed)
        [found] = taught_server.post(CHAT, body).json["choices"]
        if called(found):
            jsonschema.validate(called(found)[0][1], SCHEMA)
        else:
            jsonschema.validate(json.loads(found["message"]["content"]), SCHEMA)
    [forced] = taught_server.post(CHAT, body | {"tool_choice": named("trip")}).json["choices"]
    assert called(forced)[0][0] == "trip"


def test_a_thinking_model_is_held_behind_its_thought(strict_server: Served) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    # its template opens a thought, in which anything may be said
    body = chat(max_tokens=40, temperature=1.5, seed=2, response_format={"type": "json_object"})
    [open_] = strict_server.post(CHAT, body, **key).json["choices"]
    assert open_["message"]["reasoning_content"]
    # it is ended in time for an answer
    assert json.loads(open_["message"]["content"]) == {} and open_["finish_reason"] == "length"
    quiet = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 300}
    closed = strict_server.post(CHAT, body | quiet, **key).json["choices"][0]["message"]
    assert isinstance(json.loads(closed["content"]), dict)
    del body["response_format"]
    given = {"tools": TOOLS, "tool_choice": "required"}
    [found] = strict_server.post(CHAT, body | quiet | given, **key).json["choices"]
    assert called(found) and found["message"]["content"] is None
    claude = chat(max_tokens=300, tools=CLAUDE_TOOLS, tool_choice={"type": "any"})
    blocks = strict_server.post(MESSAGES, claude, **key).json["content"]
    assert {block["type"] for block in blocks} == {"tool_use"}


def bad(name: str, **fields: Any) -> dict[str, Any]:
    return chat(tools=[function("fine"), function(name, **fields)])


WRONG: list[tuple[Any, str | None]] = [
    (bad("two words"), "tools.1.function.name"),
    (bad("x" * 65), "tools.1.function.name"),
    (bad("fine"), "tools.1"),
    (bad("f", parameters={"type": "array"}), "tools.1.function.parameters"),
    (bad("f", parameters=[]), "tools.1.function.parameters"),
    (bad("f", parameters={"properties": []}), "tools.1.function.parameters"),
    (bad("f", parameters={"properties": {"a": {"type": "objekt"}}}), "tools.1"),
    (bad("f", parameters={"properties": {"a": {"$ref": "#/$defs/no"}}}), "tools.1"),
    (
        bad("f", strict=True, parameters={"properties": {"a": {"not": {"type": "string"}}}}),
        "tools.1",
    ),
    (bad("f", parameters={"description": "x" * 70_000}), "tools.1.function.parameters"),
    (chat(tools=[function(f"f{i}") for i in range(129)]), "tools"),
    (
        chat(tools=[function(f"f{i}", description="x" * 60_000) for i in range(10)]),
        "tools",
    ),
    (chat(tools=TOOLS, tool_choice=named("nobody")), "tool_choice"),
    (chat(tools=TOOLS, tool_choice={"type": "custom"}), "tool_choice"),
    (chat(tools=TOOLS, tool_choice="sometimes"), "tool_choice"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=TOOLS, tool_choice="required", use_beam_search=True, n=2), None),
    (chat(messages=[{"role": "tool", "content": "5"}]), "messages.0.tool_call_id"),
    (
        chat(
            messages=[{"role": "user", "content": "a", "tool_calls": [{"id": "x", "function": {}}]}]
        ),
        "messages.0.tool_calls.0.function.name",
    ),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_openai_refuses(taught_server: Served, body: Any, param: str | None) -> None:
    for stream in (False, True):
        reply = taught_server.post(CHAT, body | {"stream": stream})
        assert reply.status == 400, reply.body[:300]
        error = reply.json["error"]
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param, error


USE = {"type": "tool_use", "id": "t1", "name": "trip", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: is required"),
        ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, "no tools of its own"),
        ({"tools": [*CLAUDE_TOOLS, CLAUDE_TOOLS[0]]}, "two tools named 'weather'"),
        ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no tool is named"),
        ({"tool_choice": {"type": "any"}}, "no tools to choose"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "answers no call before it"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "not in a turn of the user"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_anthropic_refuses(taught_server: Served, fields: dict[str, Any], message: str) -> None:
    reply = taught_server.post(MESSAGES, chat() | fields)
    assert reply.status == 400
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert message in reply.json["error"]["message"]


def test_results_come_back_in_many_shapes(taught_server: Served) -> None:
    """Errors, empty results, words beside results, and turns of one role side by side."""
    turns = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}, USE]},
        {"role": "assistant", "content": [USE | {"id": "t2"}]},
        {
            "role": "user",
            "content": [
                RESULT | {"is_error": True},
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    body = chat(messages=turns, tools=CLAUDE_TOOLS)
    answer = taught_server.post(MESSAGES, body)
    assert answer.status == 200, answer.body
    count = taught_server.post(COUNT, body).json["input_tokens"]
    quiet = json.loads(json.dumps(body))
    del quiet["messages"][3]["content"][0]["is_error"]
    assert taught_server.post(COUNT, quiet).json["input_tokens"] < count
