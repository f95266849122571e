"""Bodies of llama.cpp's dialect, and its answers for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from coterie.api.body import RequestBody
from coterie.api.body_fields import sampling_field, top_p_from_zero
from coterie.api.openai.types import (
    BiasAmount,
    ChatMessage,
    ChatTemplateText,
    StopStrings,
    TemplateKwargs,
    TokenId,
    ToolSpec,
)
from coterie.api.tools.base import MAX_TOOLS

MAX_FIELDS = 64
MAX_FILES = 256
MAX_MESSAGES = 10_000
_INT64 = 2**63 - 1

PromptPart = TokenId | str
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
# a token id and its bias; false = never
BiasPair = Annotated[list[bool | float], Field(min_length=2, max_length=2)]


class LlamaFields(RequestBody):
    """Fields of both endpoints that answer. Without `model` the default model answers."""

    model_config = ConfigDict(extra="allow")

    model: ModelName | None = None
    stream: bool | None = None
    # -1 = until the context is full; 0 = only read the prompt
    n_predict: int | None = Field(None, ge=-1, le=_INT64)
    # another name for it
    max_tokens: int | None = Field(None, ge=-1, le=_INT64)
    temperature: float | None = sampling_field("temperature")
    top_k: int | None = sampling_field("top_k")
    top_p: float | None = top_p_from_zero()
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repeat_penalty: float | None = sampling_field("repetition_penalty")
    # -1 = the whole context, as here; 0 = no penalty
    repeat_last_n: int | None = Field(None, ge=-1, le=_INT64)
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    # below 0 = a random one
    seed: int | None = sampling_field("seed")
    stop: StopStrings | None = None
    ignore_eos: bool | None = None
    # pairs, or OpenAI's object
    logit_bias: (
        Annotated[list[BiasPair], Field(max_length=1024)]
        | Annotated[dict[str, BiasAmount], Field(max_length=1024)]
        | None
    ) = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    # alternatives for each token
    n_probs: int | None = Field(None, ge=0, le=20)
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    # only these fields of the answer; `a/b` is the field b of a
    response_fields: Annotated[list[str], Field(max_length=MAX_FIELDS)] | None = None

    @property
    def most(self) -> int | None:
        """Tokens of the answer."""
        return self.max_tokens if self.n_predict is None else self.n_predict


class TextPrompt(RequestBody):
    """llama.cpp's form of a prompt that may have pictures."""

    prompt_string: str
    multimodal_data: list[str] | None = None


class LlamaCompletionBody(LlamaFields):
    # text, tokens, or both in turn
    prompt: str | TextPrompt | Annotated[list[PromptPart], Field(min_length=1)]


class ExtraFile(RequestBody):
    """A file that is shown to the model for orientation."""

    filename: str = Field(max_length=1024)
    text: str


class InfillBody(LlamaFields):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES)] | None = None
    # the beginning of what is to be filled in
    prompt: str | None = None


class ApplyTemplateBody(RequestBody):
    """Without `model` the template of the default model is used."""

    model: ModelName | None = None
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template: ChatTemplateText | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class LlamaCompletion(BaseModel):
    """With `response_fields` only those."""

    content: str | None = None
    tokens: list[int] | None = None
    stop: bool | None = None
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    generation_settings: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None
    completion_probabilities: list[dict[str, Any]] | None = None


class LlamaProps(BaseModel):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class RenderedTemplate(BaseModel):
    prompt: str
