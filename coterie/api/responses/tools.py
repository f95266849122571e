"""The tools of a request on the Responses API, and the names under which a model calls them.

A function is called as it is. A function in a namespace is called as `namespace__name`, and the
answer names both again. A custom tool, whose input is text, is called as a function with the one
argument `input`. Items of the type `additional_tools` bring more tools. Tools that a server runs
itself (web search and the like) are let through: the model is not told of them, so it never calls
one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from coterie.api.responses.lark_regex import NoPattern, lark_pattern
from coterie.api.responses.types import (
    ChosenResponseTool,
    InnerTool,
    ResponseItem,
    ResponsePrompt,
    ResponseTool,
    ResponseToolChoice,
)
from coterie.api.tools.base import MAX_TOOLS, MAX_TOOLS_BYTES, Tool, ToolSet, check_tools, tool_of
from coterie.core.errors import InvalidRequest, UnsupportedFeature

FUNCTION, CUSTOM, NAMESPACE = "function", "custom", "namespace"
# the type of an item
ADDITIONAL_TOOLS = "additional_tools"
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# kinds that may be forced by name
_CALLABLE = (FUNCTION, CUSTOM)


@dataclass(frozen=True, slots=True)
class CalledName:
    """A tool as an answer names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """`tool_set` is None if the model must not call any."""

    tool_set: ToolSet | None
    # by the name that the model uses
    names: Mapping[str, CalledName]
    # all that were given, also those that are never called
    given: tuple[ResponseTool, ...] = ()

    def named(self, shown: str) -> CalledName:
        return self.names.get(shown) or CalledName(shown)


def shown_name(name: str, namespace: str | None) -> str:
    """The name that the model reads and writes."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def response_tools(body: ResponsePrompt, history: Sequence[ResponseItem] = ()) -> ResponseTools:
    """`history`: the items of the conversation before the body's own."""
    given = _given(body, history)
    size = len(msgspec.json.encode([tool.fields() for tool in given.values()]))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"tools: {size} bytes; all together may have {MAX_TOOLS_BYTES}", param="tools"
        )
    names: dict[str, CalledName] = {}
    tools: list[Tool] = []
    for where, spec, namespace in _callable(given):
        called = CalledName(_checked_name(spec.name, where), namespace, spec.type == CUSTOM)
        shown = shown_name(called.name, namespace)
        tools.append(replace(_tool(spec, shown, where), where=where))
        names[shown] = called
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: {len(tools)}; at most {MAX_TOOLS}", param="tools")
    check_tools(tools)
    return ResponseTools(_tool_set(body, tuple(tools), names), names, tuple(given.values()))


def _given(body: ResponsePrompt, history: Sequence[ResponseItem]) -> dict[str, ResponseTool]:
    """By path, the body's tools and those of items. An item may describe a tool of an earlier one
    again, but none of the body's."""
    given = {f"tools.{index}": spec for index, spec in enumerate(body.tools or ())}
    own = {(spec.type, spec.name) for spec in given.values()}
    brought: dict[tuple[str, str | None], tuple[str, ResponseTool]] = {}
    own_items = body.input if isinstance(body.input, list) else ()
    for field, items in (("previous_response_id", history), ("input", own_items)):
        for place, item in enumerate(items):
            if item.type != ADDITIONAL_TOOLS:
                continue
            for index, spec in enumerate(item.tools or ()):
                brought[spec.type, spec.name] = (f"{field}.{place}.tools.{index}", spec)
    return given | {where: spec for key, (where, spec) in brought.items() if key not in own}


def _callable(given: Mapping[str, ResponseTool]) -> Iterator[tuple[str, InnerTool, str | None]]:
    """The tools that the caller runs: path, tool, namespace."""
    for where, spec in given.items():
        if spec.type == NAMESPACE:
            namespace = _checked_name(spec.name, where)
            for place, inner in enumerate(spec.tools or ()):
                path = f"{where}.tools.{place}"
                if inner.type not in _CALLABLE:
                    raise InvalidRequest(f"{path}.type: must be function or custom", param=path)
                yield path, inner, namespace
        elif spec.type in _CALLABLE:
            yield where, spec, None


