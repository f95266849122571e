"""The tools of a request, for every dialect: which may be called, and whether one must be called.

Checks the rules of both vendors for names, schemas and results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from coterie.core.errors import InvalidRequest
from coterie.core.request import Chat, Message, ToolRules
from coterie.core.value_check import is_deeper

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64_000
MAX_TOOLS_BYTES = 500_000
MAX_SCHEMA_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Any]
    # every keyword of the schema must be enforced
    strict: bool = False
    # its path in the body, where its place in the list is not that
    where: str = ""

    def fields(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The model is shown all `tools`; it may call only those in `callable_names`."""

    tools: tuple[Tool, ...]
    callable_names: frozenset[str]
    # the answer must be a call; otherwise it may also be text
    required: bool = False
    parallel: bool = True

    def fields(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.fields() for tool in self.tools)

    def rules(self) -> ToolRules:
        return ToolRules(
            tuple(tool.name for tool in self.usable()),
            self.required,
            self.parallel,
            tuple(tool.name for tool in self.usable() if tool.strict),
        )

    def usable(self) -> list[Tool]:
        return [tool for tool in self.tools if tool.name in self.callable_names]


def with_tools(chat: Chat, tools: ToolSet) -> Chat:
    return replace(chat, tools=tools.fields(), tool_rules=tools.rules())


def tool_of(name: str, description: str | None, schema: Any, strict: bool, where: str) -> Tool:
    """A checked tool. `where` is the path of the schema in the body."""
    parameters = {"type": "object", "properties": {}} if schema is None else schema
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.type: must be 'object'", param=where)
    if not isinstance(parameters.get("properties", {}), dict):
        raise InvalidRequest(f"{where}.properties: must be a JSON object", param=where)
    if is_deeper(parameters, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(f"{where}: is nested deeper than {MAX_SCHEMA_DEPTH}", param=where)
    size = len(msgspec.json.encode(parameters))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"{where}: {size} bytes; a schema may have {MAX_SCHEMA_BYTES}", param=where
        )
    return Tool(name, description or "", {"type": "object", **parameters}, strict)


def check_tools(tools: Sequence[Tool]) -> None:
    """Refuse tools with equal names (calls name their tool), and too large ones."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequest(
                f"tools.{index}: there are two tools named '{tool.name}'", param=f"tools.{index}"
            )
        seen.add(tool.name)
    size = len(msgspec.json.encode([tool.fields() for tool in tools]))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(
            f"tools: {size} bytes; all together may have {MAX_TOOLS_BYTES}", param="tools"
        )


def known_names(names: Iterable[str], tools: Sequence[Tool], where: str) -> frozenset[str]:
    chosen = frozenset(names)
    unknown = sorted(chosen - {tool.name for tool in tools})
    if unknown:
        raise InvalidRequest(f"{where}: no tool is named '{unknown[0]}'", param=where)
    if not chosen:
        raise InvalidRequest(f"{where}: names no tool", param=where)
    return chosen


def check_results(messages: Sequence[Message], where: str = "messages") -> None:
    """Check that every tool result belongs to a call before it. `where` is the body's field."""
    call_ids: set[str] = set()
    for message in messages:
        call_ids.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in call_ids:
            shown = (message.tool_call_id or "")[:80]
            raise InvalidRequest(
                f"{where}: the result of '{shown}' answers no call before it",
                param=where,
            )
