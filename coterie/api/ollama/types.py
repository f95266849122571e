"""Bodies of the Ollama dialect.

Only types and ranges; `parse.py` gives the fields their meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from coterie.api.body import RequestBody
from coterie.api.body_fields import Experts, Intent, sampling_field, top_p_from_zero
from coterie.api.embeddings.types import INT64, Texts
from coterie.api.openai.types import (
    MAX_MESSAGES,
    StopString,
    StopStrings,
    TokenId,
    ToolSpec,
    Urgency,
)
from coterie.api.tools.base import MAX_TOOLS

# a duration as Go writes it
_DURATION = r"^-?(\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)?((\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))*$"
_INT64 = 2**63 - 1

ModelName = Annotated[str, Field(min_length=1, max_length=512)]
KeepAlive = float | Annotated[str, Field(max_length=64, pattern=_DURATION)]
ThinkLevel = Literal["low", "medium", "high", "max"]
Image = Annotated[str, Field(max_length=2**26)]


class OllamaOptions(RequestBody):
    """Options of the model. Those that say how to load it are ignored: it is loaded already."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = sampling_field("temperature")
    top_k: int | None = sampling_field("top_k")
    top_p: float | None = top_p_from_zero()
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repeat_penalty: float | None = sampling_field("repetition_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    # below 0 = a random one
    seed: int | None = sampling_field("seed")
    # -1 = no limit, -2 = until the context is full
    num_predict: int | None = Field(None, ge=-2, le=_INT64)
    # 0 = as much as the model has
    num_ctx: int | None = Field(None, ge=0, le=_INT64)
    stop: StopString | StopStrings | None = None
    # -1 = the whole context, as here; 0 = no penalty
    repeat_last_n: int | None = Field(None, ge=-1, le=_INT64)
    penalize_newline: bool | None = None


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
    # how long the model stays loaded; here it always does
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


class OllamaEmbedBody(RequestBody):
    model: ModelName
    input: str | Texts
    # whether inputs that are too long are cut
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1, le=INT64)
    # no option changes an embedding
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaOldEmbedBody(RequestBody):
    """Of the older /api/embeddings: one text, which is cut if it is too long."""

    model: ModelName
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: Any = None