def _checked_name(name: str | None, where: str) -> str:
    if name is None:
        raise InvalidRequest(f"{where}.name: is required", param=f"{where}.name")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.name: must be letters, digits, _ and -, at most 128", param=f"{where}.name"
        )
    return name


def _tool(spec: InnerTool, shown: str, where: str) -> Tool:
    if spec.type == CUSTOM:
        schema = _custom_schema(spec.format, f"{where}.format")
        return tool_of(shown, spec.description, schema, True, f"{where}.format")
    path = f"{where}.parameters"
    return tool_of(shown, spec.description, spec.parameters, bool(spec.strict), path)


def _custom_schema(form: dict[str, Any] | None, where: str) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    kind = "text" if form is None else form.get("type")
    if kind == "grammar" and form is not None:
        definition = form.get("definition")
        if not isinstance(definition, str):
            raise InvalidRequest(f"{where}.definition: must be a text", param=where)
        if form.get("syntax") not in ("regex", "lark"):
            raise InvalidRequest(f"{where}.syntax: must be regex or lark", param=where)
        if form["syntax"] == "lark":
            definition = _pattern(definition, where)
        text["pattern"] = f"^(?:{definition})$"
    elif kind != "text":
        raise InvalidRequest(f"{where}.type: must be text or grammar", param=where)
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def _pattern(grammar: str, where: str) -> str:
    try:
        return lark_pattern(grammar)
    except NoPattern as error:
        raise UnsupportedFeature(
            f"{where}: a tool's input can be held to a regex, or to a Lark grammar that can be "
            f"written as one; here, {error}",
            param=where,
        ) from None


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call. If the call was cut short, its JSON as far as it is
    there."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _tool_set(
    body: ResponsePrompt, tools: tuple[Tool, ...], names: Mapping[str, CalledName]
) -> ToolSet | None:
    choice = body.tool_choice
    callable_names, required = frozenset(names), choice == "required"
    if isinstance(choice, ResponseToolChoice):
        if choice.type == "allowed_tools":
            required = choice.mode == "required"
            callable_names = _allowed(choice, names)
        else:
            required, callable_names = True, frozenset({_chosen(choice, names)})
    if required and not callable_names:
        raise InvalidRequest("tool_choice: there are no tools to choose", param="tool_choice")
    if not callable_names or choice == "none":
        return None
    # if a call is forced, one call is made unless the request allows more
    parallel = body.parallel_tool_calls
    return ToolSet(tools, callable_names, required, not required if parallel is None else parallel)


def _allowed(choice: ResponseToolChoice, names: Mapping[str, CalledName]) -> frozenset[str]:
    if not choice.tools:
        raise InvalidRequest("tool_choice.tools: names no tool", param="tool_choice")
    return frozenset(_chosen(item, names) for item in choice.tools if item.type in _CALLABLE)


def _chosen(choice: ChosenResponseTool, names: Mapping[str, CalledName]) -> str:
    if choice.type not in _CALLABLE:
        raise UnsupportedFeature(
            "tool_choice: this server runs no tools of its own; name a function",
            param="tool_choice",
        )
    if choice.name is None:
        raise InvalidRequest("tool_choice.name: is required", param="tool_choice")
    shown = shown_name(choice.name, choice.namespace)
    if shown in names:
        return shown
    # a tool inside a namespace may be named without it
    found = [key for key, called in names.items() if called.name == choice.name]
    if choice.namespace is not None or len(found) != 1:
        raise InvalidRequest(
            f"tool_choice: no tool is named '{choice.name[:80]}'", param="tool_choice"
        )
    return found[0]
