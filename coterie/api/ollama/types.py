"""Bodies of the Ollama dialect.

Only types and ranges; `parse.py` gives the fields their meaning.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from coterie.api.body import RequestBody
from coterie.api.body_fields import Experts, Intent, sampling_field, top_p_from_zero
from coterie.api.embeddings.types import INT64
from coterie.api.openai.types import (
    MAX_MESSAGES,
    StopString,
    StopStrings,
    TokenId,
    ToolSpec,
    Urgency,
)
from coterie.api.tools.base import MAX_TOOLS

# a duration as Go writes it; a number without a unit is seconds
_NUMBER, _UNIT = r"(\d+(\.\d*)?|\.\d+)", r"(ns|us|\u00b5s|\u03bcs|ms|s|m|h)"
_DURATION = rf"^[+-]?{_NUMBER}{_UNIT}?({_NUMBER}{_UNIT})*$"
_INT64 = 2**63 - 1

ModelName = Annotated[str, Field(min_length=1, max_length=512)]
KeepAlive = float | Annotated[str, Field(max_length=64, pattern=_DURATION)]
ThinkLevel = Literal["low", "medium", "high", "max"]
Image = Annotated[str, Field(max_length=2**26)]


def _cut_fraction(value: Any) -> Any:
    """Ollama reads a whole number from any number."""
    return int(value) if isinstance(value, float) and math.isfinite(value) else value


_Whole = Annotated[int, BeforeValidator(_cut_fraction)]


class OllamaOptions(RequestBody):
    """Options of the model. Other names are ignored, as by Ollama."""

    temperature: float | None = sampling_field("temperature")
    top_k: _Whole | None = sampling_field("top_k")
    top_p: float | None = top_p_from_zero()
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repeat_penalty: float | None = sampling_field("repetition_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    # below 0 = a random one
    seed: _Whole | None = sampling_field("seed")
    # -1 = no limit, -2 = until the context is full
    num_predict: _Whole | None = Field(None, ge=-2, le=_INT64)
    # 0, and more than the model has, = as much as it has
    num_ctx: _Whole | None = Field(None, ge=0, le=_INT64)
    stop: StopString | StopStrings | None = None
    # the tokens that penalties count: -1 = the whole context, which is the default here; 0 = none
    repeat_last_n: _Whole | None = Field(None, ge=-1, le=_INT64)
    # how to load a model: it is loaded already
    num_keep: _Whole | None = None
    num_batch: _Whole | None = None
    num_gpu: _Whole | None = None
    main_gpu: _Whole | None = None
    num_thread: _Whole | None = None
    draft_num_predict: _Whole | None = None
    use_mmap: bool | None = None
    # of Ollama's older releases; they would change the answer, so the log says that they do not
    mirostat: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    tfs_z: Any = None
    penalize_newline: Any = None


LOADING_OPTIONS = frozenset(
    {"num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "draft_num_predict"}
)
IGNORED_OPTIONS = frozenset(
    {"mirostat", "mirostat_tau", "mirostat_eta", "tfs_z", "penalize_newline"}
)


class CalledOllamaFunction(RequestBody):
    name: str = Field(max_length=256)
    arguments: dict[str, Any] | None = None


class OllamaCall(RequestBody):
    id: str | None = Field(None, max_length=256)
    function: CalledOllamaFunction


class OllamaMessage(RequestBody):
    role: Annotated[str, Field(max_length=32)]
    content: str | None = None
    # earlier thoughts of the model; not part of the prompt
    thinking: str | None = None
    images: list[Image] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    # in a message of a tool: the call that it answers, or the name of its function
    tool_call_id: str | None = Field(None, max_length=256)
    tool_name: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)


class OllamaFields(RequestBody):
    """Fields of both endpoints that answer."""

    model_config = ConfigDict(extra="allow")

    model: ModelName
    # None = yes
    stream: bool | None = None
    # "" = free, "json", or a schema
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    # how long the model stays loaded: shown by /api/ps; here it always does
    keep_alive: KeepAlive | None = None
    think: bool | ThinkLevel | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = sampling_field("logprobs", high=20)
    # None = yes: the oldest turns that do not fit are left out
    truncate: bool | None = None
    # whether to go on when the context is full; here an answer ends there
    shift: bool | None = None
    # Open WebUI puts it here; that of the options comes first
    num_predict: int | None = Field(None, ge=-2, le=_INT64)
    # extensions of this server, as on the other APIs
    experts: Experts | None = None
    intent: Intent | None = None
    priority: Urgency | None = None
    cache_key: str | None = None
    user: str | None = None


class OllamaChatBody(OllamaFields):
    # without messages nothing is answered: clients load a model this way
    messages: list[OllamaMessage] | None = Field(None, max_length=MAX_MESSAGES)
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    # the first message, unless that is a system message already
    system: str | None = None


class OllamaGenerateBody(OllamaFields):
    prompt: str | None = None
    # the text after the gap that the model fills
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    # the tokens of an earlier answer that this one continues
    context: list[TokenId] | None = None
    # the prompt is used as it is, without the model's template
    raw: bool | None = None
    images: list[Image] | None = None


class OllamaShowBody(RequestBody):
    """`name` is the older word for `model`."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None


class OllamaCreateBody(RequestBody):
    """The part by which a refusal says why."""

    quantize: str | None = None
    # the older word
    quantization: str | None = None


class OllamaEmbedBody(RequestBody):
    model: ModelName
    # without any text nothing is embedded: clients load a model this way
    input: str | list[str] | None = None
    # whether inputs that are too long are cut
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1, le=INT64)
    # no option changes an embedding
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaOldEmbedBody(RequestBody):
    """Of the older /api/embeddings: one text, which is cut if it is too long."""

    model: ModelName
    prompt: str = ""
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None
