"""The answers of the routes, as types for the OpenAPI document.

Fields that are always present are required. Clients must accept further fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coterie.core.events import InferenceMetrics
from coterie.core.plan import AdapterChoice, RouteTrace


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
    # vLLM's field: the stop string or token, or a reason that OpenAI has no word for
    stop_reason: str | int | None = None


class _Completed(BaseModel):
    id: str
    created: int
    model: str
    usage: CompletionUsage
    # details that OpenAI's format has no field for: docs/api.md
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
    # for an expert: the specialist that it belongs to
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
    # for a tool_use
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


class GenerationParams(BaseModel):
    """The sampling values that the request ran with."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    max_tokens: int | None


class ExpertPlan(BaseModel):
    """How a request was routed: the experts in order, the sampling values, and the reasons."""

    experts: list[AdapterChoice]
    composition_order: list[str]
    generation_params: GenerationParams
    prompt_modified: str | None
    confidence: float
    reasons: list[str]
    reasoning_trace: RouteTrace | None


class InferStarted(BaseModel):
    """Data of a stream's `started` event."""

    job_id: str
    model: str
    experts_used: list[str]
    confidence: float
    task_type: str
    degraded: list[str]
    plan: ExpertPlan | None = None


class InferDelta(BaseModel):
    """Data of a stream's `delta` event: the next piece of the text."""

    text: str


class JobSubmission(BaseModel):
    """A request that is answered later."""

    job_id: str
    status: Literal["queued", "processing"]
    submitted_at: str
    estimated_wait_ms: float | None


class InferenceLog(BaseModel):
    """One page of the log, newest first."""

    object: Literal["list"]
    data: list[InferenceMetrics]
    has_more: bool
    next: str | None


class FeedbackAnswer(BaseModel):
    """A verdict that was counted."""

    job_id: str
    verdict: Literal["good", "bad"]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    # null unless return_token_strs was set
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class TokenizerFacts(BaseModel):
    """The settings of tokenizer_config.json, and the named special tokens if there are any."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    added_tokens_decoder: dict[str, Any]
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class ServerLoad(BaseModel):
    server_load: int


class HealthAnswer(BaseModel):
    live: bool
    ready: bool
    specialists: dict[str, dict[str, Any]]


class LivenessAnswer(BaseModel):
    live: bool


class ReadinessAnswer(BaseModel):
    ready: bool


class AboutAnswer(BaseModel):
    """What this server is. A client that accepts HTML gets a page."""

    name: str
    version: str
    ready: bool
    openai_base_url: str
    anthropic_base_url: str
    routes: str
    health: str
    models: str


class VersionAnswer(BaseModel):
    version: str


class Expert(BaseModel):
    """One installed version of an expert."""

    id: str
    object: Literal["expert"]
    name: str
    version: str
    digest: str
    kind: str
    bases: list[str]
    num_virtual_tokens: int
    bytes: int
    installed_at: int
    signer: str | None
    pinned: bool
    description: str


class ListedExpert(Expert):
    # whether this is the version that the name means
    current: bool


class ExpertList(BaseModel):
    object: Literal["list"]
    data: list[ListedExpert]
    # alias -> name@version
    aliases: dict[str, str]


class ShownExpert(Expert):
    versions: list[Expert]
    manifest: dict[str, Any] | None


class DeletedExpert(BaseModel):
    id: str
    object: Literal["expert"]
    deleted: bool
