"""What each field of config.json and generation_config.json may be, checked before it is read.

A file may come from anywhere: a wrong type, a number beyond every real model or a strange nesting
is refused with the names of the file and the field. The reader of a field decides what it means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from coterie.core.errors import InvalidRequest, WeightsError
from coterie.core.request import Sampling
from coterie.core.sampling import GENERATION_FIELDS, SAMPLING_FIELDS, check_sampling

# far above every real model, so that a wrong number cannot cause a huge allocation
_MOST_LAYERS, _MOST_EXPERTS, _MOST = 1 << 14, 1 << 16, (1 << 31) - 1

_LONGEST = 200

# what is wrong with a value, or None
Check = Callable[[Any], str | None]


def _whole(low: int, high: int = _MOST) -> Check:
    def check(value: Any) -> str | None:
        fits = type(value) is int and low <= value <= high
        return None if fits else f"must be a whole number from {low} to {high}"

    return check


def _number(value: Any) -> str | None:
    sound = type(value) in (int, float) and 0 < value < 1e30
    return None if sound else "must be a positive number"


def _number_or_zero(value: Any) -> str | None:
    return None if type(value) in (int, float) and value == 0 else _number(value)


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and len(value) <= _LONGEST else "must be a short text"


def _list_of(check: Check, what: str) -> Check:
    def checked(value: Any) -> str | None:
        sound = isinstance(value, list) and all(check(item) is None for item in value)
        return None if sound else f"must be a list of {what}"

    return checked


def _token_id(value: Any) -> str | None:
    return None if type(value) is int and abs(value) <= _MOST else "must be a token id"


def _token_ids(value: Any) -> str | None:
    sound = all(_token_id(item) is None for item in (value if isinstance(value, list) else [value]))
    return None if sound else "must be a token id or a list of them"


def _rope(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "must be an object"
    for key, check in _ROPE.items():
        fault = check(value[key]) if value.get(key) is not None else None
        if fault is not None:
            return f"has a {key} that {fault}"
    return None


_ROPE: dict[str, Check] = {
    "rope_type": _text,
    "type": _text,
    "rope_theta": _number,
    "partial_rotary_factor": _number,
    "original_max_position_embeddings": _whole(1),
    "factor": _number,
    "low_freq_factor": _number,
    "high_freq_factor": _number,
    "beta_fast": _number,
    "beta_slow": _number,
    "attention_factor": _number,
    "mscale": _number_or_zero,
    "mscale_all_dim": _number_or_zero,
    "truncate": _flag,
    "short_factor": _list_of(_number, "positive numbers"),
    "long_factor": _list_of(_number, "positive numbers"),
}

CONFIG: dict[str, Check] = {
    "architectures": _list_of(_text, "names"),
    "num_hidden_layers": _whole(1, _MOST_LAYERS),
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim",
         "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
         "original_max_position_embeddings", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
         "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group", "decoder_sparse_step"),
        _whole(1),
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        _whole(1, _MOST_EXPERTS),
    ),
    **dict.fromkeys(
        ("sliding_window", "max_window_layers", "first_k_dense_replace", "n_shared_experts"),
        _whole(0),
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "rope_theta", "routed_scaling_factor", "clip_qkv"),
        _number,
    ),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
         "norm_topk_prob"),
        _flag,
    ),
    **dict.fromkeys(("hidden_act", "topk_method"), _text),
    "eos_token_id": _token_ids,
    "bos_token_id": _token_id,
    "layer_types": _list_of(_text, "names"),
    "mlp_only_layers": _list_of(_whole(0, _MOST_LAYERS), "layers"),
    "rope_scaling": _rope,
    "rope_parameters": _rope,
}  # fmt: skip


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Null means that the field is not given."""
    for key, check in CONFIG.items():
        if config.get(key) is not None:
            _refuse(where, key, config[key], check(config[key]))


def check_generation(generation: Mapping[str, Any], where: str) -> None:
    ends = generation.get("eos_token_id")
    if ends is not None:
        _refuse(where, "eos_token_id", ends, _token_ids(ends))
    # requests take their defaults from these
    for key in GENERATION_FIELDS:
        value = generation.get(key)
        if value is None:
            continue
        is_whole = SAMPLING_FIELDS[key].is_whole
        sound = type(value) is int if is_whole else type(value) in (int, float)
        if not sound or not math.isfinite(value):
            _refuse(where, key, value, f"must be a {'whole number' if is_whole else 'number'}")
        try:
            check_sampling(Sampling(**{key: value}))
        except InvalidRequest as error:
            raise WeightsError(f"{where}: {error.message}") from error


def _refuse(where: str, key: str, value: Any, fault: str | None) -> None:
    if fault is not None:
        raise WeightsError(f"{where}: {key} {fault}, not {shown(value)}")


def shown(value: Any) -> str:
    """A short text for any value."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = (
        repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a huge number"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
