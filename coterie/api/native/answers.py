"""What the native routes answer, as types for the OpenAPI document and the SDKs made from it.

Nothing is checked against these at run time; the fuzz tests hold the answers to them. Values of
`core` are described by their own classes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coterie.core.outcome import InferenceMetrics
from coterie.core.plan import AdapterChoice, RouteTrace


class GenerationParams(BaseModel):
    """The sampling values that the request ran with."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    max_tokens: int | None


class ExpertPlan(BaseModel):
    """How a request was routed: experts in order, values, and the reasons."""

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
    # null unless asked for
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class TokenizerFacts(BaseModel):
    """As a tokenizer_config.json says them; named special tokens where it has them."""

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
    """What this server is; a page for who accepts one."""

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
    # whether its name means this version
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
