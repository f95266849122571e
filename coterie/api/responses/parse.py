"""Turns bodies of the Responses API into `ParsedRequest` values: meanings of items, and refusals.

The items of a conversation become the messages that the same conversation has on the other APIs,
so that a model reads the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from coterie.api.dialect import CallerInfo, ParsedRequest, user_id_of
from coterie.api.openai.parse import (
    hints_of,
    limits_of,
    refuse_common,
    sampling_of,
    session_of,
    spoken_text,
    users_of,
)
from coterie.api.response_format import response_format_of, vendor_format_of
from coterie.api.responses.tools import (
    ADDITIONAL_TOOLS,
    ResponseTools,
    response_tools,
    shown_name,
)
from coterie.api.responses.types import ResponseBody, ResponseItem, ResponsePrompt
from coterie.api.tools.base import MAX_TOOLS_BYTES, check_results, with_tools
from coterie.core.errors import InvalidRequest, UnsupportedFeature
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Message,
    ResponseFormat,
    ToolCall,
)

MESSAGE, REASONING, REFERENCE = "message", "reasoning", "item_reference"
FUNCTION_CALL, FUNCTION_RESULT = "function_call", "function_call_output"
CUSTOM_CALL, CUSTOM_RESULT = "custom_tool_call", "custom_tool_call_output"
LOGPROBS = "message.output_text.logprobs"
# what `include` may name; all but log probabilities belong to items that are never made here, or
# are always complete
INCLUDABLE = frozenset(
    {
        LOGPROBS, "reasoning.encrypted_content", "file_search_call.results",
        "web_search_call.results", "web_search_call.action.sources",
        "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)  # fmt: skip
# items without text that a model could read: earlier thoughts are not part of a prompt on any API,
# and tools are told as all others
_UNREAD = (REASONING, "web_search_call", ADDITIONAL_TOOLS)
# fields that would change the answer and are not honoured on this API -> what to do instead
NOT_HERE = {
    "conversation": "conversations are kept by previous_response_id",
    "prompt": "no prompts are kept here; give instructions and input",
    "context_management": "nothing is compacted; use truncation",
    "moderation": "this server moderates nothing",
    "image": "only text can be read here",
    "messages": "use input",
    "max_completion_tokens": "use max_output_tokens",
    "logprobs": f"name {LOGPROBS} in include",
    "functions": "give them as tools",
    "modalities": "only text can be made here",
    "chat_template": "is honoured on /v1/chat/completions alone",
    "documents": "put them into input",
    "previous_input_messages": "give previous_response_id, or the items as input",
    "add_generation_prompt": "is honoured on /v1/chat/completions alone",
    "continue_final_message": "is honoured on /v1/chat/completions alone",
    "echo": "is honoured on /v1/chat/completions alone",
    "suffix": "the models here do not fill in the middle",
    "best_of": "is not available",
}
# the same for fields that the common part of the bodies has
_NOT_HERE_EITHER = {
    "max_tokens": "use max_output_tokens",
    "add_special_tokens": "is honoured on /v1/chat/completions alone",
    "prompt_logprobs": "is honoured on /v1/chat/completions alone",
    "return_token_ids": "is honoured on /v1/chat/completions alone",
    "return_tokens_as_token_ids": "is honoured on /v1/chat/completions alone",
    "use_beam_search": "is honoured on /v1/chat/completions alone",
}


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    parsed: ParsedRequest
    tools: ResponseTools


def parse_response(
    body: ResponseBody, caller: CallerInfo, request_id: str, history: Sequence[ResponseItem]
) -> ParsedResponse:
    """`history`: the items of the conversation before the body's own."""
    _refuse(body)
    tools = response_tools(body, history)
    answer_format, field = _format(body)
    request = InferenceRequest(
        id=request_id,
        prompt=prompt_of(body, tools, history),
        sampling=sampling_of(body, _num_logprobs(body), None),
        limits=limits_of(body, body.max_output_tokens, caller),
        hints=hints_of(body, caller),
        response_format=answer_format,
        session=session_of(body, caller),
        tenant=caller.salted_tenant(body.cache_salt),
        arrived_at=caller.arrived_at,
        user_id=user_id_of(body.safety_identifier, *users_of(body)),
    )
    return ParsedResponse(ParsedRequest(request, bool(body.stream), tools.tool_set, field), tools)


def prompt_of(body: ResponsePrompt, tools: ResponseTools, history: Sequence[ResponseItem]) -> Chat:
    """A system message with the instructions, then the items of the conversation."""
    messages = [*messages_of(history, "previous_response_id"), *_own_messages(body)]
    if not messages:
        raise InvalidRequest("input: at least one message is required", param="input")
    check_results(messages, "input")
    if body.instructions:
        messages.insert(0, Message("system", body.instructions))
    chat = Chat(tuple(messages), _template_kwargs(body), closes_last=True)
    return chat if tools.tool_set is None else with_tools(chat, tools.tool_set)


def _own_messages(body: ResponsePrompt) -> list[Message]:
    if isinstance(body.input, str):
        return [Message("user", body.input)]
    return messages_of(body.input or (), "input")


def _template_kwargs(body: ResponsePrompt) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    # only the templates of thinking models read this
    thinking = {"enable_thinking": False} if effort == "none" else {}
    return thinking | (body.chat_template_kwargs or {})


