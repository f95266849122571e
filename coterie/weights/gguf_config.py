"""GGUF metadata in Hugging Face words: config keys, generation keys, tensor names.

One entry per architecture in `ARCHITECTURES`. Refuses what it cannot translate without loss: a key
or tensor that is silently dropped changes the model. Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from coterie.core.errors import WeightsError
from coterie.weights.gguf import GGUFFile
from coterie.weights.gguf_keys import Keys, short
from coterie.weights.gguf_moe import (
    EXPERT_KEYS,
    LAYER_NAMES,
    MIXTRAL_NAMES,
    MIXTRAL_SINGLE,
    expert_keys,
)
from coterie.weights.gguf_rope import ROPE_FACTORS, rope_scaling

__all__ = ["PERMUTED", "ROPE_FACTORS", "hf_config", "hf_generation", "hf_name", "tensor_names"]

# GGUF architecture -> (HF class, model_type). Mistral is stored as llama and computes the same.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
}
# a llama that has experts
_MIXTRAL = ("MixtralForCausalLM", "mixtral")

# converters reorder the rows of q and k for these (pairs side by side instead of halves)
PERMUTED = frozenset({"llama"})

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    **LAYER_NAMES,
}

# tables of rotary frequencies that some converters left in the file; the config says the same
_REDUNDANT = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")

_GENERATION = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

# multipliers of neighbouring architectures, which these do not apply
_SCALES = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hf_name(name: str, family: str = "llama") -> str | None:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; None when unknown."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d{1,5})\.([a-z_]+)(?:\.(\d{1,5}))?", stem)
    if layer is None:
        return None
    number, part, expert = layer.groups()
    if expert is not None:
        if family != "mixtral" or part not in MIXTRAL_SINGLE:
            return None
        inside = f"block_sparse_moe.experts.{expert}.{MIXTRAL_SINGLE[part]}"
        return f"model.layers.{number}.{inside}.{kind}"
    known = {**_LAYER, **MIXTRAL_NAMES} if family == "mixtral" else _LAYER
    return f"model.layers.{number}.{known[part]}.{kind}" if part in known else None


def tensor_names(file: GGUFFile) -> dict[str, str]:
    """HF name -> GGUF name of every tensor the model reads."""
    names: dict[str, str] = {}
    family = _family(Keys(file))
    for name in file.tensors:
        if name == ROPE_FACTORS or _REDUNDANT.fullmatch(name):
            continue
        translated = hf_name(name, family)
        if translated is None:
            raise WeightsError(
                f"{file.path}: holds the tensor {name!r}, which no supported architecture "
                f"({', '.join(ARCHITECTURES)}) has. Use another model."
            )
        names[translated] = name
    return names


def hf_config(file: GGUFFile, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """The keys of config.json. `rope_factors`: the values of the tensor rope_freqs, when there."""
    keys = Keys(file)
    family = _family(keys)
    architecture, model_type = _MIXTRAL if family == "mixtral" else ARCHITECTURES[family]
    heads = keys.whole("attention.head_count")
    hidden = keys.whole("embedding_length")
    for scale in _SCALES:
        keys.refuse_unless(scale, 1)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _intermediate(keys),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": keys.whole("attention.key_length", hidden // max(heads, 1)),
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10_000.0),
        "sliding_window": keys.get("attention.sliding_window"),
        "hidden_act": "silu",
        "attention_bias": _biased(file),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if family in EXPERT_KEYS:
        config |= expert_keys(keys, family)
    else:
        keys.refuse_unless("expert_count", 0)
    if family != "deepseek2":
        keys.refuse_unless("attention.value_length", config["head_dim"])
        keys.refuse_unless("rope.dimension_count", config["head_dim"])
    config["rope_scaling"] = rope_scaling(keys, config["head_dim"], rope_factors)
    return config


def _family(keys: Keys) -> str:
    parts = keys.file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise WeightsError(
            f"{keys.file.path}: one of {parts} parts of a split GGUF file. Join them first "
            "(llama-gguf-split --merge)."
        )
    if keys.prefix not in ARCHITECTURES:
        raise WeightsError(
            f"{keys.file.path}: architecture {keys.prefix[:60]!r} is not supported. "
            f"Supported in GGUF files: {', '.join(ARCHITECTURES)}."
        )
    return "mixtral" if keys.prefix == "llama" and keys.get("expert_count") else keys.prefix


def _intermediate(keys: Keys) -> int:
    """Models of experts alone may say only how wide those are."""
    key = "feed_forward_length"
    return keys.whole(key if keys.get(key) is not None else f"expert_{key}")


def _biased(file: GGUFFile) -> bool:
    return any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "q_a", "kv_a_mqa"))


def hf_generation(file: GGUFFile) -> dict[str, Any]:
    """The keys of generation_config.json that the file has an opinion on."""
    generation: dict[str, Any] = {
        name: short(file.metadata[key])
        for key, name in _GENERATION.items()
        if isinstance(file.metadata.get(key), int | float)
    }
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    known = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    return {**generation, "eos_token_id": known} if known else generation


def _vocab_size(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise WeightsError(
            f"{file.path}: no token embedding matrix, so this is not a language model. "
            "Use another file."
        )
    return info.shape[0]
