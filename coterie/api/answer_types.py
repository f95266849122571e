"""The answers of the routes, as types for the OpenAPI document.

Fields that are always present are required. Clients must accept further fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coterie.core.events import InferenceMetrics
from coterie.core.plan import AdapterChoice, RouteTrace
from coterie.core.receipt import Receipt
from coterie.core.sampling import SampledWith


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


class ResponseTokenDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: ResponseTokenDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class ResponseFault(BaseModel):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteReason(BaseModel):
    reason: Literal["max_output_tokens"]
    # a reason that OpenAI has no word for
    stop_reason: str | None = None


class ResponseObject(BaseModel):
    """Fields of the request that an answer repeats are not listed."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
    model: str
    # messages, reasoning, calls of functions and of custom tools
    output: list[dict[str, Any]]
    error: ResponseFault | None
    incomplete_details: IncompleteReason | None
    usage: ResponseUsage | None
    previous_response_id: str | None
    store: bool
    background: bool
    coterie: dict[str, Any] = {}


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class ResponseTokenCount(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    # for an expert: the specialist that it belongs to
    parent: str | None
    max_model_len: int
    # what it makes
    kind: Literal["text", "encoder"]
    # by field: what a request that sets nothing runs with; empty where another server decides
    sampling: dict[str, SampledWith]
    # added to chats without a system message
    system_prompt: str | None
    # what its weights take in memory, without routed experts; null of a remote model or an expert
    weight_bytes: int | None


class EncoderUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(BaseModel):
    object: Literal["embedding"]
    index: int
    # base64: little-endian float32
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EncoderUsage


class RankedDocument(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankAnswer(BaseModel):
    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: EncoderUsage


class PairScore(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: EncoderUsage


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
    # objects of id and piece if `with_pieces` was set
    tokens: list[int] | list[dict[str, Any]]
    # null unless return_token_strs was set
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str
    content: str


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
    # absent without a key, if keys are needed
    specialists: dict[str, dict[str, Any]] | None = None


class LivenessAnswer(BaseModel):
    live: bool


class ReadinessAnswer(BaseModel):
    ready: bool


class AboutAnswer(BaseModel):
    """What this server is. A client that accepts HTML gets the chat page."""

    name: str
    version: str
    ready: bool
    openai_base_url: str
    anthropic_base_url: str
    routes: str
    health: str
    models: str
    dashboard: str


class VersionAnswer(BaseModel):
    version: str


class ReceiptList(BaseModel):
    object: Literal["list"]
    data: list[Receipt]
    has_more: bool
    # `before` of the next page
    next: int | None


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
    # whether this is the version that the name alone means
    current: bool


class ChangedExpert(Expert):
    # `promote`: the canary that was started; null if the version became current at once
    canary: dict[str, Any] | None = None


class ExpertList(BaseModel):
    object: Literal["list"]
    data: list[Expert]
    # alias -> name@version
    aliases: dict[str, str]


class ShownExpert(Expert):
    versions: list[Expert]
    manifest: dict[str, Any] | None


class DeletedExpert(BaseModel):
    id: str
    object: Literal["expert"]
    deleted: bool


class ShownQuantiles(BaseModel):
    """Seconds; null if nothing was measured."""

    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    count: int


class ShownCorrectness(BaseModel):
    """`rate` and its 95% interval are null while too few answers were judged."""

    state: Literal["known", "unknown"]
    valid: int
    judged: int
    rate: float | None
    low: float | None
    high: float | None
    floor: float | None


class ShownEnds(BaseModel):
    """Of answers whose limit is at least `limit` tokens, the share that ended by themselves: the
    newest `judged` of them, and those before. null while too few are known."""

    newest: float | None
    usual: float | None
    judged: int
    limit: int | None


class ShownPromise(BaseModel):
    """null = no promise."""

    ttft_p95_s: float | None
    itl_p95_s: float | None
    correctness: float | None


class KeptPromises(BaseModel):
    """null = nothing is promised, or too little is known."""

    ttft_p95_s: bool | None
    itl_p95_s: bool | None
    correctness: bool | None


class SpecialistSloAnswer(BaseModel):
    """What one specialist delivers, in the last `window_s` seconds, and how it stands."""

    specialist: str
    breaker: Literal["closed", "shadow_only", "ejected", "draining"]
    # demoted by an admin
    held: bool
    changed_at: float | None
    spike: Literal["normal", "fewer_shadows", "spill", "priority_floor"]
    load: float
    running: int
    waiting: int
    ejected: list[str]
    # an admin lets what runs end; nothing new begins. The second: replicas of which the same is so
    draining: bool
    drained: list[str]
    ttft: ShownQuantiles
    itl: ShownQuantiles
    # None if nothing was measured
    admission_to_first_token_p95_s: float | None
    requests: int
    preempted_share: float | None
    correctness: ShownCorrectness
    ended: ShownEnds
    promised: ShownPromise
    kept: KeptPromises
    fallback: str
    window_s: float


class SpecialistStatus(SpecialistSloAnswer):
    object: Literal["ensemble.specialist"]


class ShownReplica(BaseModel):
    replica: str
    draining: bool
    # requests that were sent there and have not ended
    in_flight: int


class ReplicaStatus(ShownReplica):
    object: Literal["ensemble.replica"]


class SloList(BaseModel):
    object: Literal["list"]
    data: list[SpecialistSloAnswer]


class ShownIntent(BaseModel):
    shadow_below: float
    spill_below: float
    priority_floor: int
    high_stakes: bool
    # an admin changed them
    overridden: bool
    # the specialist that took the intent over after a canary; "" = none
    owner: str


class IntentStatus(ShownIntent):
    object: Literal["ensemble.intent"]
    intent: str


class CanaryStatus(BaseModel):
    """A running or stopped canary with its counts and evidence."""

    object: Literal["ensemble.canary"]


class EnsembleStatus(BaseModel):
    object: Literal["ensemble"]
    specialists: list[SpecialistSloAnswer]
    replicas: list[ShownReplica]
    intents: dict[str, ShownIntent]
    canaries: list[dict[str, Any]]
    shadows: dict[str, int]


class AuditEntry(BaseModel):
    number: int
    # seconds since 1970
    at: float
    # `control`, or an admin
    actor: str
    kind: str
    subject: str
    details: dict[str, Any]


class AuditList(BaseModel):
    object: Literal["list"]
    data: list[AuditEntry]
    has_more: bool
    next: int | None


class FixedExpert(BaseModel):
    name: str
    digest: str
    weight: float


class ConfigAnswer(BaseModel):
    object: Literal["config"]
    # names the settings that decide who answers and how
    digest: str
    specialists: list[str]
    # by specialist: the experts that it always runs with
    fixed_experts: dict[str, list[FixedExpert]]
    settings: dict[str, Any]


class ReloadAnswer(BaseModel):
    object: Literal["config.reload"]
    digest: str
    previous_digest: str
    # the settings that changed, such as `tenants.acme.requests_per_minute`
    changed: list[str]
