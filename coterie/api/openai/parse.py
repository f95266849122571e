"""Turns OpenAI bodies into `ParsedRequest` values: meanings of fields, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from coterie.api.body_fields import adapter_hints, positive_top_p, refuse_fields, seed_of
from coterie.api.dialect import CallerInfo, ParsedRequest, user_id_of
from coterie.api.openai.types import (
    MAX_PROMPTS,
    ChatBody,
    ChatMessage,
    ChosenTool,
    CompletionBody,
    CompletionFields,
    ContentPart,
    TokenizeBody,
    ToolSpec,
)
from coterie.api.response_format import vendor_format_of
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
    Prompt,
    PromptTruncation,
    RouteHints,
    Sampling,
    Text,
    TextRules,
    TokenRules,
    Tokens,
    ToolCall,
)

# OpenAI's default for /v1/completions; a chat may fill the context
COMPLETION_TOKENS = 16
_SPOKEN = ("text", "input_text", "output_text")


def parse_chat(body: ChatBody, caller: CallerInfo, request_id: str) -> ParsedRequest:
    _refuse_chat(body)
    refuse_common(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = tool_set_of(body)
    prompt = chat_prompt(body)
    answer_format, field = vendor_format_of(body)
    request = InferenceRequest(
        id=request_id,
        prompt=prompt if tools is None else with_tools(prompt, tools),
        sampling=sampling_of(body, logprobs, body.prompt_logprobs),
        limits=limits_of(body, body.max_completion_tokens or body.max_tokens, caller),
        hints=hints_of(body, caller),
        response_format=answer_format,
        session=session_of(body, caller),
        tenant=caller.salted_tenant(body.cache_salt),
        arrived_at=caller.arrived_at,
        user_id=user_id_of(*users_of(body)),
    )
    return ParsedRequest(request, bool(body.stream), tools, field)


def parse_completion(
    body: CompletionBody, caller: CallerInfo, answer_id: str
) -> list[ParsedRequest]:
    """One parsed request per prompt."""
    _refuse_completion(body)
    refuse_common(body)
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    logprob_counts = (body.prompt_logprobs, body.logprobs if body.echo else None)
    scored = [count for count in logprob_counts if count is not None]
    answer_format, field = vendor_format_of(body)
    # an engine always produces at least one token; with `scores_prompt` the answer leaves it out
    first = InferenceRequest(
        id=answer_id,
        prompt=Text(""),
        sampling=sampling_of(body, body.logprobs, max(scored, default=None)),
        limits=limits_of(body, max(max_tokens, 1), caller),
        hints=hints_of(body, caller),
        response_format=answer_format,
        session=session_of(body, caller),
        tenant=caller.salted_tenant(body.cache_salt),
        arrived_at=caller.arrived_at,
        user_id=user_id_of(*users_of(body)),
    )
    prompts = _prompts(body)
    return [
        ParsedRequest(
            replace(first, id=part_id(answer_id, index, len(prompts)), prompt=prompt),
            bool(body.stream),
            format_field=field,
        )
        for index, prompt in enumerate(prompts)
    ]


def part_id(answer_id: str, prompt: int, num_prompts: int) -> str:
    """The id of one prompt of a request."""
    return answer_id if num_prompts == 1 else f"{answer_id}-{prompt}"


def scores_prompt(body: CompletionBody) -> bool:
    return body.max_tokens == 0


def _prompts(body: CompletionBody) -> list[Prompt]:
    prompt, special = body.prompt, body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [Text(prompt, special)]
    if isinstance(prompt[0], int):
        return [Tokens(tuple(token for token in prompt if isinstance(token, int)))]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} in one request", param="prompt")
    return [Text(item, special) if isinstance(item, str) else _tokens(item) for item in prompt]


def _tokens(item: int | list[int]) -> Tokens:
    return Tokens((item,) if isinstance(item, int) else tuple(item))


def chat_prompt(body: ChatBody | TokenizeBody) -> Chat:
    """The messages for the template; the model starts a new turn or continues the last one."""
    messages = body.messages or []
    turns = tuple(message_of(message, index) for index, message in enumerate(messages))
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if body.continue_final_message and turns[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's",
            param="continue_final_message",
        )
    check_results(turns)
    opens = not body.continue_final_message and body.add_generation_prompt is not False
    documents = {} if body.documents is None else {"documents": body.documents}
    return Chat(
        turns,
        documents | (body.chat_template_kwargs or {}),
        add_generation_prompt=opens,
        closes_last=not body.continue_final_message,
        template=body.chat_template,
        add_special_tokens=bool(body.add_special_tokens),
    )


def echoed(body: ChatBody) -> str:
    """The text that the answer repeats: the assistant's turn that it continues."""
    if not body.echo:
        return ""
    last = message_of(body.messages[-1], len(body.messages) - 1)
    return last.content if last.role == "assistant" else ""


def message_of(message: ChatMessage, index: int) -> Message:
    where = f"messages.{index}"
    if message.role == "function" or message.function_call:
        raise UnsupportedFeature(f"{where}: functions are called as tools here", param=where)
    calls = calls_of(message, where)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{where}.tool_call_id: is required", param=f"{where}.tool_call_id")
    # templates use the older name
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None:
        if role != "assistant":
            raise InvalidRequest(f"{where}.content: is required", param=f"{where}.content")
        content = ""
    text = content if isinstance(content, str) else spoken_text(content, f"{where}.content")
    return Message(role, text, calls, message.tool_call_id if role == "tool" else None)


