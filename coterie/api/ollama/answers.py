"""The answers of the Ollama routes, as types for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class _OllamaAnswer(BaseModel):
    """The last line of a stream, or the whole answer, has all fields; other lines have those above
    `done_reason`."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    # durations in nanoseconds
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None
    # details that Ollama's format has no field for: docs/api.md
    coterie: dict[str, Any] = {}


class OllamaEmbedAnswer(BaseModel):
    model: str
    embeddings: list[list[float]]
    # durations in nanoseconds
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaOldEmbedAnswer(BaseModel):
    embedding: list[float]


class OllamaCalledFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallAnswer(BaseModel):
    id: str
    function: OllamaCalledFunction


class OllamaAssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCallAnswer] | None = None


class OllamaChatAnswer(_OllamaAnswer):
    message: OllamaAssistantMessage


class OllamaGenerateAnswer(_OllamaAnswer):
    response: str
    thinking: str | None = None
    # the tokens of the conversation, to be sent with the next prompt
    context: list[int] | None = None


class OllamaModelDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int


class OllamaListedModel(BaseModel):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    # in the list of all models
    modified_at: str | None = None
    capabilities: list[str] | None = None
    # in the list of those in memory
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModelList(BaseModel):
    models: list[OllamaListedModel]


class OllamaShownModel(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    version: str
    coterie: str
