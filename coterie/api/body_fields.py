"""Fields that the bodies of several APIs share: sampling, experts, and fields that no API supports.

Sampling fields take their ranges from `core/sampling.py`; an API may narrow them.

Of the fields that a body's type does not define, those that could change the answer are refused
with an error, never silently dropped. Fields that only say how to store, bill or prioritise a
request are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from coterie.api.body import RequestBody
from coterie.core.adapters import MAX_STACK, MAX_WEIGHT
from coterie.core.errors import UnsupportedFeature
from coterie.core.request import AdapterHint
from coterie.core.sampling import MAX_TOKENS, MIN_TOKENS, SAMPLING_FIELDS, SamplingField

# field -> what to do instead, or why it is refused
REFUSED: dict[str, str] = {
    # OpenAI
    "audio": "only text can be made here",
    "function_call": "give tools and tool_choice",
    "web_search_options": "this server searches nothing",
    # vLLM
    "logits_processors": "no code of a request is run; use logit_bias or bad_words",
    "logprob_token_ids": "use top_logprobs",
    "mm_processor_kwargs": "only text can be read here",
    "guided_whitespace_pattern": "docs/structured.md says which blanks a JSON answer may have",
    "thinking_token_budget": "is not available",
    "kv_transfer_params": "no prompt is taken from another server; give prompt as token ids",
    # SGLang
    "structural_tag": "is not available",
    "stop_regex": "use stop",
    "no_stop_trim": "use include_stop_str_in_output",
    "custom_logit_processor": "is not available",
    "custom_params": "is not available",
    "return_hidden_states": "is not available",
    "lora_path": "name the adapter in model or in experts",
    # llama.cpp
    "grammar_lazy": "a grammar holds from the first token on",
    "grammar_triggers": "a grammar holds from the first token on",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "repeat_penalty": "use repetition_penalty",
    "mirostat": "is not available",
    "dry_multiplier": "is not available",
    "xtc_probability": "is not available",
    "dynatemp_range": "is not available",
    "top_n_sigma": "is not available",
    "tfs_z": "is not available",
    "samplers": "the order of samplers is fixed",
    "lora": "name the adapter in model or in experts",
    "image_data": "only text can be read here",
    # Anthropic
    "mcp_servers": "this server calls no tools of its own",
    "container": "this server runs no code",
}
# applied on OpenAI's API; field -> what to do on Anthropic's API
ON_OPENAI_ALONE = {
    "allowed_token_ids": "",
    "bad_words": "",
    "truncate_prompt_tokens": "",
    "chat_template": "",
    "documents": "put them into a message",
    "logit_bias": "",
    "min_tokens": "",
    "stop": "use stop_sequences",
    "stop_token_ids": "use stop_sequences",
    "response_format": "use output_format",
    "guided_json": "use output_format",
    "guided_regex": "",
    "guided_choice": "",
    "guided_grammar": "",
    "structured_outputs": "",
    "json_schema": "use output_format",
    "grammar": "",
    "regex": "",
    "ebnf": "",
}
# values that change nothing: the same as leaving the field out
_OFF: dict[str, tuple[Any, ...]] = {
    "repeat_penalty": (1, 1.0),
    "top_n_sigma": (-1, -1.0),
    "tfs_z": (1, 1.0),
    "n_predict": (-1,),
    "n": (1,),
    "n_cmpl": (1,),
    "tool_choice": ("auto",),
}
# OpenAI's fields on the APIs of Ollama and of llama.cpp; field -> why they are refused there
_OPENAI_FIELDS = {
    "n": "one answer is given to a request",
    "n_cmpl": "one answer is given to a request",
    "tool_choice": "the model decides whether it calls a tool",
    "functions": "give tools",
    "echo": "is honoured on OpenAI's API alone",
    "stop_token_ids": "use stop",
    "continue_final_message": "is honoured on OpenAI's API alone",
}
# how a request is stored, billed, prioritised or shown, or a hint that a model may ignore
IGNORED = frozenset(
    {
        # OpenAI
        "store", "service_tier", "safety_identifier", "prompt_cache_retention", "prediction",
        "reasoning_effort", "verbosity",
        # vLLM and SGLang
        "request_id", "guided_decoding_backend", "rid", "separate_reasoning",
        "stream_reasoning", "vllm_xargs", "include_reasoning",
        # llama.cpp
        "cache_prompt", "id_slot", "n_keep", "timings_per_token", "min_keep", "return_progress",
        # Anthropic
        "betas", "context_management", "inference_geo", "speed",
    }
)  # fmt: skip


def refuse_fields(extra: Mapping[str, Any] | None) -> None:
    """`extra`: the fields of a body that its type does not define. Raises `UnsupportedFeature`."""
    for name, value in (extra or {}).items():
        why = REFUSED.get(name)
        # zero changes nothing either
        if why is not None and value and value not in _OFF.get(name, ()):
            raise UnsupportedFeature(f"{name}: {why}", param=name)


def refuse_openai_fields(extra: Mapping[str, Any] | None) -> None:
    """The same for a body of Anthropic's API, which applies fewer fields."""
    refuse_fields(extra)
    for name, value in (extra or {}).items():
        if name in ON_OPENAI_ALONE and value:
            why = ON_OPENAI_ALONE[name] or "is honoured on OpenAI's API alone"
            raise UnsupportedFeature(f"{name}: {why}", param=name)