def spoken_text(parts: Iterable[ContentPart], where: str) -> str:
    """The text of `parts`; `where` is their path in the body."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        param = f"{where}.{index}"
        if part.type in _SPOKEN and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in _SPOKEN or part.type == "refusal":
            raise InvalidRequest(f"{param}: its text is missing", param=param)
        else:
            raise UnsupportedFeature(f"{param}: only text parts can be read here", param=param)
    return "\n".join(texts)


def _refuse_chat(body: ChatBody) -> None:
    if body.functions:
        raise UnsupportedFeature("functions: give them as tools", param="functions")
    if body.modalities and body.modalities != ["text"]:
        raise UnsupportedFeature("modalities: only text can be made here", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")


def _refuse_completion(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedFeature("best_of: is not available; use n", param="best_of")
    if body.suffix:
        raise UnsupportedFeature(
            "suffix: the models here do not fill in the middle", param="suffix"
        )
    if scores_prompt(body) and not body.echo:
        raise InvalidRequest("max_tokens: 0 is only allowed with echo", param="max_tokens")


def refuse_common(body: CompletionFields) -> None:
    refuse_fields(body.model_extra)
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids: names no token", param="allowed_token_ids")
    if body.bad_words and not all(map(str.strip, body.bad_words)):
        raise InvalidRequest("bad_words: a word must be more than blanks", param="bad_words")
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens: must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs: are not part of a stream", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream to be true", param="stream_options")


def refuse_token_fields(body: ChatBody | CompletionBody) -> None:
    """For a model on another server, whose tokens are not known here."""
    is_text = isinstance(body, CompletionBody)
    wanted = {
        "return_token_ids": body.return_token_ids,
        "return_tokens_as_token_ids": body.return_tokens_as_token_ids,
        "echo": is_text and body.echo,
        "logprobs": is_text and body.logprobs is not None,
    }
    for name, value in wanted.items():
        if value:
            text = f"{name}: this model is on another server, its tokens are not known here"
            raise UnsupportedFeature(text, param=name)


def sampling_of(
    body: CompletionFields, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    beams = (body.n or 1) if body.use_beam_search else None
    return Sampling(
        temperature=body.temperature,
        top_p=positive_top_p(body.top_p),
        # -1 and 0 both mean "off"
        top_k=body.top_k if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        typical_p=body.typical_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=logit_biases(body.logit_bias),
        seed=seed_of(body.seed),
        n=body.n,
        num_beams=beams,
        length_penalty=body.length_penalty,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        rules=_rules(body),
    )


def _rules(body: CompletionFields) -> TokenRules | None:
    if body.allowed_token_ids is None and not body.bad_words:
        return None
    allowed = body.allowed_token_ids
    return TokenRules(None if allowed is None else tuple(allowed), tuple(body.bad_words or ()))


def _truncation(body: CompletionFields) -> PromptTruncation | None:
    most = body.truncate_prompt_tokens
    if most is None:
        return None
    return PromptTruncation(None if most < 0 else most, keeps_start=body.truncation_side == "right")


def logit_biases(given: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    if not given:
        return ()
    odd = [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if odd:
        named = ", ".join(repr(key[:40]) for key in odd[:5])
        raise InvalidRequest(f"logit_bias: keys must be token ids, not {named}", param="logit_bias")
    return tuple(sorted((int(key), bias) for key, bias in given.items()))


def limits_of(body: CompletionFields, max_tokens: int | None, caller: CallerInfo) -> Limits:
    stop = body.stop
    return Limits(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        priority=caller.priority(body.priority),
        timeout_s=caller.timeout_s,
        text=TextRules(
            skip_special=body.skip_special_tokens is not False,
            include_stop=bool(body.include_stop_str_in_output),
        ),
        truncation=_truncation(body),
    )


def hints_of(body: CompletionFields, caller: CallerInfo) -> RouteHints:
    intent = body.intent or caller.intent
    return RouteHints(body.model, adapter_hints(body.experts), intent=intent)


def session_of(body: CompletionFields, caller: CallerInfo) -> str | None:
    return caller.session_key(body.cache_key or body.prompt_cache_key, *users_of(body))


def users_of(body: CompletionFields) -> tuple[str | None, str | None]:
    """The fields that name a user."""
    user_id = (body.metadata or {}).get("user_id")
    return user_id if isinstance(user_id, str) else None, body.user


def tool_set_of(body: ChatBody) -> ToolSet | None:
    """The tools of a request. None if the model must not call any."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: there are no tools to choose", param="tool_choice")
        return None
    tools = tools_of(body.tools)
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
    # if a call is forced, one call is made unless the request allows more
    parallel = body.parallel_tool_calls
    return ToolSet(tools, names, required, not required if parallel is None else parallel)


def tools_of(specs: Sequence[ToolSpec]) -> tuple[Tool, ...]:
    """Checked, as each one and together."""
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(specs))
    check_tools(tools)
    return tools


def tool_fields(specs: Sequence[ToolSpec]) -> tuple[dict[str, Any], ...]:
    """The tools as the prompt shows them."""
    tools = tools_of(specs)
    return ToolSet(tools, frozenset(tool.name for tool in tools)).fields() if tools else ()


def _tool(spec: ToolSpec, where: str) -> Tool:
    if spec.type != "function":
        raise UnsupportedFeature(f"{where}.type: only functions can be called here", param=where)
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
