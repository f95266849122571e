"""Anthropic's tools: what a body says of them, and the turns that calls and results make."""

from __future__ import annotations

import json
from collections.abc import Iterable

from coterie.api.anthropic.types import Block, CountBody, ResultBlock, ToolSpec, Turn
from coterie.api.tools.base import Tool, Toolbox, check_tools, known_names, tool_of
from coterie.core.errors import InvalidRequest, Unsupported
from coterie.core.nesting import is_deeper
from coterie.core.request import Message, ToolCall
from coterie.models.text.tool_format import MAX_DEPTH

# a model's own earlier thoughts are not read again
_UNREAD = ("thinking", "redacted_thinking")


def toolbox_of(body: CountBody) -> Toolbox | None:
    """None when the model is not to call anything."""
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidRequest("tool_choice: there are no tools to choose", param="tool_choice")
        return None
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools))
    check_tools(tools)
    names = frozenset(tool.name for tool in tools)
    if choice is None:
        return Toolbox(tools, names)
    if choice.type == "none":
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name: is required", param="tool_choice.name")
        names = known_names([choice.name], tools, "tool_choice")
    required = choice.type in ("any", "tool")
    # a call that is forced is one call, unless more are asked for
    single = choice.disable_parallel_tool_use
    return Toolbox(tools, names, required, not (required if single is None else single))


def _tool(spec: ToolSpec, where: str) -> Tool:
    if spec.type not in (None, "custom"):
        raise Unsupported(f"{where}.type: this server runs no tools of its own", param=where)
    if spec.input_schema is None:
        raise InvalidRequest(f"{where}.input_schema: is required", param=f"{where}.input_schema")
    path = f"{where}.input_schema"
    return tool_of(spec.name, spec.description, spec.input_schema, bool(spec.strict), path)


def turns_in(turn: Turn, where: str) -> list[Message]:
    """One turn as messages: results of tools stand for themselves."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    found: list[Message] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(turn.content):
        param = f"{where}.content.{index}"
        if block.type == "text":
            texts.append(_text(block, param))
        elif block.type == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, param))
        elif block.type == "tool_result" and turn.role == "user":
            if texts:
                found.append(Message(turn.role, "\n".join(texts)))
                texts = []
            found.append(_result(block, param))
        elif block.type in ("tool_use", "tool_result"):
            raise InvalidRequest(f"{param}: not in a turn of the {turn.role}", param=param)
        elif block.type not in _UNREAD:
            raise Unsupported(f"{param}: only text and tools can be read here", param=param)
    if texts or calls or not found:
        found.append(Message(turn.role, "\n".join(texts), tuple(calls)))
    return found


def _text(block: ResultBlock, param: str) -> str:
    if block.text is None:
        raise InvalidRequest(f"{param}.text: is required", param=param)
    return block.text


def _call(block: Block, param: str) -> ToolCall:
    if block.id is None or block.name is None or block.input is None:
        raise InvalidRequest(f"{param}: needs id, name and input", param=param)
    if is_deeper(block.input, MAX_DEPTH):
        raise InvalidRequest(f"{param}.input: is nested deeper than {MAX_DEPTH}", param=param)
    return ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def _result(block: Block, param: str) -> Message:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{param}.tool_use_id: is required", param=param)
    content = block.content or ""
    text = content if isinstance(content, str) else _spoken(content, param)
    text = f"Error: {text}" if block.is_error else text
    return Message("tool", text, tool_call_id=block.tool_use_id)


def _spoken(parts: Iterable[ResultBlock], where: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(parts):
        param = f"{where}.content.{index}"
        if part.type != "text":
            raise Unsupported(f"{param}: only text can be read here", param=param)
        texts.append(_text(part, param))
    return "\n".join(texts)
