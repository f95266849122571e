"""The body that a remote server gets for a request: everything that the caller asked for is in it,
or the request is refused. Nothing is left out in silence.

OpenAI's fields first; the others have vLLM's names, which Coterie knows too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from coterie.core.errors import InvalidRequest, UnsupportedFeature
from coterie.core.plan import RemoteAssignment
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Limits,
    Message,
    Prompt,
    ResponseFormat,
    Sampling,
    Text,
    ToolRules,
)

# characters of a token, for estimates
TOKEN_CHARACTERS = 4
# passed on under the same name where the caller gave them
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


def check_request(request: InferenceRequest, prompt: Prompt, context: int) -> None:
    """Refuse what cannot be passed on, before anything is sent."""
    sampling, limits = request.sampling, request.limits
    if sampling.prompt_logprobs is not None:
        raise _unsupported("prompt_logprobs", "a remote server does not send them")
    if sampling.logprobs is not None and not isinstance(prompt, Chat):
        raise _unsupported("logprobs", "a remote server sends them only for chats")
    if (sampling.num_beams or 1) > 1 or sampling.length_penalty is not None:
        raise _unsupported("use_beam_search", "a remote server draws its tokens itself")
    if sampling.penalty_window is not None and _is_penalised(sampling):
        raise _unsupported("repeat_last_n", "a remote server counts all tokens; give -1")
    if limits.truncation is not None:
        raise _unsupported("truncate_prompt_tokens", "tokens of a remote server are not known here")
    if limits.context_size is not None and limits.context_size < context:
        raise _unsupported("context_size", "tokens of a remote server are not known here")
    check_format(request.response_format)


def _is_penalised(sampling: Sampling) -> bool:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return sampling.repetition_penalty not in (None, 1) or any(penalties)


def check_format(answer_format: ResponseFormat | None) -> None:
    """JSON is in OpenAI's API; of the other formats a server may know nothing, and ignore them."""
    if answer_format is not None and answer_format.kind not in ("json_object", "json_schema"):
        text = f"a remote server cannot be held to a {answer_format.kind} grammar; use a schema"
        raise _unsupported("response_format", text)


def estimated_tokens(prompt: Prompt) -> int:
    """For quotas and admission; the remote server tells the number with its answer."""
    if isinstance(prompt, Chat):
        size = sum(len(message.content) + 16 for message in prompt.messages)
        size += sum(len(call.arguments) for m in prompt.messages for call in m.tool_calls)
        size += sum(len(str(tool)) for tool in prompt.tools)
    elif isinstance(prompt, Text):
        size = len(prompt.text)
    else:
        return max(len(prompt.ids), 1)
    return max(size // TOKEN_CHARACTERS, 1)


def path_and_body(assignment: RemoteAssignment, model: str) -> tuple[str, dict[str, Any]]:
    """Where a request goes, below the base URL, and its body."""
    prompt, sampling, limits = assignment.prompt, assignment.sampling, assignment.limits
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= _sampling_fields(sampling) | _limit_fields(limits)
    if assignment.is_limited:
        body["max_tokens"] = limits.max_tokens
    if sampling.constraint is not None:
        body["response_format"] = _format_field(sampling.constraint)
    if not isinstance(prompt, Chat):
        if isinstance(prompt, Text):
            body["prompt"] = prompt.text
            if not prompt.add_special_tokens:
                body["add_special_tokens"] = False
        else:
            body["prompt"] = list(prompt.ids)
        return "/completions", body
    if sampling.logprobs is not None:
        body["logprobs"] = True
        if sampling.logprobs:
            body["top_logprobs"] = sampling.logprobs
    return "/chat/completions", body | _chat_fields(prompt)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    given = ((name, getattr(sampling, name)) for name in _SAMPLING)
    fields = {name: value for name, value in given if value is not None}
    if (sampling.n or 1) > 1:
        fields["n"] = sampling.n
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.rules is not None:
        if sampling.rules.allowed_ids is not None:
            fields["allowed_token_ids"] = list(sampling.rules.allowed_ids)
        if sampling.rules.bad_words:
            fields["bad_words"] = list(sampling.rules.bad_words)
    return fields


def _limit_fields(limits: Limits) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "min_tokens": limits.min_tokens or None,
        "stop": list(limits.stop) or None,
        "stop_token_ids": list(limits.stop_token_ids) or None,
        "ignore_eos": limits.ignore_eos or None,
        "include_stop_str_in_output": limits.text.include_stop or None,
        "skip_special_tokens": None if limits.text.skip_special else False,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _chat_fields(chat: Chat) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": [_message(message) for message in chat.messages]}
    if chat.template_kwargs:
        fields["chat_template_kwargs"] = chat.template_kwargs
    if not chat.add_generation_prompt:
        fields |= {"add_generation_prompt": False, "continue_final_message": not chat.closes_last}
    if chat.template is not None:
        fields["chat_template"] = chat.template
    if chat.add_special_tokens:
        fields["add_special_tokens"] = True
    if chat.tools:
        fields |= _tool_fields(chat, chat.tool_rules or ToolRules(_names(chat)))
    return fields


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _tool_fields(chat: Chat, rules: ToolRules) -> dict[str, Any]:
    strict = set(rules.strict)
    tools = [tool | {"strict": True} if tool.get("name") in strict else tool for tool in chat.tools]
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": tool} for tool in tools]}
    every = set(rules.names) == set(_names(chat))
    named = [{"type": "function", "function": {"name": name}} for name in rules.names]
    if rules.required:
        fields["tool_choice"] = "required" if every and len(named) > 1 else named[0]
    if not every and (len(named) > 1 or not rules.required):
        mode = "required" if rules.required else "auto"
        allowed = {"mode": mode, "tools": named}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    if not rules.parallel:
        fields["parallel_tool_calls"] = False
    return fields


def _names(chat: Chat) -> tuple[str, ...]:
    return tuple(str(tool.get("name")) for tool in chat.tools)


def _format_field(answer_format: ResponseFormat) -> dict[str, Any]:
    check_format(answer_format)
    if answer_format.kind == "json_object":
        return {"type": "json_object"}
    schema = msgspec.json.decode(answer_format.text)
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format: a schema is an object", param="response_format")
    # how our own grammar reads the schema
    options = schema.pop("x-guidance", {})
    is_strict = not (isinstance(options, dict) and options.get("lenient"))
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": is_strict},
    }


def _unsupported(param: str, why: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"{param}: {why}", param=param)
