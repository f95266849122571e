"""The official openai client's Responses API, unmodified, against the real server process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

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
    WEATHER,
)
from tests.helpers.serving.response_events import (
    BEGIN,
    MESSAGE,
    MESSAGE_END,
    checked_events,
    checked_response,
    kinds_of,
)
from tests.helpers.serving.server_process import KEYS, Served

ASK: dict[str, Any] = {"model": "tiny", "input": "hello there", "temperature": 0}
TOOLS: list[Any] = [{"type": "function", "strict": False, **WEATHER}]
PATH = "/v1/responses"
# a list in a list: more than a caller's JSON may have there, less than a body may
DEEP: Any = json.loads("[" * 150 + "]" * 150)


@pytest.fixture(scope="module")
def thinker(strict_server: Served) -> Iterator[openai.OpenAI]:
    url = f"{strict_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS[1], max_retries=4) as made:
        yield made


def test_a_response(server: Served) -> None:
    reply = server.post(PATH, ASK | {"max_output_tokens": 8, "metadata": {"of": "test"}})
    response = checked_response(reply)
    assert response.id.startswith("resp_") and response.object == "response"
    assert (response.model, response.status) == ("tiny", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert response.output_text and response.metadata == {"of": "test"}
    usage = response.usage
    assert usage is not None and usage.output_tokens == 8
    assert usage.total_tokens == usage.input_tokens + 8
    assert (response.temperature, response.top_p, response.store) == (0, 1, True)
    # the receipt and the headers of every other answer
    assert reply.headers["x-coterie-receipt"] == response.id
    assert reply.json["coterie"]["receipt"]["plan"]["specialist"] == "tiny"
    assert server.get(f"/v1/receipts/{response.id}").json["outcome"] == "length"


def test_a_stream_has_the_vendors_events(server: Served) -> None:
    whole = server.post(PATH, ASK | {"max_output_tokens": 24}).json
    events = checked_events(server.post(PATH, ASK | {"max_output_tokens": 24, "stream": True}))
    delta = "response.output_text.delta"
    assert kinds_of(events) == [*BEGIN, *MESSAGE, delta, *MESSAGE_END, "response.incomplete"]
    text = "".join(event.delta for event in events if event.type == delta)
    assert text == whole["output"][0]["content"][0]["text"]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert done.text == text
    last = events[-1].response
    assert last.output_text == text and last.usage.output_tokens == 24
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert {event.item_id for event in events if event.type == delta} == {last.output[0].id}
    assert last.coterie["receipt"]["request_id"] == last.id


def test_the_stream_helper(client: openai.OpenAI) -> None:
    """It follows events by their indexes and refuses a stream that does not add up."""
    whole = client.responses.create(**ASK, max_output_tokens=24).output_text
    with client.responses.stream(**ASK, extra_body={"stop": whole[6:9]}) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == whole[: whole.index(whole[6:9])]
    assert final.status == "completed"


def test_the_async_client(server: Served) -> None:
    async def ask() -> tuple[str, str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
            whole = await made.responses.create(**ASK, max_output_tokens=12)
            stream = await made.responses.create(**ASK, max_output_tokens=12, stream=True)
            texts = [
                event.delta async for event in stream if event.type == "response.output_text.delta"
            ]
            return whole.output_text, "".join(texts)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed


class Size(BaseModel):
    size: int
    unit: str


def test_parse_holds_the_answer_to_a_type(client: openai.OpenAI) -> None:
    asked = {**ASK, "temperature": 1, "extra_body": {"seed": 5}, "max_output_tokens": 200}
    found: Any = client.responses.parse(**asked, text_format=Size)
    assert isinstance(found.output_parsed, Size)
    assert found.text.format.type == "json_schema" and found.text.format.name == "Size"
    with client.responses.stream(**asked, text_format=Size) as stream:
        final: Any = stream.get_final_response()
    assert final.output_parsed == found.output_parsed


def test_log_probabilities(server: Served) -> None:
    body = ASK | {"max_output_tokens": 6, "top_logprobs": 2}
    body["include"] = ["message.output_text.logprobs"]
    whole = checked_response(server.post(PATH, body)).output[0].content[0]
    assert len(whole.logprobs) == 6 and all(len(one.top_logprobs) == 2 for one in whole.logprobs)
    assert whole.text.startswith(whole.logprobs[0].token)
    events = checked_events(server.post(PATH, body | {"stream": True}))
    streamed = [
        score
        for event in events
        if event.type == "response.output_text.delta"
        for score in event.logprobs
    ]
    # a token whose text is still kept back at the end is in the whole answer alone
    shown = [(one.token, one.logprob) for one in whole.logprobs]
    assert [(one.token, one.logprob) for one in streamed] == shown[: len(streamed)]
    assert len(streamed) >= 4


def test_a_model_that_thinks(strict_server: Served, thinker: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASK, "max_output_tokens": 16}
    whole: Any = thinker.responses.create(**asked)
    [thought] = whole.output
    assert thought.type == "reasoning" and thought.content[0].type == "reasoning_text"
    assert thought.status == "incomplete" and whole.output_text == ""
    assert whole.usage.output_tokens_details.reasoning_tokens == 16
    events = checked_events(
        strict_server.post(PATH, asked | {"stream": True}, authorization=f"Bearer {KEYS[1]}")
    )
    name = "response.reasoning_text"
    assert kinds_of(events) == [
        *BEGIN, *MESSAGE, f"{name}.delta", f"{name}.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == f"{name}.delta")
    assert text == thought.content[0].text
    # passed back, it is not part of the prompt, as on the other APIs
    item = thought.model_dump()
    turns: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    last = {"role": "user", "content": "c"}
    plain = thinker.responses.input_tokens.count(model="tiny", input=[*turns, last])
    passed = thinker.responses.input_tokens.count(model="tiny", input=[*turns, item, last])
    assert passed.input_tokens == plain.input_tokens
    calm = thinker.responses.create(**asked, reasoning={"effort": "none"})
    assert calm.reasoning is not None and calm.reasoning.effort == "none"


def responses_loop(client: openai.OpenAI, question: str, mode: str) -> tuple[str, list[str]]:
    """The loop of the vendor's guide: all items passed back, or `previous_response_id`."""
    items: list[Any] = [{"role": "user", "content": question}]
    called: list[str] = []
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "temperature": 0}
    previous: dict[str, Any] = {}
    for _ in range(4):
        if mode == "stream":
            with client.responses.stream(input=items, **asked, store=False) as events:
                answer: Any = events.get_final_response()
        else:
            answer = client.responses.create(input=items, **asked, **previous)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text, called
        if mode == "previous":
            previous, items = {"previous_response_id": answer.id}, []
        else:
            items += [item.to_dict() for item in answer.output]
        for call in calls:
            called.append(call.arguments)
            result = RESULTS[json.loads(call.arguments)["city"]]
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    raise AssertionError("the loop did not end")


