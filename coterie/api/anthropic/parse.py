"""Turns Anthropic bodies into `ParsedRequest` values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby

from coterie.api.anthropic.types import (
    AnthropicToolSpec,
    CountBody,
    InputBlock,
    InputMessage,
    MessagesBody,
    ResultBlock,
    TextBlock,
)
from coterie.api.body_fields import adapter_hints, positive_top_p, refuse_openai_fields, seed_of
from coterie.api.dialect import CallerInfo, ParsedRequest, user_id_of
from coterie.api.response_format import response_format_of
from coterie.api.tools.base import (
    Tool,
    ToolSet,
    check_results,
    check_tools,
    known_names,
    tool_of,
    with_tools,
)
from coterie.core.errors import InvalidRequest, UnsupportedFeature
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Limits,
    Message,
    ResponseFormat,
    RouteHints,
    Sampling,
    ToolCall,
)
from coterie.core.value_check import is_deeper
from coterie.models.text.tool_format import MAX_DEPTH


def parse_messages(body: MessagesBody, caller: CallerInfo, request_id: str) -> ParsedRequest:
    refuse_openai_fields(body.model_extra)
    user = None if body.metadata is None else body.metadata.user_id
    answer_format, format_field = _format(body)
    request = InferenceRequest(
        id=request_id,
        prompt=prompt_of(body),
        sampling=Sampling(
            temperature=body.temperature,
            top_p=positive_top_p(body.top_p),
            top_k=body.top_k,
            seed=seed_of(body.seed),
        ),
        limits=Limits(
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            priority=caller.priority(body.priority),
            timeout_s=caller.timeout_s,
        ),
        hints=hints_of(body, caller),
        response_format=answer_format,
        session=caller.session_key(body.cache_key, user),
        tenant=caller.tenant,
        arrived_at=caller.arrived_at,
        user_id=user_id_of(user),
    )
    return ParsedRequest(request, bool(body.stream), tool_set_of(body), format_field)


def _format(body: MessagesBody) -> tuple[ResponseFormat | None, str]:
    newer = None if body.output_config is None else body.output_config.format
    given, field = body.output_format, "output_format"
    if newer is not None:
        given, field = newer, "output_config.format"
    return response_format_of(given, param=field), field


def hints_of(body: CountBody, caller: CallerInfo) -> RouteHints:
    intent = body.intent or caller.intent
    return RouteHints(body.model, adapter_hints(body.experts), intent=intent)


def prompt_of(body: CountBody) -> Chat:
    """A system message, then the turns. If the last turn is the assistant's, the model continues
    it."""
    turns = _joined(
        [
            message
            for index, turn in enumerate(body.messages)
            for message in turns_in(turn, f"messages.{index}")
        ]
    )
    if all(message.role == "system" for message in turns):
        raise InvalidRequest("messages: at least one user message is required", param="messages")
    check_results(turns)
    if body.system:
        turns.insert(0, Message("system", _system_text(body.system)))
    continues = turns[-1].role == "assistant"
    tools = tool_set_of(body)
    # only the templates of thinking models read this; Anthropic's default is not to think
    thinking = body.thinking
    chat = Chat(
        tuple(turns),
        {} if thinking is None else {"enable_thinking": thinking.type != "disabled"},
        template_defaults={"enable_thinking": False},
        add_generation_prompt=not continues,
    )
    return chat if tools is None else with_tools(chat, tools)


def _joined(messages: list[Message]) -> list[Message]:
    """Join neighbouring messages of one role into one turn, as Anthropic does. Each tool result
    and each system message stays a turn."""
    turns: list[Message] = []
    for role, neighbours in groupby(messages, lambda message: message.role):
        group = list(neighbours)
        if role in ("tool", "system") or len(group) == 1:
            turns += group
            continue
        text = "\n".join(message.content for message in group if message.content)
        calls = tuple(call for message in group for call in message.tool_calls)
        turns.append(Message(role, text, calls))
    return turns


def _system_text(system: str | list[TextBlock]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system)


# block types that are skipped: earlier thoughts of the model are not part of the prompt
_UNREAD = ("thinking", "redacted_thinking")


def tool_set_of(body: CountBody) -> ToolSet | None:
    """The tools of a request. None if the model must not call any."""
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidRequest("tool_choice: there are no tools to choose", param="tool_choice")
        return None
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools))
    check_tools(tools)
    names = frozenset(tool.name for tool in tools)
    if choice is None:
        return ToolSet(tools, names)
    if choice.type == "none":
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name: is required", param="tool_choice.name")
        names = known_names([choice.name], tools, "tool_choice")
    required = choice.type in ("any", "tool")
    # if a call is forced, one call is made unless the request allows more
    single = choice.disable_parallel_tool_use
    return ToolSet(tools, names, required, not (required if single is None else single))


def _tool(spec: AnthropicToolSpec, where: str) -> Tool:
    if spec.type not in (None, "custom"):
        raise UnsupportedFeature(f"{where}.type: this server runs no tools of its own", param=where)
    if spec.input_schema is None:
        raise InvalidRequest(f"{where}.input_schema: is required", param=f"{where}.input_schema")
    path = f"{where}.input_schema"
    return tool_of(spec.name, spec.description, spec.input_schema, bool(spec.strict), path)


def turns_in(turn: InputMessage, where: str) -> list[Message]:
    """One turn as messages: each tool result becomes its own message."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    messages: list[Message] = []
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
                messages.append(Message(turn.role, "\n".join(texts)))
                texts = []
            messages.append(_result(block, param))
        elif block.type in ("tool_use", "tool_result"):
            raise InvalidRequest(f"{param}: not in a turn of the {turn.role}", param=param)
        elif block.type not in _UNREAD:
            raise UnsupportedFeature(f"{param}: only text and tools can be read here", param=param)
    if texts or calls or not messages:
        messages.append(Message(turn.role, "\n".join(texts), tuple(calls)))
    return messages


def _text(block: ResultBlock, param: str) -> str:
    if block.text is None:
        raise InvalidRequest(f"{param}.text: is required", param=param)
    return block.text


def _call(block: InputBlock, param: str) -> ToolCall:
    if block.id is None or block.name is None or block.input is None:
        raise InvalidRequest(f"{param}: needs id, name and input", param=param)
    if is_deeper(block.input, MAX_DEPTH):
        raise InvalidRequest(f"{param}.input: is nested deeper than {MAX_DEPTH}", param=param)
    return ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def _result(block: InputBlock, param: str) -> Message:
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
            raise UnsupportedFeature(f"{param}: only text can be read here", param=param)
        texts.append(_text(part, param))
    return "\n".join(texts)
