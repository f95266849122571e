"""Bodies of the Anthropic dialect. `body_fields.py` says which unknown fields of a body are
refused; the other unknown fields, and those of a block, are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from coterie.api.body import RequestBody
from coterie.api.body_fields import Experts, Intent, MaxTokens, sampling_field, top_p_from_zero
from coterie.api.openai.types import MAX_MESSAGES, Urgency
from coterie.api.tools.base import MAX_TOOLS

StopSequence = Annotated[str, Field(min_length=1, max_length=1000)]


class ResultBlock(RequestBody):
    """A part of a tool's result."""

    type: str
    text: str | None = None


class InputBlock(ResultBlock):
    """A content block: text, a tool call or a tool result. Other types are refused."""

    # tool_use
    id: str | None = Field(None, min_length=1, max_length=256)
    name: str | None = Field(None, max_length=256)
    input: dict[str, Any] | None = None
    # tool_result
    tool_use_id: str | None = Field(None, max_length=256)
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class TextBlock(RequestBody):
    type: Literal["text"]
    text: str


class InputMessage(RequestBody):
    # Claude Code sends `system` messages between the turns
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class MessageMetadata(RequestBody):
    user_id: str | None = None


class ThinkingConfig(RequestBody):
    type: str


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class AnthropicToolSpec(RequestBody):
    # left out, or "custom", for a tool that the caller runs
    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(RequestBody):
    format: dict[str, Any] | None = None


class CountBody(RequestBody):
    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512)
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    # extensions of this server, with the same meaning as in the OpenAI dialect
    experts: Experts | None = None
    intent: Intent | None = None


class MessagesBody(CountBody):
    max_tokens: MaxTokens
    stream: bool | None = None
    temperature: float | None = sampling_field("temperature", high=1)
    top_p: float | None = top_p_from_zero()
    top_k: int | None = sampling_field("top_k", low=0)
    stop_sequences: Annotated[list[StopSequence], Field(max_length=32)] | None = None
    metadata: MessageMetadata | None = None
    cache_key: str | None = None
    # a conversation that the server stores: not supported
    thread: dict[str, Any] | None = None
    # the answer format, under its older and its newer name
    output_format: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    seed: int | None = sampling_field("seed")
    # from vLLM
    priority: Urgency | None = None
