"""Bodies of the Anthropic dialect. Of unknown fields of a body `vendor_fields.py` says which are
refused; others, and those of a block, are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from coterie.api.admin.experts import Experts
from coterie.api.body import Body
from coterie.api.openai.types import MAX_MESSAGES, Urgency
from coterie.api.tools.base import MAX_TOOLS

StopSequence = Annotated[str, Field(min_length=1, max_length=1000)]


class ResultBlock(Body):
    """A part of a tool's result."""

    type: str
    text: str | None = None


class Block(ResultBlock):
    """A content block; words, calls of tools and their results are what a model here can read."""

    # tool_use
    id: str | None = Field(None, min_length=1, max_length=256)
    name: str | None = Field(None, max_length=256)
    input: dict[str, Any] | None = None
    # tool_result
    tool_use_id: str | None = Field(None, max_length=256)
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


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


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class ToolSpec(Body):
    # left out for a tool of the caller's own
    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    format: dict[str, Any] | None = None


class CountBody(Body):
    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512)
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
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
    # conversations that the server keeps
    thread: dict[str, Any] | None = None
    # the same thing under its older and its newer name
    output_format: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    # vLLM's
    priority: Urgency | None = None