def messages_of(items: Sequence[ResponseItem], where: str) -> list[Message]:
    """Calls and the assistant's text before them are one message, as on the other APIs."""
    messages: list[Message] = []
    # the last message may still get calls
    is_open = False
    for index, item in enumerate(items):
        path = f"{where}.{index}"
        kind = item.type or (MESSAGE if item.role is not None else "")
        if kind in (FUNCTION_CALL, CUSTOM_CALL):
            turn = messages.pop() if is_open else Message("assistant", "")
            calls = (*turn.tool_calls, _call(item, path))
            messages.append(replace(turn, tool_calls=calls))
            is_open = True
        elif kind == MESSAGE:
            messages.append(_message(item, path))
            is_open = item.role == "assistant"
        elif kind in (FUNCTION_RESULT, CUSTOM_RESULT):
            messages.append(_result(item, path))
            is_open = False
        elif not kind:
            raise InvalidRequest(f"{path}: needs a type or a role", param=path)
        elif kind not in _UNREAD:
            raise UnsupportedFeature(
                f"{path}.type: '{kind}' cannot be read here; messages, function calls, custom tool "
                "calls and their outputs can",
                param=path,
            )
    return messages


def _message(item: ResponseItem, path: str) -> Message:
    if item.role is None:
        raise InvalidRequest(f"{path}.role: is required", param=f"{path}.role")
    if item.content is None:
        raise InvalidRequest(f"{path}.content: is required", param=f"{path}.content")
    content = item.content
    text = content if isinstance(content, str) else spoken_text(content, f"{path}.content")
    # templates use the older name
    return Message("system" if item.role == "developer" else item.role, text)


def _call(item: ResponseItem, path: str) -> ToolCall:
    arguments = item.arguments
    if item.type == CUSTOM_CALL and item.input is not None:
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    if item.call_id is None or item.name is None or arguments is None:
        needed = "input" if item.type == CUSTOM_CALL else "arguments"
        raise InvalidRequest(f"{path}: needs call_id, name and {needed}", param=path)
    return ToolCall(item.call_id, shown_name(item.name, item.namespace), arguments)


def _result(item: ResponseItem, path: str) -> Message:
    if item.call_id is None or item.output is None:
        raise InvalidRequest(f"{path}: needs call_id and output", param=path)
    output = item.output
    text = output if isinstance(output, str) else spoken_text(output, f"{path}.output")
    return Message("tool", text, tool_call_id=item.call_id)


def reference_ids(body: ResponsePrompt) -> list[str]:
    """The ids of kept items that the input refers to."""
    if not isinstance(body.input, list):
        return []
    return [item.id for item in body.input if _is_reference(item) and item.id is not None]


def resolved(items: Sequence[ResponseItem], kept: Mapping[str, ResponseItem]) -> list[ResponseItem]:
    """The items with those that they refer to in place of references."""
    whole: list[ResponseItem] = []
    for index, item in enumerate(items):
        if not _is_reference(item):
            whole.append(item)
        elif item.id is not None and item.id in kept:
            whole.append(kept[item.id])
        else:
            raise InvalidRequest(
                f"input.{index}.id: no such item is kept; send the item itself",
                param=f"input.{index}.id",
            )
    return whole


def _is_reference(item: ResponseItem) -> bool:
    bare = item.type is None and item.role is None and item.id is not None
    return item.type == REFERENCE or bare


def _num_logprobs(body: ResponseBody) -> int | None:
    """None = no log probabilities."""
    return (body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None


def _format(body: ResponseBody) -> tuple[ResponseFormat | None, str]:
    other, field = vendor_format_of(body)
    given = None if body.text is None else body.text.format
    if given is not None and len(msgspec.json.encode(given)) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"text.format: more than {MAX_TOOLS_BYTES} bytes", param="text.format")
    own = None if given is None else response_format_of(given, param="text.format")
    if own is None:
        return other, field
    if other is not None:
        raise InvalidRequest(f"give text.format or {field}, not both", param=field)
    return own, "text.format"


def refuse_fields_here(extra: Mapping[str, Any] | None) -> None:
    for name, value in (extra or {}).items():
        if value and name in NOT_HERE:
            raise UnsupportedFeature(f"{name}: {NOT_HERE[name]}", param=name)


def _refuse(body: ResponseBody) -> None:
    refuse_fields_here(body.model_extra)
    refuse_common(body)
    for name, why in _NOT_HERE_EITHER.items():
        value = getattr(body, name)
        # 0 is a number of log probabilities
        if value is not None and value is not False:
            raise UnsupportedFeature(f"{name}: {why}", param=name)
    if body.n not in (None, 1):
        raise UnsupportedFeature("n: a response has one answer", param="n")
    unknown = [name for name in body.include or () if name not in INCLUDABLE]
    if unknown:
        raise InvalidRequest(f"include: '{unknown[0]}' is not known", param="include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f"top_logprobs: needs {LOGPROBS} in include", param="top_logprobs")
    if body.background:
        _refuse_in_background(body)


def _refuse_in_background(body: ResponseBody) -> None:
    if body.store is False:
        raise InvalidRequest("background can only be used when `store` is true", param="background")
    if LOGPROBS in (body.include or ()):
        raise UnsupportedFeature(
            "include: log probabilities are not kept for a background response", param="include"
        )
    if body.cache_salt:
        raise UnsupportedFeature("cache_salt: is not available with background", param="cache_salt")
