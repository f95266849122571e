"""Bodies of the OpenAI dialect, with the additional fields that vLLM's clients send.

Only types and ranges; `parse.py` gives the fields their meaning. `body_fields.py` says which
unknown fields are refused; the others are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from coterie.api.body import QueryParameters, RequestBody
from coterie.api.body_fields import (
    Experts,
    Intent,
    MaxTokens,
    MinTokens,
    bounds,
    sampling_field,
    top_p_from_zero,
)
from coterie.api.tools.base import MAX_TOOLS
from coterie.core.sampling import LOGIT_BIAS
from coterie.core.value_check import is_deeper
from coterie.models.text.chat_template import MAX_REQUEST_TEMPLATE

MAX_PROMPTS = 128
MAX_STOPS = 32
MAX_GUIDED = 10_000
MAX_MESSAGES = 10_000
MAX_KWARGS_DEPTH = 32
MAX_ALLOWED = 2**18
MAX_BAD_WORDS = 256
MAX_DOCUMENTS = 1024
_INT64 = 2**63 - 1

BiasAmount = Annotated[float, Field(**bounds(LOGIT_BIAS.narrowed(-100, 100)))]
# vLLM's priority: a lower value runs sooner
Urgency = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
BadWord = Annotated[str, Field(min_length=1, max_length=200)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse deeply nested values: templates process their arguments recursively."""
    if is_deeper(value, MAX_KWARGS_DEPTH):
        raise ValueError(f"is nested deeper than {MAX_KWARGS_DEPTH}")
    return value


TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_shallow)]
Documents = Annotated[list[TemplateKwargs], Field(max_length=MAX_DOCUMENTS)]
ChatTemplateText = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_TEMPLATE)]


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(RequestBody):
    """One part of a message; only text parts are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(RequestBody):
    name: str = Field(max_length=256)
    arguments: str = ""


class CalledTool(RequestBody):
    id: str = Field(min_length=1, max_length=256)
    type: str = "function"
    function: CalledFunction | None = None


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionSpec(RequestBody):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(RequestBody):
    type: str
    function: FunctionSpec | None = None


class FunctionName(RequestBody):
    name: str


class ChosenTool(RequestBody):
    type: str
    function: FunctionName | None = None


class AllowedTools(RequestBody):
    mode: Literal["auto", "required"]
    tools: list[ChosenTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ToolChoice(ChosenTool):
    allowed_tools: AllowedTools | None = None


class ConstraintFields(RequestBody):
    """The fields that constrain an answer, as vLLM, SGLang and llama.cpp name them."""

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_GUIDED)] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: Any = None
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class CompletionFields(ConstraintFields):
    """Fields of both completion endpoints."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: float | None = sampling_field("temperature", high=2)
    top_p: float | None = top_p_from_zero()
    n: int | None = sampling_field("n")
    stop: StopString | StopStrings | None = None
    seed: int | None = sampling_field("seed")
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    logit_bias: dict[str, BiasAmount] | None = Field(None, max_length=1024)
    response_format: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # vLLM's extras
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    ignore_eos: bool | None = None
    min_tokens: MinTokens | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # no effect: no tokenizer here adds spaces between special tokens
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_INT64)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = sampling_field("prompt_logprobs", high=20)
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = sampling_field("length_penalty")
    priority: Urgency | None = None
    cache_key: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    # extensions of this server: applied after the experts that `model` names; with `model` "auto",
    # a specialist that serves this intent answers
    experts: Experts | None = None
    intent: Intent | None = None


class ChatBody(CompletionFields):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = sampling_field("logprobs", high=20)
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    # vLLM's extras
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: ChatTemplateText | None = None
    documents: Documents | None = None
    echo: bool | None = None


Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(CompletionFields):
    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Ids], Field(min_length=1)]
    )
    # 0 is allowed together with echo: it scores the prompt
    max_tokens: int | None = Field(None, ge=0, le=_INT64)
    echo: bool | None = None
    logprobs: int | None = sampling_field("logprobs", high=20)
    best_of: int | None = None
    suffix: str | None = None


class TokenizeBody(RequestBody):
    """Either `prompt` or `messages`, or llama.cpp's `content`. Without `model` the default model is
    used."""

    model: str | None = None
    prompt: str | None = None
    # llama.cpp's fields
    content: str | None = None
    add_special: bool = False
    with_pieces: bool = False
    parse_special: bool = True
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    # None = yes for a prompt, no for messages, because templates write special tokens themselves
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    chat_template: ChatTemplateText | None = None
    documents: Documents | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None


class DetokenizeBody(RequestBody):
    model: str | None = None
    tokens: list[TokenId]


class TokenizerQuery(QueryParameters):
    """Without `model` the default model is described."""

    model: str | None = None