def refuse_misplaced_fields(extra: Mapping[str, Any] | None, instead: Mapping[str, str]) -> None:
    """The same for the APIs of Ollama and of llama.cpp. `instead`: further fields that have no
    place there, and what to do."""
    known = {**_OPENAI_FIELDS, **instead}
    for name, value in (extra or {}).items():
        # a temperature of 0 is a wish too
        is_off = value is False or value in (None, "", [], *_OFF.get(name, ()))
        if name in known and not is_off:
            raise UnsupportedFeature(f"{name}: {known[name]}", param=name)
    refuse_openai_fields(extra)


# a top_p of 0 means "only the likeliest token"; the engine wants it above 0
_SMALLEST_TOP_P = 1e-9


def sampling_field(
    name: str, low: float | None = None, high: float | None = None, description: str | None = None
) -> Any:
    """The field of that name, in a narrower range if one is given. Its value is None if the body
    leaves it out."""
    field = SAMPLING_FIELDS[name].narrowed(low, high)
    return Field(None, **bounds(field), description=description)


def bounds(field: SamplingField) -> dict[str, Any]:
    """The range as arguments of pydantic's `Field`."""
    return {"gt" if field.above_low else "ge": _short(field.low), "le": _short(field.high)}


def _short(bound: float) -> float:
    """The number as messages and schemas show it: 2, not 2.0."""
    return int(bound) if bound == int(bound) else bound


MaxTokens = Annotated[int, Field(**bounds(MAX_TOKENS))]
MinTokens = Annotated[int, Field(**bounds(MIN_TOKENS))]


def top_p_from_zero() -> Any:
    """`top_p` for the vendors that allow 0; `positive_top_p` translates it."""
    return Field(None, ge=0, le=_short(SAMPLING_FIELDS["top_p"].high))


def positive_top_p(top_p: float | None) -> float | None:
    return None if top_p is None else max(top_p, _SMALLEST_TOP_P)


def seed_of(seed: int | None) -> int | None:
    return None if seed is None else seed % 2**63


Name = Annotated[str, Field(min_length=1, max_length=128)]
# what a caller says that its request is for
Intent = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]


class ExpertItem(RequestBody):
    """One expert of a request, `name` or `name@version`, and how strongly it applies."""

    name: Name
    weight: float = Field(1.0, ge=-MAX_WEIGHT, le=MAX_WEIGHT)


# adapters are composed in the order of this list
Experts = Annotated[list[ExpertItem], Field(max_length=MAX_STACK)]


def adapter_hints(experts: list[ExpertItem] | None) -> tuple[AdapterHint, ...]:
    return tuple(AdapterHint(item.name, item.weight) for item in experts or ())
