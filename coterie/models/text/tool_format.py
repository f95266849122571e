"""How a model writes tool calls, and how it reads tools and their results.

FORMATS has one row per format; the model's chat template shows which one it uses. A template
without tools (or with an unknown format) gets ours: Hermes, in plain messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from coterie.core.request import Chat, Message, ToolCall
from coterie.core.value_check import is_deeper

Turn = dict[str, Any]
# of the arguments of a call
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `mark`, then `{"name": "N", "<key>": {...}}`, then `closing`."""

    name: str
    mark: str
    key: str
    # between the mark and the object, and between the object and the closing mark
    space: str
    closing: str
    # the text between two calls
    between: str
    # a call at the very start of an answer needs no mark, and the calls after it need none
    bare: bool = False
    # the template refuses a turn with several calls
    single: bool = False


FORMATS = {
    "hermes": ToolFormat("hermes", "<tool_call>", "arguments", "\n", "</tool_call>", "\n"),
    "llama": ToolFormat(
        "llama", "<|python_tag|>", "parameters", "", "", "; ", bare=True, single=True
    ),
}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """A model's format, and whether its own template writes it."""

    format: ToolFormat
    native: bool


def tool_support(template: str | None) -> ToolSupport:
    text = template or ""
    if "tools" in text and "tool_calls" in text:
        # other models write XML, or a name without JSON, between the same marks
        written = '"arguments' in text or '\\"arguments' in text
        if "<tool_call>" in text and written and "<function=" not in text:
            return ToolSupport(FORMATS["hermes"], native=True)
        if '"parameters": ' in text and ("<|python_tag|>" in text or "ipython" in text):
            return ToolSupport(FORMATS["llama"], native=True)
    return ToolSupport(FORMATS["hermes"], native=False)


def turns_of(chat: Chat, support: ToolSupport) -> tuple[list[Turn], list[Turn] | None]:
    """The template's input: messages, and tools if it supports them."""
    if not (chat.tools or any(_is_tool_turn(message) for message in chat.messages)):
        return [{"role": item.role, "content": item.content} for item in chat.messages], None
    if not support.native:
        return _plain_turns(chat), None
    messages = _one_call_each(chat.messages) if support.format.single else chat.messages
    tools = [{"type": "function", "function": tool} for tool in chat.tools]
    return _native_turns(messages), tools or None


def _is_tool_turn(message: Message) -> bool:
    return bool(message.tool_calls) or message.tool_call_id is not None


def _native_turns(messages: Sequence[Message]) -> list[Turn]:
    """As transformers' templates expect them: arguments as an object, not as text."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    turns: list[Turn] = []
    for message in messages:
        turn: Turn = {"role": message.role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments_of(call)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
            turn["name"] = names.get(message.tool_call_id, "")
        turns.append(turn)
    return turns


def arguments_of(call: ToolCall) -> Any:
    """The object, or the text if it is not an object: an answer may have been truncated. A deeply
    nested object also stays text, because templates visit objects by recursion."""
    try:
        value = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    if not isinstance(value, dict) or is_deeper(value, MAX_DEPTH):
        return call.arguments
    return value


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Several calls of one message as separate messages, each before its result."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.tool_calls) < 2:
            turns.append(message)
            continue
        results: dict[str, list[Message]] = {}
        while at < len(messages) and (call_id := messages[at].tool_call_id) is not None:
            results.setdefault(call_id, []).append(messages[at])
            at += 1
        for index, call in enumerate(message.tool_calls):
            turns.append(Message("assistant", message.content if index == 0 else "", (call,)))
            turns += results.pop(call.id, ())
        # results of calls in earlier messages
        turns += [item for items in results.values() for item in items]
    return turns


def _plain_turns(chat: Chat) -> list[Turn]:
    """Only system, user and assistant messages, with calls and results as text."""
    turns: list[Turn] = []
    # the results of one message's calls are one message
    for are_results, group in groupby(chat.messages, lambda item: item.tool_call_id is not None):
        if are_results:
            texts = [f"<tool_response>\n{item.content}\n</tool_response>" for item in group]
            turns.append({"role": "user", "content": "\n".join(texts)})
            continue
        for message in group:
            parts = [message.content] if message.content else []
            parts += [_written(call) for call in message.tool_calls]
            turns.append({"role": message.role, "content": "\n".join(parts)})
    if chat.tools:
        _add_tools(turns, chat.tools)
    return turns


def _written(call: ToolCall) -> str:
    arguments = json.dumps(arguments_of(call), ensure_ascii=False)
    return (
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'
    )


def _add_tools(turns: list[Turn], tools: Sequence[dict[str, Any]]) -> None:
    listed = "\n".join(
        json.dumps({"type": "function", "function": tool}, ensure_ascii=False) for tool in tools
    )
    text = _INTRODUCTION.replace("TOOLS", listed, 1)
    if turns and turns[0]["role"] == "system":
        turns[0]["content"] += "\n\n" + text
    else:
        turns.insert(0, {"role": "system", "content": text})


# the text that Hermes and Qwen were trained with
_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
TOOLS
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
