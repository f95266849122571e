"""Translates GGUF metadata to Hugging Face: config keys, generation keys, tensor names.

One entry per architecture in `ARCHITECTURES`. Refuses what it cannot translate exactly: a key or
tensor that is silently dropped would change the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coterie.core.errors import WeightsError
from coterie.weights.formats.gguf import GGUFFile

_SOFTMAX = 1

LAYER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    # kv_b_proj split in two, head by head, with the keys' half transposed: [heads, kv_rank, nope]
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}

MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}

# older files do not stack the experts: blk.0.ffn_gate.7
MIXTRAL_SINGLE = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}


def moe_config_keys(keys: GgufKeys, family: str) -> dict[str, Any]:
    """Config keys of the experts of `family`, a key of EXPERT_KEYS."""
    keys.refuse_unless("expert_gating_func", _SOFTMAX)
    if family != "deepseek2":
        keys.refuse_unless("expert_shared_count", 0)
        keys.refuse_unless("expert_group_count", 1)
        keys.refuse_unless("expert_weights_scale", 1)
    return {
        "num_experts_per_tok": keys.whole("expert_used_count"),
        **EXPERT_KEYS[family](keys),
    }


def _qwen3moe(keys: GgufKeys) -> dict[str, Any]:
    layers = range(keys.whole("block_count"))
    return {
        "num_experts": keys.whole("expert_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "mlp_only_layers": [
            layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in keys.file.tensors
        ],
    }


def _mixtral(keys: GgufKeys) -> dict[str, Any]:
    keys.refuse_unless("expert_weights_norm", True)
    return {"num_local_experts": keys.whole("expert_count")}


def _olmoe(keys: GgufKeys) -> dict[str, Any]:
    clip = keys.get("attention.clamp_kqv")
    return {
        "num_experts": keys.whole("expert_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "clip_qkv": keys.real("attention.clamp_kqv") if clip else None,
    }


def _deepseek2(keys: GgufKeys) -> dict[str, Any]:
    keys.refuse_unless("expert_weights_norm", False)
    groups = keys.get("expert_group_count")
    limited = isinstance(groups, int) and groups > 1
    rope = keys.whole("rope.dimension_count")
    # in newer files key_length is the width of the cache, and the sizes of a head are here
    mla = "_mla" if keys.get("attention.key_length_mla") is not None else ""
    ranked = keys.get("attention.q_lora_rank") is not None
    return {
        "n_routed_experts": keys.whole("expert_count"),
        "n_shared_experts": keys.get("expert_shared_count") or 0,
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get("leading_dense_block_count") or 0,
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "n_group": keys.whole("expert_group_count") if limited else None,
        "topk_group": keys.whole("expert_group_used_count") if limited else None,
        "q_lora_rank": keys.whole("attention.q_lora_rank") if ranked else None,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": keys.whole(f"attention.key_length{mla}") - rope,
        "v_head_dim": keys.whole(f"attention.value_length{mla}"),
        "num_key_value_heads": keys.whole("attention.head_count"),
        "head_dim": rope,
    }


EXPERT_KEYS: dict[str, Callable[[GgufKeys], dict[str, Any]]] = {
    "qwen3moe": _qwen3moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "deepseek2": _deepseek2,
}


__all__ = ["PERMUTED", "ROPE_FACTORS", "hf_config", "hf_generation", "hf_name", "tensor_names"]

# GGUF architecture -> (HF class, model_type). Mistral is stored as llama and computes the same.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
}
# a llama with experts
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

# tables of rotary frequencies that some converters left in the file; the config has them too
_REDUNDANT = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")

_GENERATION = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

# factors of similar architectures, which the supported ones do not apply
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
    """HF name -> GGUF name of every tensor that the model reads."""
    names: dict[str, str] = {}
    family = _family(GgufKeys(file))
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
    """The keys of config.json. `rope_factors`: the values of the tensor rope_freqs, if it
    exists."""
    keys = GgufKeys(file)
    family = _family(keys)
    architecture, model_type = _MIXTRAL if family == "mixtral" else ARCHITECTURES[family]
    heads = keys.whole("attention.head_count")
    hidden = keys.whole("embedding_length")
    for scale in _SCALES:
        keys.refuse_unless(scale, 1)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        # by which models are recognised, also when the config is written to a directory
        "_name_or_path": file.metadata.get("general.name", ""),
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
        config |= moe_config_keys(keys, family)
    else:
        keys.refuse_unless("expert_count", 0)
    if family != "deepseek2":
        keys.refuse_unless("attention.value_length", config["head_dim"])
        keys.refuse_unless("rope.dimension_count", config["head_dim"])
    config["rope_scaling"] = rope_scaling(keys, config["head_dim"], rope_factors)
    return config


def _family(keys: GgufKeys) -> str:
    if keys.prefix not in ARCHITECTURES:
        raise WeightsError(
            f"{keys.file.path}: architecture {keys.prefix[:60]!r} is not supported. "
            f"Supported in GGUF files: {', '.join(ARCHITECTURES)}."
        )
    return "mixtral" if keys.prefix == "llama" and keys.get("expert_count") else keys.prefix


def _intermediate(keys: GgufKeys) -> int:
    """A model whose layers all have experts may state only their width."""
    key = "feed_forward_length"
    return keys.whole(key if keys.get(key) is not None else f"expert_{key}")


def _biased(file: GGUFFile) -> bool:
    return any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "q_a", "kv_a_mqa"))


def hf_generation(file: GGUFFile) -> dict[str, Any]:
    """The keys of generation_config.json that the file defines."""
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


ROPE_FACTORS = "rope_freqs.weight"


def rope_scaling(
    keys: GgufKeys, head_dim: int, factors: Sequence[float] | None
) -> dict[str, Any] | None:
    if factors is not None:
        return _from_factors(keys, head_dim, factors)
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.real("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(keys)
    raise WeightsError(
        f"{keys.file.path}: rope scaling {str(kind)[:60]!r} is not supported in GGUF files. "
        "Use the safetensors directory of the model."
    )


def _yarn(keys: GgufKeys) -> dict[str, Any]:
    factor = keys.real("rope.scaling.factor")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = keys.real(f"rope.scaling.yarn_{key}")
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if multiplier:
        # DeepSeek: a tenth of mscale_all_dim; mscale is assumed to be equal to it
        both = short(keys.real("rope.scaling.yarn_log_multiplier") * 10)
        scaling |= {"mscale": both, "mscale_all_dim": both}
    if keys.get("rope.scaling.attn_factor") is not None:
        # GGUF stores a factor on the usual magnitude, HF stores the product
        usual = 0.1 * math.log(factor) + 1.0
        scaling["attention_factor"] = keys.real("rope.scaling.attn_factor") * usual
    return scaling


def _from_factors(keys: GgufKeys, head_dim: int, factors: Sequence[float]) -> dict[str, Any] | None:
    """The HF form of the divisors of the rotary frequencies.

    Llama 3 scaling if its formula gives these divisors, otherwise longrope with them for any
    length.
    """
    values = np.asarray(factors, dtype=np.float64)
    sound = values.shape == (head_dim // 2,) and bool(np.all((values > 0) & (values < 1e6)))
    if not sound:
        raise WeightsError(
            f"{keys.file.path}: tensor {ROPE_FACTORS!r} must hold {head_dim // 2} positive "
            "numbers. Convert the model again."
        )
    if np.all(values == 1.0):
        return None
    original = keys.whole("rope.scaling.original_context_length", 8192)
    llama3 = {
        "rope_type": "llama3",
        "factor": short(float(values.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    theta = keys.real("rope.freq_base", 10_000.0)
    expected = _llama3_factors(theta, head_dim, float(values.max()), original)
    if np.allclose(values, expected, rtol=1e-5):
        return llama3
    return {
        "rope_type": "longrope",
        "short_factor": values.tolist(),
        "long_factor": values.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": keys.whole("context_length"),
    }


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> Any:
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


class GgufKeys:
    """Metadata below the architecture's prefix, with an error message for each wrong value."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.wrong(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.wrong(key, value)
        return short(float(value))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and value not in (0, 1):
            raise self.wrong(key, value)
        return default if value is None else bool(value)

    def refuse_unless(self, key: str, expected: int) -> None:
        """A missing key counts as the expected value."""
        value = self.get(key)
        if value is not None and value != expected:
            raise WeightsError(
                f"{self.file.path}: {self.prefix}.{key} is {str(value)[:60]}; only {expected} is "
                "supported for this architecture. Use another model."
            )

    def wrong(self, key: str, value: Any) -> WeightsError:
        what = "is missing" if value is None else f"is {str(value)[:60]}, which makes no sense"
        return WeightsError(
            f"{self.file.path}: metadata {self.prefix}.{key} {what}. Convert the model again."
        )


def short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 instead of 9.999999747378752e-06."""
    return value if isinstance(value, int) else float(str(np.float32(value)))
