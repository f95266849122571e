"""Turns Ollama's bodies into `ParsedRequest` values: meanings of fields, and refusals."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from coterie.api.body_fields import adapter_hints, positive_top_p, refuse_misplaced_fields
from coterie.api.dialect import CallerInfo, ParsedRequest, user_id_of
from coterie.api.ollama.types import (
    IGNORED_OPTIONS,
    LOADING_OPTIONS,
    OllamaCall,
    OllamaChatBody,
    OllamaFields,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from coterie.api.openai.parse import tools_of
from coterie.api.response_format import schema_format
from coterie.api.tools.base import ToolSet, with_tools
from coterie.core.errors import InvalidRequest, UnsupportedFeature
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Limits,
    Message,
    Prompt,
    ResponseFormat,
    RouteHints,
    Sampling,
    Text,
    ToolCall,
)
from coterie.core.sampling import SAMPLING_FIELDS
from coterie.core.value_check import is_deeper
from coterie.models.text.tool_format import MAX_DEPTH

FORMAT_FIELD = "format"
_ROLES = ("system", "user", "assistant", "tool")
# fields of other APIs, and of `options`, that are not fields of the body; what to do instead
_MISPLACED = {
    "max_tokens": "use options.num_predict",
    "max_completion_tokens": "use options.num_predict",
    "response_format": "use format",
    "json_schema": "use format",
    "guided_json": "use format",
    "grammar": "use format",
    "n_predict": "use options.num_predict",
    "repetition_penalty": "use options.repeat_penalty",
} | {
    name: f"belongs into options: options.{name}"
    for name in OllamaOptions.model_fields
    if name not in {*OllamaFields.model_fields, *LOADING_OPTIONS, *IGNORED_OPTIONS}
}
_MISPLACED_IN_CHAT = _MISPLACED | {
    name: "is a field of /api/generate"
    for name in OllamaGenerateBody.model_fields
    if name not in OllamaChatBody.model_fields
}
_MISPLACED_IN_GENERATE = _MISPLACED | dict.fromkeys(
    ("messages", "tools"), "is a field of /api/chat"
)
_MOST_COUNTED = int(SAMPLING_FIELDS["penalty_window"].high)
_NO_OPTIONS = OllamaOptions.model_validate({})


def parse_chat(body: OllamaChatBody, model: str, caller: CallerInfo, id_: str) -> ParsedRequest:
    """`model`: the name as this server knows it."""
    tools = _tool_set(body)
    turns = _turns(body.messages or ())
    if body.system and turns and turns[0].role != "system":
        turns = (Message("system", body.system), *turns)
    chat = Chat(turns, _thinking(body))
    prompt = chat if tools is None else with_tools(chat, tools)
    return _parsed(body, prompt, model, caller, id_, tools)


def parse_generate(
    body: OllamaGenerateBody, model: str, caller: CallerInfo, id_: str
) -> ParsedRequest:
    """A chat of one question; with `raw` the text itself. A suffix and a context are added when the
    model's tokens are known."""
    _refuse_generate(body)
    if body.raw:
        return _parsed(body, Text(body.prompt or ""), model, caller, id_)
    system = (Message("system", body.system),) if body.system else ()
    turns = (*system, Message("user", body.prompt or ""))
    return _parsed(body, Chat(turns, _thinking(body)), model, caller, id_)


def _parsed(
    body: OllamaFields,
    prompt: Prompt,
    model: str,
    caller: CallerInfo,
    id_: str,
    tools: ToolSet | None = None,
) -> ParsedRequest:
    generates = isinstance(body, OllamaGenerateBody)
    misplaced = _MISPLACED_IN_GENERATE if generates else _MISPLACED_IN_CHAT
    refuse_misplaced_fields(body.model_extra, misplaced)
    if (body.model_extra or {}).get("_debug_render_only"):
        text = "_debug_render_only: use /apply-template"
        raise UnsupportedFeature(text, param="_debug_render_only")
    options = body.options or _NO_OPTIONS
    request = InferenceRequest(
        id=id_,
        prompt=prompt,
        sampling=_sampling(body, options),
        limits=_limits(body, options, caller),
        hints=RouteHints(model, adapter_hints(body.experts), intent=body.intent or caller.intent),
        response_format=_format(body.format),
        session=caller.session_key(body.cache_key, body.user),
        tenant=caller.tenant,
        arrived_at=caller.arrived_at,
        user_id=user_id_of(body.user),
    )
    return ParsedRequest(request, body.stream is not False, tools, FORMAT_FIELD)


def _refuse_generate(body: OllamaGenerateBody) -> None:
    if body.template:
        raise UnsupportedFeature(
            "template: the model's own template is used; give raw with the whole prompt",
            param="template",
        )
    for name in ("images", "width", "height", "steps"):
        if getattr(body, name, None):
            raise UnsupportedFeature(f"{name}: only text can be read and made here", param=name)
    if body.raw and (body.system or body.context):
        raise InvalidRequest("raw mode does not support template, system, or context", param="raw")
    if body.suffix:
        for name in ("system", "context", "format"):
            if getattr(body, name):
                raise InvalidRequest(f"{name}: not together with suffix", param=name)


