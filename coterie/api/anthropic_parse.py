"""Anthropic bodies into `Ask` values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coterie.api.anthropic_types import Block, CountBody, MessagesBody, TextBlock
from coterie.api.experts_types import adapter_hints
from coterie.api.inference import Ask, Steering, positive_top_p, seed_of
from coterie.core.errors import InvalidRequest, Unsupported
from coterie.core.request import Chat, Limits, Message, RouteHints, Sampling

# a model's own earlier thoughts are not read again
_UNREAD = ("thinking", "redacted_thinking")
_TOOLS = ("tool_use", "tool_result", "server_tool_use", "web_search_tool_result")


def messages_ask(body: MessagesBody, steering: Steering, thinks: bool) -> Ask:
    metadata = body.metadata
    return Ask(
        hints=hints_of(body),
        prompt=prompt_of(body, thinks),
        sampling=Sampling(
            temperature=body.temperature,
            top_p=positive_top_p(body.top_p),
            top_k=body.top_k,
            seed=seed_of(body.seed),
        ),
        limits=Limits(
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            priority=steering.priority,
            timeout_s=steering.timeout_s,
        ),
        sessions=(body.cache_key, None if metadata is None else metadata.user_id),
    )


def hints_of(body: CountBody) -> RouteHints:
    return RouteHints(body.model, adapter_hints(body.experts))


def prompt_of(body: CountBody, thinks: bool) -> Chat:
    """One system message, then the turns; a last turn of the assistant is to be continued."""
    if body.tools:
        raise Unsupported("tools: tool calling is not available yet", param="tools")
    system = [_system_text(body.system)] if body.system else []
    turns: list[Message] = []
    for index, turn in enumerate(body.messages):
        text = _text(turn.content, f"messages.{index}")
        if turn.role == "system":
            system.append(text)
        elif turns and turns[-1].role == turn.role:
            # the vendor reads neighbours of one role as one turn
            turns[-1] = Message(turn.role, f"{turns[-1].content}\n{text}")
        else:
            turns.append(Message(turn.role, text))
    if not turns:
        raise InvalidRequest("messages: at least one user message is required", param="messages")
    if system:
        turns.insert(0, Message("system", "\n\n".join(system)))
    continues = turns[-1].role == "assistant"
    kwargs = _thinking(body) if thinks else {}
    return Chat(tuple(turns), kwargs, add_generation_prompt=not continues)


def _thinking(body: CountBody) -> dict[str, Any]:
    """Templates of thinking models read this flag; the vendor's default is not to think."""
    return {"enable_thinking": body.thinking is not None and body.thinking.type != "disabled"}


def _system_text(system: str | list[TextBlock]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system)


def _text(content: str | Iterable[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, block in enumerate(content):
        param = f"{where}.content.{index}"
        if block.type == "text":
            if block.text is None:
                raise InvalidRequest(f"{param}.text: is required", param=param)
            texts.append(block.text)
        elif block.type in _TOOLS:
            raise Unsupported(f"{param}: tool calling is not available yet", param=param)
        elif block.type not in _UNREAD:
            raise Unsupported(f"{param}: only text blocks can be read here", param=param)
    return "\n".join(texts)
