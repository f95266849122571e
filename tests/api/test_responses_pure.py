"""The Responses API without a server: random conversations in three dialects, random deltas."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from coterie.api.anthropic.parse import parse_messages
from coterie.api.anthropic.types import MessagesBody
from coterie.api.body import check
from coterie.api.dialect import CallerInfo, CollectedAnswer
from coterie.api.openai.parse import parse_chat
from coterie.api.openai.types import ChatBody
from coterie.api.responses.kept import KeptResponses, stored_items
from coterie.api.responses.lark_regex import NoPattern, lark_pattern
from coterie.api.responses.parse import parse_response
from coterie.api.responses.render import (
    ResponseShape,
    ResponseStream,
    replayed,
    whole,
)
from coterie.api.responses.tools import CalledName, ResponseTools
from coterie.api.responses.types import ResponseBody
from coterie.api.tools.read import AnswerSyntax, CallMarks
from coterie.core.errors import RequestTooLarge
from coterie.core.events import Delta, Event, Finished, Started, Timings, Usage
from coterie.core.request import Chat
from coterie.core.settings import ResponseSettings
from coterie.models.text.tool_format import FORMATS
from coterie.service.responses.store import ResponseStore
from tests.helpers.serving.response_events import KINDS
from tests.helpers.serving.server_process import frames

CALLER = CallerInfo("tenant", 0.0)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def conversation(draw: random.Random) -> tuple[list[Any], list[Any], list[Any], str]:
    """One conversation as items, as OpenAI's messages and as Anthropic's turns, and its system
    text."""
    items, messages, turns = list[Any](), list[Any](), list[Any]()
    system = draw.choice(["", "Be brief."])
    if system:
        messages.append({"role": draw.choice(["system", "developer"]), "content": system})

    def also(text: str) -> None:
        """A system message beside that of the instructions."""
        for asked in (items, messages, turns):
            asked.append({"role": "system", "content": text})

    for number in range(draw.randint(0, 2)):
        also(f"Rule {number}.")
    for number in range(draw.randrange(1, 5)):
        text = f"question {number}"
        content = draw.choice([text, [{"type": "input_text", "text": text}]])
        items.append({"role": "user", "content": content})
        messages.append({"role": "user", "content": text})
        turns.append({"role": "user", "content": text})
        for step in range(draw.randrange(3)):
            said = draw.choice(["", f"thinking of {number}.{step}"])
            ids = [f"call_{number}_{step}_{at}" for at in range(draw.randrange(1, 4))]
            arguments = json.dumps({"a": f"{number}"})
            if draw.random() < 0.5:
                items.append({"type": "reasoning", "id": "rs_1", "summary": []})
            if said:
                items.append({"type": "message", "role": "assistant", "content": said})
            items += [
                {"type": "function_call", "call_id": one, "name": "f", "arguments": arguments}
                for one in ids
            ]
            items += [
                {"type": "function_call_output", "call_id": one, "output": f"result of {one}"}
                for one in ids
            ]
            function = {"name": "f", "arguments": arguments}
            calls = [{"id": one, "type": "function", "function": function} for one in ids]
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": one, "content": f"result of {one}"} for one in ids
            ]
            blocks: list[Any] = [{"type": "text", "text": said}] if said else []
            blocks += [
                {"type": "tool_use", "id": one, "name": "f", "input": {"a": f"{number}"}}
                for one in ids
            ]
            turns.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": one, "content": f"result of {one}"}
                for one in ids
            ]
            turns.append({"role": "user", "content": results})
        answer = f"answer {number}"
        items.append({"role": "assistant", "content": [{"type": "output_text", "text": answer}]})
        messages.append({"role": "assistant", "content": answer})
        turns.append({"role": "assistant", "content": answer})
    if draw.random() < 0.5:
        also("Now be long.")
    for asked in (items, messages, turns):
        asked.append({"role": "user", "content": "and now?"})
    return items, messages, turns, system


@pytest.mark.parametrize("seed", range(20))
def test_a_conversation_is_the_same_prompt_in_three_dialects(seed: int) -> None:
    items, messages, turns, system = conversation(random.Random(seed))
    function = {"name": "f", "description": "Does it", "parameters": SCHEMA}
    response = parse_response(
        check(
            ResponseBody,
            {
                "model": "m", "input": items, "tools": [{"type": "function", **function}],
                "instructions": system or None,
            },
        ),
        CALLER, "resp_1", [],
    ).parsed  # fmt: skip
    chat = parse_chat(
        check(
            ChatBody,
            {
                "model": "m", "messages": messages,
                "tools": [{"type": "function", "function": function}],
            },
        ),
        CALLER, "c",
    )  # fmt: skip
    tool = {"name": "f", "description": "Does it", "input_schema": SCHEMA}
    message = parse_messages(
        check(
            MessagesBody,
            {
                "model": "m", "messages": turns, "max_tokens": 5, "tools": [tool],
                "system": system or None,
            },
        ),
        CALLER, "m",
    )  # fmt: skip
    prompts: list[Any] = [one.request.prompt for one in (response, chat, message)]
    assert all(isinstance(prompt, Chat) for prompt in prompts)
    assert prompts[0].messages == prompts[1].messages == prompts[2].messages
    assert prompts[0].tools == prompts[1].tools == prompts[2].tools
    assert prompts[0] == prompts[1]
    assert response.request.sampling == chat.request.sampling


def test_a_system_message_alone_is_a_conversation() -> None:
    """As on the other API. A schema may be as deep as a tool's."""
    turns = [{"role": "developer", "content": "Say hello."}]
    chat = parse_chat(check(ChatBody, {"model": "m", "messages": turns}), CALLER, "c")
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(25):
        deep = {"type": "object", "properties": {"a": deep}}
    form = {"type": "json_schema", "name": "x", "schema": deep}
    body = check(ResponseBody, {"model": "m", "input": turns, "text": {"format": form}})
    response = parse_response(body, CALLER, "resp_1", []).parsed.request
    assert response.prompt == chat.request.prompt
    assert response.response_format is not None