def _sampling(body: OllamaFields, options: OllamaOptions) -> Sampling:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    # no token is penalised if none of the last ones counts, not by the model's own penalty either
    is_off, last = options.repeat_last_n == 0, options.repeat_last_n or -1
    return Sampling(
        temperature=options.temperature,
        top_p=positive_top_p(options.top_p),
        top_k=None if options.top_k is None else max(options.top_k, 0),
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=1.0 if is_off else options.repeat_penalty,
        presence_penalty=None if is_off else options.presence_penalty,
        frequency_penalty=None if is_off else options.frequency_penalty,
        seed=None if options.seed is None or options.seed < 0 else options.seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        penalty_window=None if last < 0 else min(last, _MOST_COUNTED),
    )


def _limits(body: OllamaFields, options: OllamaOptions, caller: CallerInfo) -> Limits:
    stop = options.stop
    most = body.num_predict if options.num_predict is None else options.num_predict
    return Limits(
        max_tokens=None if most is None or most <= 0 else most,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        priority=caller.priority(body.priority),
        timeout_s=caller.timeout_s,
        context_size=options.num_ctx or None,
    )


def ignored_options(options: OllamaOptions | None) -> list[str]:
    """The given options that would change the answer in Ollama and do not here."""
    given = () if options is None else options.model_fields_set & IGNORED_OPTIONS
    return sorted(name for name in given if getattr(options, name) is not None)


def keep_alive_s(given: float | str) -> float:
    """Seconds; below 0 = for ever."""
    if not isinstance(given, str):
        return given
    sign = -1 if given.startswith("-") else 1
    return sign * sum(
        float(number) * _UNITS.get(unit, 1.0) for number, unit in _PARTS.findall(given)
    )


_PARTS = re.compile(r"(\d+\.?\d*|\.\d+)([^\d.+-]*)")
_UNITS = {
    "ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0,
    "h": 3600.0,
}  # fmt: skip


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if given == "json":
        return ResponseFormat("json_object")
    assert isinstance(given, dict)
    return schema_format(given, param=FORMAT_FIELD)


def _thinking(body: OllamaFields) -> dict[str, Any]:
    """Only the templates of thinking models read these."""
    if body.think is None:
        return {}
    if isinstance(body.think, bool):
        return {"enable_thinking": body.think}
    return {"enable_thinking": True, "reasoning_effort": body.think}


def _tool_set(body: OllamaChatBody) -> ToolSet | None:
    if not body.tools:
        return None
    tools = tools_of(body.tools)
    return ToolSet(tools, frozenset(tool.name for tool in tools))


class _OpenCalls:
    """The calls that no message has answered yet. Ollama's messages often say only which function
    they are the result of, or not even that."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        # ids in their order, all and by name; those that were answered leave late
        self._all: deque[str] = deque()
        self._by_name: dict[str, deque[str]] = {}
        self._count = 0

    def add(self, calls: Sequence[OllamaCall], where: str) -> tuple[ToolCall, ...]:
        made = []
        for index, call in enumerate(calls):
            arguments, name = call.function.arguments or {}, call.function.name
            if is_deeper(arguments, MAX_DEPTH):
                param = f"{where}.tool_calls.{index}"
                text = f"{param}: the arguments are nested deeper than {MAX_DEPTH}"
                raise InvalidRequest(text, param=param)
            id_ = call.id or f"call_{self._count}"
            made.append(ToolCall(id_, name, json.dumps(arguments, ensure_ascii=False)))
            self._count += 1
            self._open.add(id_)
            self._all.append(id_)
            self._by_name.setdefault(name, deque()).append(id_)
        return tuple(made)

    def answered(self, message: OllamaMessage, where: str) -> str:
        """The id of the call that the message answers."""
        found, name = message.tool_call_id, message.tool_name or message.name
        if found is None:
            found = self._first(self._all if name is None else self._by_name.get(name, deque()))
        if found not in self._open:
            raise InvalidRequest(f"{where}: answers no call before it", param=where)
        self._open.discard(found)
        return found

    def _first(self, ids: deque[str]) -> str:
        while ids and ids[0] not in self._open:
            ids.popleft()
        return ids[0] if ids else ""


def _turns(messages: Sequence[OllamaMessage]) -> tuple[Message, ...]:
    calls = _OpenCalls()
    turns = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.role.lower()
        if role not in _ROLES:
            listed = ", ".join(_ROLES)
            raise InvalidRequest(f"{where}.role: must be one of {listed}", param=f"{where}.role")
        if message.images:
            text = f"{where}.images: only text can be read here"
            raise UnsupportedFeature(text, param=f"{where}.images")
        if message.tool_calls and role != "assistant":
            text = f"{where}.tool_calls: only the assistant calls tools"
            raise InvalidRequest(text, param=f"{where}.tool_calls")
        made = calls.add(message.tool_calls or (), where)
        answered = calls.answered(message, where) if role == "tool" else None
        turns.append(Message(role, message.content or "", made, answered))
    return tuple(turns)
