"""Bodies of OpenAI's Responses API, with the additional fields that vLLM's clients send.

Only types and ranges; `parse.py` gives the fields their meaning. Items and tools keep their unknown
fields, because an answer repeats them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from coterie.api.body import QueryParameters, RequestBody
from coterie.api.body_fields import MaxTokens, sampling_field
from coterie.api.openai.types import (
    MAX_MESSAGES,
    CompletionFields,
    ContentPart,
    StreamOptions,
    TemplateKwargs,
)
from coterie.api.tools.base import MAX_SCHEMA_DEPTH, MAX_TOOLS
from coterie.core.value_check import is_deeper

MAX_ID = 128
MAX_METADATA = 16
MAX_INCLUDE = 32
MAX_PAGE = 100
# of an item, a tool or a format; a schema may be inside a namespace
MAX_DEPTH = MAX_SCHEMA_DEPTH + 8

ItemId = Annotated[str, Field(max_length=256)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Include = Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=MAX_INCLUDE)]


class _KeptObject(RequestBody):
    """An object of a body whose unknown fields are kept."""

    model_config = ConfigDict(extra="allow")

    def fields(self) -> dict[str, Any]:
        """As it was sent."""
        return self.model_dump(exclude_unset=True)


def _not_deep(value: Any) -> Any:
    """Refuse what an answer could not repeat: it is written recursively."""
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"is nested deeper than {MAX_DEPTH}")
    return value


class ResponsePart(ContentPart):
    """One part of a message or of a tool's result."""

    model_config = ConfigDict(extra="allow")


class InnerTool(_KeptObject):
    """A function or a custom tool inside a namespace."""

    type: str = Field(max_length=64)
    name: ItemId | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # of a custom tool
    format: dict[str, Any] | None = None


class ResponseTool(InnerTool):
    # of a namespace
    tools: Annotated[list[InnerTool], Field(max_length=MAX_TOOLS)] | None = None


class ResponseItem(_KeptObject):
    """One item of the input. `parse.py` says which types are read, skipped or refused."""

    # a message may leave it out
    type: str | None = Field(None, max_length=64)
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ResponsePart] | None = None
    # calls of tools, and their results
    call_id: ItemId | None = Field(None, min_length=1)
    name: ItemId | None = None
    namespace: ItemId | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ResponsePart] | None = None
    # more tools, beside those of the body
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None


class ChosenResponseTool(RequestBody):
    type: str = Field(max_length=64)
    name: ItemId | None = None
    namespace: ItemId | None = None


class ResponseToolChoice(ChosenResponseTool):
    model_config = ConfigDict(extra="allow")

    # of `allowed_tools`
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ChosenResponseTool], Field(max_length=MAX_TOOLS)] | None = None


class TextConfig(RequestBody):
    format: Annotated[dict[str, Any], BeforeValidator(_not_deep)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(RequestBody):
    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Annotated[str, Field(max_length=32)] | None = None


Item = Annotated[ResponseItem, BeforeValidator(_not_deep)]
ToolEntry = Annotated[ResponseTool, BeforeValidator(_not_deep)]
Choice = Annotated[ResponseToolChoice, BeforeValidator(_not_deep)]


class ResponsePrompt(RequestBody):
    """The fields of which a prompt is made."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=MAX_ID)
    tools: Annotated[list[ToolEntry], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # from vLLM
    chat_template_kwargs: TemplateKwargs | None = None


class ResponseCountBody(ResponsePrompt):
    """Without `model` the default model counts."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, min_length=1, max_length=512)


class ResponseStreamOptions(StreamOptions):
    # nothing is added to hide the length of a delta, so false changes nothing
    include_obfuscation: bool | None = None


class ResponseBody(CompletionFields, ResponsePrompt):
    # the last base's value would count
    model_config = ConfigDict(extra="allow")

    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = None
    # counts calls of tools that a server runs; none are run here
    max_tool_calls: int | None = Field(None, ge=1, le=2**31)
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = (
        None
    )
    include: Include | None = None
    top_logprobs: int | None = sampling_field("logprobs", high=20)
    store: bool | None = None
    background: bool | None = None
    prompt_cache_key: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    user: str | None = Field(None, max_length=512)


class RetrieveQuery(QueryParameters):
    """`stream` sends the events of a response that is kept; after the one with the number
    `starting_after`."""

    model_config = ConfigDict(extra="ignore")

    stream: bool = False
    starting_after: int | None = Field(None, ge=0)


class ItemQuery(QueryParameters):
    model_config = ConfigDict(extra="ignore")

    after: str | None = Field(None, max_length=256)
    limit: int = Field(20, ge=1, le=MAX_PAGE)
    order: Literal["asc", "desc"] = "desc"