@pytest.mark.parametrize("mode", ["items", "previous", "stream"])
@pytest.mark.parametrize(
    ("question", "answer", "cities"),
    [(ONE, DONE, ["Paris"]), (TWO, BOTH, ["Paris", "Rome"]), (TALK, GREETING, [])],
)
def test_the_loop_of_tools(
    caller: openai.OpenAI, mode: str, question: str, answer: str, cities: list[str]
) -> None:
    said, called = responses_loop(caller, question, mode)
    assert said == answer
    assert called == [json.dumps({"city": city}) for city in cities]


def test_two_system_messages_are_the_same_tokens_on_every_api(server: Served) -> None:
    rules = [{"role": "system", "content": text} for text in ("Be brief.", "Be kind.")]
    question = {"role": "user", "content": "hello there"}
    common = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    chat = server.post("/v1/chat/completions", common | {"messages": [*rules, question]}).json
    said, read = chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]
    for instructions, items in ((None, [*rules, question]), ("Be brief.", [rules[1], question])):
        body = {"model": "tiny", "temperature": 0, "max_output_tokens": 8, "input": items}
        response = checked_response(server.post(PATH, body | {"instructions": instructions}))
        assert (response.output_text, response.usage.input_tokens) == (said, read)
    for system, turns in (("", [*rules, question]), ("Be brief.", [rules[1], question])):
        body = common | {"messages": turns} | ({"system": system} if system else {})
        message = server.post("/v1/messages", body).json
        usage = message["usage"]
        counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert message["content"][0]["text"] == said
        assert sum(usage.get(name) or 0 for name in counts) == read


