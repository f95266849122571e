"""OpenAI's tools: what a body says of them, and how calls and their results stand in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.api.openai.types import ChatBody, ChatMessage, ChosenTool, ToolSpec
from coterie.api.tools.base import Tool, Toolbox, check_tools, known_names, tool_of
from coterie.core.errors import InvalidRequest, Unsupported
from coterie.core.request import ToolCall


def toolbox_of(body: ChatBody) -> Toolbox | None:
    """None when the model is not to call anything."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: there are no tools to choose", param="tool_choice")
        return None
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools))
    check_tools(tools)
    if choice == "none":
        return None
    names = frozenset(tool.name for tool in tools)
    required = choice == "required"
    if choice is not None and not isinstance(choice, str):
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            required = choice.allowed_tools.mode == "required"
            names = _named(choice.allowed_tools.tools, tools)
        else:
            required, names = True, _named([choice], tools)
    # a call that is forced is one call, unless more are asked for
    parallel = body.parallel_tool_calls
    return Toolbox(tools, names, required, not required if parallel is None else parallel)


def told_tools(specs: Sequence[ToolSpec]) -> tuple[dict[str, Any], ...]:
    """As a prompt tells of them."""
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(specs))
    check_tools(tools)
    return Toolbox(tools, frozenset(tool.name for tool in tools)).fields() if tools else ()


def _tool(spec: ToolSpec, where: str) -> Tool:
    if spec.type != "function":
        raise Unsupported(f"{where}.type: only functions can be called here", param=where)
    if spec.function is None:
        raise InvalidRequest(f"{where}.function: is required", param=f"{where}.function")
    given = spec.function
    path = f"{where}.function.parameters"
    return tool_of(given.name, given.description, given.parameters, bool(given.strict), path)


def _named(chosen: list[ChosenTool], tools: tuple[Tool, ...]) -> frozenset[str]:
    names: list[str] = []
    for item in chosen:
        if item.type != "function" or item.function is None:
            raise InvalidRequest("tool_choice: must name a function", param="tool_choice")
        names.append(item.function.name)
    return known_names(names, tools, "tool_choice")


def calls_of(message: ChatMessage, where: str) -> tuple[ToolCall, ...]:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only the assistant calls tools", param=where)
    calls: list[ToolCall] = []
    for index, call in enumerate(message.tool_calls or ()):
        if call.type != "function" or call.function is None:
            param = f"{where}.tool_calls.{index}"
            raise InvalidRequest(f"{param}: must be a call of a function", param=param)
        calls.append(ToolCall(call.id, call.function.name, call.function.arguments))
    return tuple(calls)
