"""What the vendors' routes answer, as types for the OpenAPI document.

The fields that are always there are required; both vendors' clients and ours allow more.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class CachedDetails(BaseModel):
    cached_tokens: int


class ReasoningDetails(BaseModel):
    reasoning_tokens: int


class CompletionUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    completion_tokens_details: ReasoningDetails


class ChatFunctionCall(BaseModel):
    name: str
    arguments: str


class ChatToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: ChatFunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None = None
    # why it ended where the vendor has no word for it
    stop_reason: str | int | None = None


class _Completed(BaseModel):
    id: str
    created: int
    model: str
    usage: CompletionUsage
    # what it cost: docs/api.md
    coterie: dict[str, Any] = {}


class ChatCompletion(_Completed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None = None
    stop_reason: str | int | None = None


class TextCompletion(_Completed):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    # the specialist that an expert is for
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModel]


class AnthropicModel(BaseModel):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(BaseModel):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ContentBlock(BaseModel):
    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    # of a tool_use
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    coterie: dict[str, Any] = {}


class TokenCount(BaseModel):
    input_tokens: int
