"""Bodies of the Anthropic dialect. Unknown fields of a body or of a block are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.api.body import Body
from coterie.api.experts_types import Experts

StopSequence = Annotated[str, Field(min_length=1, max_length=1000)]


class Block(Body):
    """A content block; text is what a model here can read."""

    type: str
    text: str | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str


class Turn(Body):
    # `system` between the turns is what Claude Code sends
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Metadata(Body):
    user_id: str | None = None


class Thinking(Body):
    type: str


class CountBody(Body):
    model: str = Field(min_length=1, max_length=512)
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Any] | None = None
    thinking: Thinking | None = None
    # ours: the same meaning as in the OpenAI dialect
    experts: Experts | None = None


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1, le=2**63 - 1)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    stop_sequences: Annotated[list[StopSequence], Field(max_length=32)] | None = None
    metadata: Metadata | None = None
    cache_key: str | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
