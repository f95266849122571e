"""Anthropic bodies into `Ask` values."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from coterie.api.admin.experts_types import adapter_hints
from coterie.api.anthropic.tools import toolbox_of, turns_in
from coterie.api.anthropic.types import CountBody, MessagesBody, TextBlock
from coterie.api.inference import Ask, Steering, positive_top_p, seed_of
from coterie.api.response_format import response_format_of
from coterie.api.tools.base import check_results
from coterie.api.vendor_fields import refuse_openai_fields
from coterie.core.errors import InvalidRequest
from coterie.core.request import Chat, Limits, Message, ResponseFormat, RouteHints, Sampling

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer


def messages_ask(body: MessagesBody, steering: Steering, prompt: Chat) -> Ask:
    refuse_openai_fields(body.model_extra)
    metadata = body.metadata
    wanted, field = _format(body)
    return Ask(
        hints=hints_of(body),
        prompt=prompt,
        sampling=Sampling(
            temperature=body.temperature,
            top_p=positive_top_p(body.top_p),
            top_k=body.top_k,
            seed=seed_of(body.seed),
        ),
        limits=Limits(
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            priority=steering.priority(body.priority),
            timeout_s=steering.timeout_s,
        ),
        sessions=(body.cache_key, None if metadata is None else metadata.user_id),
        response_format=wanted,
        format_field=field,
        tools=toolbox_of(body),
    )


def _format(body: MessagesBody) -> tuple[ResponseFormat | None, str]:
    newer = None if body.output_config is None else body.output_config.format
    given, field = body.output_format, "output_format"
    if newer is not None:
        given, field = newer, "output_config.format"
    return response_format_of(given, param=field, closed=True), field


def hints_of(body: CountBody) -> RouteHints:
    return RouteHints(body.model, adapter_hints(body.experts))


def prompt_of(body: CountBody) -> Chat:
    """One system message, then the turns; a last turn of the assistant is to be continued."""
    system = [_system_text(body.system)] if body.system else []
    spoken: list[Message] = []
    for index, turn in enumerate(body.messages):
        for message in turns_in(turn, f"messages.{index}"):
            if message.role == "system":
                system.append(message.content)
            else:
                spoken.append(message)
    turns = _joined(spoken)
    if not turns:
        raise InvalidRequest("messages: at least one user message is required", param="messages")
    check_results(turns)
    if system:
        turns.insert(0, Message("system", "\n\n".join(system)))
    continues = turns[-1].role == "assistant"
    tools = toolbox_of(body)
    told = () if tools is None else tools.fields()
    return Chat(tuple(turns), add_generation_prompt=not continues, tools=told)


def _joined(messages: list[Message]) -> list[Message]:
    """The vendor reads neighbours of one role as one turn; each result is one by itself."""
    turns: list[Message] = []
    for role, neighbours in groupby(messages, lambda message: message.role):
        group = list(neighbours)
        if role == "tool" or len(group) == 1:
            turns += group
            continue
        text = "\n".join(message.content for message in group if message.content)
        calls = tuple(call for message in group for call in message.tool_calls)
        turns.append(Message(role, text, calls))
    return turns


def told_to_think(chat: Chat, body: CountBody, tokenizer: Tokenizer) -> Chat:
    """Templates of thinking models read a flag; the vendor's default is not to think."""
    if tokenizer.reasoning is None:
        return chat
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    return replace(chat, template_kwargs={"enable_thinking": thinks})


def _system_text(system: str | list[TextBlock]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system)