def test_references_are_bounded(tmp_path: Path) -> None:
    """A short body can refer often to a long item."""
    output = {"id": "msg_1", **stored_items(check(ResponseBody, {"model": "m", "input": "x"}))[0]}
    output["content"][0]["text"] = "long " * 200
    response = {"id": "resp_1", "previous_response_id": None, "output": [output]}

    async def refer(count: int) -> int:
        store = ResponseStore(tmp_path / "responses.db", ResponseSettings())
        nobody: Any = None
        kept = KeptResponses(nobody, store, nobody, 10_000)
        try:
            await kept.keep(response, [], "a", 0)
            items = [{"type": "item_reference", "id": output["id"]}] * count
            body = await kept.with_references(
                check(ResponseBody, {"model": "m", "input": items}), "a"
            )
            assert isinstance(body.input, list)
            return len(body.input)
        finally:
            await store.close()
            (tmp_path / "responses.db").unlink()

    assert asyncio.run(refer(5)) == 5
    with pytest.raises(RequestTooLarge):
        asyncio.run(refer(20))


# as Codex describes the input of its patch tool
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


def test_a_lark_grammar_without_recursion_is_a_pattern() -> None:
    pattern = lark_pattern(PATCH)
    begin, end = "*** Begin Patch\n", "*** End Patch\n"
    update = "*** Update File: a.py\n@@ def f\n-x = 1\n+x = 2\n"
    added = "*** Add File: b.py\n+y = 3\n"
    for body in (update, added, update + added, "*** Delete File: a\n", added * 3):
        assert re.fullmatch(pattern, begin + body + end), body
        assert re.fullmatch(pattern, begin + body + end.strip())
    for wrong in (begin + end, update, begin + update, begin + "x\n" + end):
        assert not re.fullmatch(pattern, wrong), wrong
    shown = {
        'start: "a".."f"~2..3': "(?:[a-f]){2,3}",
        'start: /a\\/b/i | ["x"]\n  | "//" // a comment': "(?:(?i:a/b)|(?:x)?|//)",
        'start.2: _n "\\n\\x41\\d(" \n_n: INT\n%import common (INT)': r"[0-9]+\nA\\d\(",
    }
    for grammar, expected in shown.items():
        assert lark_pattern(grammar) == expected, grammar
    doubled = "\n".join(f"r{at}: r{at + 1} r{at + 1}" for at in range(30))
    for bad in (
        "", "start", "start: lost", "start: start", 'start: ("a"', 'start: "a" )', 'start: "a"~999',
        '%ignore " "\nstart: "a"', 'start: "a"\nstart: "b"', "start: " + "(" * 999,
        "start: " * 9999,
        f'start: r0\n{doubled}\nr30: "a"', f'start: {"|".join(["r"] * 9999)}\nr: "{"a" * 9999}"',
        "\n".join(f"r{at}: /a/" for at in range(999)),
    ):  # fmt: skip
        with pytest.raises(NoPattern):
            lark_pattern(bad)


