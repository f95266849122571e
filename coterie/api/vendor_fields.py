"""One table of the fields that clients of other servers send, and what happens to each.

A field that can change the answer is either applied or refused with an error, never silently
dropped. A field that only says how to store, bill or prioritise a request is ignored. Fields that a
body's type defines are applied; this table is about all other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.core.errors import UnsupportedFeature

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
}
# values that change nothing: the same as leaving the field out
_OFF: dict[str, tuple[Any, ...]] = {
    "repeat_penalty": (1, 1.0),
    "top_n_sigma": (-1, -1.0),
    "tfs_z": (1, 1.0),
    "n_predict": (-1,),
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
