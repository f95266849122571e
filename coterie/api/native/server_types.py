"""Bodies of the tokenizer endpoints, shaped like vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coterie.api.body import Body
from coterie.api.openai.types import (
    MAX_MESSAGES,
    ChatMessage,
    ChatTemplateText,
    Documents,
    TemplateKwargs,
    TokenId,
    ToolSpec,
)
from coterie.api.query import Query
from coterie.api.tools.base import MAX_TOOLS


class TokenizeBody(Body):
    """Either `prompt` or `messages`. Without `model` the default one answers."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    # None = of a prompt, not of messages: templates write their own
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    chat_template: ChatTemplateText | None = None
    documents: Documents | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


class TokenizerQuery(Query):
    """Without `model` the default one is told of."""

    model: str | None = None