def test_an_item_keeps_its_type() -> None:
    """Some clients give calls a role."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": "x"}, call | {"role": "assistant"}]
    shown = stored_items(check(ResponseBody, {"model": "m", "input": items}))
    assert [item["type"] for item in shown] == ["message", "function_call"]


TOOLS = ResponseTools(
    None,
    {
        "weather": CalledName("weather"),
        "sky__rain": CalledName("rain", "sky"),
        "shell": CalledName("shell", None, True),
    },
)
SYNTAX = AnswerSyntax(
    (("<think>", "</think>"), False), CallMarks(FORMATS["hermes"], frozenset(TOOLS.names))
)


def answer(draw: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """A text as a model writes it, and the items in it."""
    parts, items = "", list[tuple[str, str]]()
    if draw.random() < 0.5:
        parts += "<think>\nLet me see.\n</think>\n\n"
        items.append(("reasoning", "Let me see."))
    said = draw.choice(["", "Hello < there.", "naïve \u00fc \U0001f600"])
    if said:
        parts += said
        items.append(("message", said))
    for name in draw.sample(sorted(TOOLS.names), draw.randrange(3)):
        arguments = json.dumps({"input" if name == "shell" else "a": 'x "y" {'})
        parts += f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        is_shell = name == "shell"
        items.append(("custom_tool_call", 'x "y" {') if is_shell else ("function_call", arguments))
    return parts, items or [("message", "")]


def cut(draw: random.Random, text: str) -> list[str]:
    pieces: list[str] = []
    while text:
        size = draw.randrange(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces or [""]


def shown(output: list[Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for item in output:
        if item["type"] in ("message", "reasoning"):
            found.append((item["type"], item["content"][0]["text"]))
        else:
            found.append((item["type"], item.get("arguments", item.get("input"))))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_streams_say_what_whole_answers_say(seed: int) -> None:
    """The items of a stream, of its last event, of a whole answer and of a stream that is sent
    again; each event as the vendor's types want it."""
    draw = random.Random(seed)
    text, items = answer(draw)
    reason = draw.choice(["stop", "length"])
    pieces = cut(draw, text)
    events: list[Event] = [Started("r", "e0", 7, 0)]
    for at, piece in enumerate(pieces):
        last = reason if at == len(pieces) - 1 else None
        events.append(Delta("r", 0, piece, (at,), finish_reason=last))
    events.append(Finished("r", (reason,), Usage(7, len(pieces)), Timings()))
    repeated = {
        "model": "m", "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "previous_response_id": None,
    }  # fmt: skip
    shape = ResponseShape("resp_1", repeated, TOOLS, syntax=SYNTAX)
    # another specialist took the request
    shape.model = "other"
    stream, collected = ResponseStream(shape), CollectedAnswer(1)
    raw = b""
    for event in events:
        raw += stream.render(event)
        collected.take(event)
    told = [data for _, data in frames(raw)]
    for data in told:
        KINDS[data["type"]].model_validate(data, strict=True)
    assert [data["sequence_number"] for data in told] == list(range(len(told)))
    final = told[-1]["response"]
    assert shown(final["output"]) == items
    assert {data["response"]["model"] for data in told if "response" in data} == {"other"}
    done = [data["item"] for data in told if data["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert final["status"] == ("completed" if reason == "stop" else "incomplete")
    texts: dict[str, str] = {}
    for data in told:
        if data["type"].endswith(".delta"):
            texts[data["item_id"]] = texts.get(data["item_id"], "") + data["delta"]
    assert [(item["type"], texts.get(item["id"], "")) for item in final["output"]] == items
    complete = json.loads(json.dumps(whole(shape, collected), default=str))
    assert shown(complete["output"]) == items
    assert [item.get("namespace") for item in complete["output"]] == [
        item.get("namespace") for item in final["output"]
    ]
    again = [data for _, data in frames(b"".join(replayed(final)))]
    for data in again:
        KINDS[data["type"]].model_validate(data, strict=True)
    assert [one["item"] for one in again if one["type"] == "response.output_item.done"] == done
    assert again[-1]["response"] == final
