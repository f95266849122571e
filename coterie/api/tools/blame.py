"""The events of a request that may call tools.

Says which tool's schema is at fault when the grammar of all of them cannot be made.
"""

from __future__ import annotations

import re
from contextlib import aclosing

from coterie.api.inference import Ask, Service, Steering, events_of, inference_request
from coterie.api.response_format import FORMAT, format_named
from coterie.api.tools.base import Toolbox
from coterie.api.tools.grammar import ANSWER
from coterie.api.transport.sse import Events
from coterie.core.errors import InvalidRequest
from coterie.core.request import ResponseFormat

# the grammar's own complaint: line, column, reason, then the lines around it
_FAULT = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| .*)?$")
_RULE = re.compile(r"arguments_(\d+): ")


def tool_events(service: Service, ask: Ask, steering: Steering, request_id: str) -> Events:
    """The events of `ask`, whose format is already its tools' grammar."""
    asked = inference_request(ask, steering, request_id)
    events = events_of(service, asked, steering.exchange)
    if ask.tools is None or ask.response_format is None:
        return format_named(events, ask.format_field)
    return _blaming(events, ask.tools, ask)


async def _blaming(events: Events, toolbox: Toolbox, ask: Ask) -> Events:
    """The same events; a complaint about the grammar becomes one about a tool, or about what an
    answer that calls none has to look like."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except InvalidRequest as error:
            if error.param != FORMAT or ask.response_format is None:
                raise
            raise blamed(error.message, toolbox, ask.response_format, ask.format_field) from None


def blamed(
    message: str, toolbox: Toolbox, grammar: ResponseFormat, format_field: str = FORMAT
) -> InvalidRequest:
    fault = _FAULT.search(message)
    if fault is not None:
        lines = grammar.text.splitlines()
        at = int(fault[1]) - 1
        line = lines[at] if at < len(lines) else ""
        if line.startswith(ANSWER):
            reason = f"{format_field}: cannot be enforced: {fault[2]}"
            return InvalidRequest(reason, param=format_field)
        rule = _RULE.match(line)
        if rule is not None:
            tool = toolbox.usable()[int(rule[1])]
            where = f"tools.{toolbox.tools.index(tool)}"
            reason = f"{where}: the schema of '{tool.name}' cannot be enforced: {fault[2]}"
            return InvalidRequest(reason, param=where)
    return InvalidRequest(f"tools: {message}", param="tools")