def test_the_events_of_a_call(taught_server: Served) -> None:
    body = {"model": "tiny", "input": ONE, "tools": TOOLS, "temperature": 0, "stream": True}
    events = checked_events(taught_server.post(PATH, body))
    name = "response.function_call_arguments"
    assert kinds_of(events) == [
        *BEGIN, *MESSAGE, "response.output_text.delta", *MESSAGE_END,
        "response.output_item.added", f"{name}.delta", f"{name}.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    final = events[-1].response
    message, call = final.output
    assert message.content[0].text == SPOKEN
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    deltas = [event for event in events if event.type == f"{name}.delta"]
    assert "".join(event.delta for event in deltas) == call.arguments
    assert {(event.output_index, event.item_id) for event in deltas} == {(1, call.id)}
    [done] = [event for event in events if event.type == f"{name}.done"]
    assert (done.arguments, done.model_extra) == (call.arguments, {"name": "weather"})
    whole = checked_response(taught_server.post(PATH, body | {"stream": False}))
    assert [item.type for item in whole.output] == ["message", "function_call"]
    assert whole.output[1].arguments == call.arguments


def test_a_call_that_a_stop_string_cuts_is_incomplete(taught_server: Served) -> None:
    body = {"model": "tiny", "input": ONE, "tools": TOOLS, "temperature": 0, "stop": ["aris"]}
    whole = checked_response(taught_server.post(PATH, body))
    assert (whole.status, whole.output[-1].status) == ("completed", "incomplete")
    assert whole.output[-1].arguments == '{"city": "P'
    events = checked_events(taught_server.post(PATH, body | {"stream": True}))
    assert (events[-2].item.status, events[-2].item.arguments) == ("incomplete", '{"city": "P')


def test_tools_of_other_kinds(taught_server: Served) -> None:
    """As Codex sends them: a namespace is called by both its names, web search is never called."""
    inner = {"type": "function", "strict": False, **WEATHER}
    tools = [
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "sky", "description": "Above", "tools": [inner]},
        {"type": "custom", "name": "shell", "description": "Runs it"},
    ]
    body = {"model": "tiny", "input": "go", "tools": tools, "temperature": 0}
    asked = checked_response(taught_server.post(PATH, body))
    assert [tool.type for tool in asked.tools] == ["web_search", "namespace", "custom"]
    forced = body | {"tool_choice": {"type": "function", "name": "weather", "namespace": "sky"}}
    for choice in (forced["tool_choice"], {"type": "function", "name": "weather"}):
        [call] = checked_response(
            taught_server.post(PATH, forced | {"tool_choice": choice, "max_output_tokens": 200})
        ).output
        assert (call.type, call.name, call.namespace) == ("function_call", "weather", "sky")
        assert "city" in json.loads(call.arguments)
    # an item may bring it
    more = {"type": "additional_tools", "role": "developer", "tools": [tools[1]]}
    brought = forced | {"tools": tools[:1], "input": [more, {"role": "user", "content": "go"}]}
    same = checked_response(taught_server.post(PATH, brought | {"max_output_tokens": 200}))
    assert same.output[0].arguments == call.arguments and same.output[0].namespace == "sky"
    # its result finds the call again
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
    items = [{"role": "user", "content": "go"}, call.to_dict(), result]
    assert taught_server.post(PATH, body | {"input": items}).status == 200


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("regex", "[ab]{3,5}"), ("lark", 'start: letter~3 letter~0..2\nletter: "a" | /b/\n')],
)
def test_a_custom_tool_takes_text(server: Served, syntax: str, definition: str) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    body = {
        "model": "tiny", "input": "go", "temperature": 1, "seed": 3,
        "tools": [{"type": "custom", "name": "shell", "format": form}],
        "tool_choice": {"type": "custom", "name": "shell"},
    }  # fmt: skip
    events = checked_events(server.post(PATH, body | {"stream": True}))
    name = "response.custom_tool_call_input"
    assert kinds_of(events) == [
        *BEGIN, "response.output_item.added", f"{name}.delta", f"{name}.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    [call] = events[-1].response.output
    assert call.type == "custom_tool_call" and 3 <= len(call.input) <= 5
    assert set(call.input) <= {"a", "b"}
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    items = [{"role": "user", "content": "go"}, call.to_dict(), output]
    reply = server.post(PATH, {"model": "tiny", "input": items, "max_output_tokens": 2})
    assert reply.status == 200, reply.body


def test_three_dialects_give_the_same_tokens(taught_server: Served) -> None:
    """A conversation with instructions, a call, its result and an answer, then a new question."""
    url = taught_server.url
    call = {"name": "weather", "arguments": '{"city": "Paris"}'}
    chat_turns: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ONE},
        {"role": "assistant", "content": SPOKEN,
         "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": DONE},
        {"role": "user", "content": TWO},
    ]  # fmt: skip
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": ONE}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": SPOKEN, "annotations": []}]},
        {"type": "function_call", "call_id": "c1", **call},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "assistant", "content": DONE},
        {"role": "user", "content": TWO},
    ]  # fmt: skip
    blocks: list[Any] = [
        {"role": "user", "content": ONE},
        {"role": "assistant", "content": [
            {"type": "text", "text": SPOKEN},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
        {"role": "assistant", "content": DONE},
        {"role": "user", "content": TWO},
    ]  # fmt: skip
    for seed in (None, 11, 12):
        drawn = {"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chat: Any = client.chat.completions.create(
                model="tiny", messages=chat_turns, tools=OPENAI_TOOLS, max_tokens=120,
                extra_body=drawn,
            )  # fmt: skip
            response: Any = client.responses.create(
                model="tiny", instructions="Be brief.", input=items, tools=TOOLS,
                max_output_tokens=120, extra_body=drawn,
            )  # fmt: skip
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
            message: Any = claude.messages.create(
                model="tiny", system="Be brief.", messages=blocks, tools=ANTHROPIC_TOOLS,
                max_tokens=120, extra_body=drawn,
            )  # fmt: skip
        said = chat.choices[0].message
        calls = [(one.function.name, json.loads(one.function.arguments))
                 for one in said.tool_calls or ()]  # fmt: skip
        found = [(item.name, json.loads(item.arguments))
                 for item in response.output if item.type == "function_call"]  # fmt: skip
        used = [(one.name, one.input) for one in message.content if one.type == "tool_use"]
        assert calls == found == used
        text = "".join(one.text for one in message.content if one.type == "text")
        assert (said.content or "") == response.output_text == text
        usage, spent = message.usage, response.usage
        assert chat.usage.prompt_tokens == spent.input_tokens
        whole = usage.input_tokens + usage.cache_read_input_tokens
        assert whole + usage.cache_creation_input_tokens == spent.input_tokens
        assert chat.usage.completion_tokens == spent.output_tokens == usage.output_tokens


def test_thoughts_are_the_same_in_three_dialects(
    strict_server: Served, thinker: openai.OpenAI
) -> None:
    asked = {"temperature": 0, "user": "three"}
    turns: list[Any] = [{"role": "user", "content": "hello"}]
    chat: Any = thinker.chat.completions.create(
        model="tiny", messages=turns, max_tokens=20, extra_body=asked
    )
    response: Any = thinker.responses.create(
        model="tiny", input="hello", max_output_tokens=20, extra_body=asked
    )
    body = {"model": "tiny", "messages": turns, "max_tokens": 20, "temperature": 0}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = strict_server.post("/v1/messages", body | thinking, x_api_key=KEYS[1]).json
    thought = chat.choices[0].message.reasoning_content
    assert thought and response.output[0].content[0].text == thought
    assert message["content"][0]["thinking"] == thought


def test_truncation(client: openai.OpenAI, server: Served) -> None:
    """A conversation beyond the context is refused, or loses its oldest turns."""
    context = server.get("/v1/models/tiny").json["max_model_len"]
    turn = "word " * 60
    items: list[Any] = []
    for number in range(context // 60):
        items += [
            {"role": "user", "content": f"{number} {turn}"},
            {"role": "assistant", "content": "yes"},
        ]
    items.append({"role": "user", "content": "and now?"})
    asked: dict[str, Any] = {**ASK, "input": items, "instructions": "Stay.", "max_output_tokens": 4}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked)
    assert refused.value.code == "context_length_exceeded"
    cut: Any = client.responses.create(**asked, truncation="auto")
    assert cut.truncation == "auto"
    # the instructions and as many of the last turns as fit
    sizes = [
        client.responses.input_tokens.count(
            model="tiny", instructions="Stay.", input=items[at:]
        ).input_tokens
        for at in range(len(items) - 1, len(items) - 20, -2)
    ]
    assert cut.usage.input_tokens == max(size for size in sizes if size <= context - 4)
    assert max(sizes) > context and len(items) > 20


def test_errors_are_typed(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ASK | {"model": "nobody"})
    assert missing.value.code == "model_not_found"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "shell_call", "call_id": "1"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "p", "format": {
            "type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}}]},
         "tools.0.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"include": ["everything"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "x", "of": DEEP}]}]}, "input.0"),
        ({"tools": [{"type": "web_search", "parameters": {"of": DEEP}}]}, "tools.0"),
        ({"tool_choice": {"type": "mcp", "of": DEEP}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ]  # fmt: skip
    for fields, param in cases:
        reply = server.post(PATH, ASK | fields)
        assert reply.status == 400, (fields, reply.body)
        error = reply.json["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), reply.body
        assert reply.headers["x-coterie-receipt"].startswith("rcpt_")
    # an error about one tool's schema names that tool
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
    bad = {"type": "function", "name": "f", "strict": True, "parameters": odd}
    reply = server.post(PATH, ASK | {"tools": [{"type": "web_search"}, bad]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "tools.1"), reply.body
