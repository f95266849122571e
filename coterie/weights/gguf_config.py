"""GGUF metadata in Hugging Face words: config keys, generation keys, tensor names.

One entry per architecture in `ARCHITECTURES`. Refuses what it cannot translate without loss: a key
or tensor that is silently dropped changes the model. Knows nothing of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.core.errors import WeightsError
from coterie.weights.gguf import GGUFFile

# GGUF architecture -> (HF class, model_type). Mistral is stored as llama and computes the same.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}

# converters reorder the rows of q and k for these (pairs side by side instead of halves)
PERMUTED = frozenset({"llama"})

ROPE_FACTORS = "rope_freqs.weight"

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


def hf_name(name: str) -> str | None:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; None when unknown."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d{1,5})\.([a-z_]+)", stem)
    if layer is None or layer[2] not in _LAYER:
        return None
    return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{kind}"


def tensor_names(file: GGUFFile) -> dict[str, str]:
    """HF name -> GGUF name of every tensor the model reads."""
    names: dict[str, str] = {}
    for name in file.tensors:
        if name == ROPE_FACTORS or _REDUNDANT.fullmatch(name):
            continue
        translated = hf_name(name)
        if translated is None:
            raise WeightsError(
                f"{file.path}: holds the tensor {name!r}, which no supported architecture "
                f"({', '.join(ARCHITECTURES)}) has. Use another model."
            )
        names[translated] = name
    return names


def hf_config(file: GGUFFile, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """The keys of config.json. `rope_factors`: the values of the tensor rope_freqs, when there."""
    keys = _Keys(file)
    architecture, model_type = keys.architecture()
    heads = keys.whole("attention.head_count")
    hidden = keys.whole("embedding_length")
    head_dim = keys.whole("attention.key_length", hidden // max(heads, 1))
    keys.refuse_unless("attention.value_length", head_dim)
    keys.refuse_unless("rope.dimension_count", head_dim)
    keys.refuse_unless("expert_count", 0)
    for scale in _SCALES:
        keys.refuse_unless(scale, 1)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(keys, head_dim, rope_factors),
        "sliding_window": keys.get("attention.sliding_window"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def hf_generation(file: GGUFFile) -> dict[str, Any]:
    """The keys of generation_config.json that the file has an opinion on."""
    generation: dict[str, Any] = {
        name: _short(file.metadata[key])
        for key, name in _GENERATION.items()
        if isinstance(file.metadata.get(key), int | float)
    }
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    known = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    return {**generation, "eos_token_id": known} if known else generation


class _Keys:
    """Metadata below the architecture's prefix, with a sentence for each thing that is wrong."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture", ""))

    def architecture(self) -> tuple[str, str]:
        parts = self.file.metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise WeightsError(
                f"{self.file.path}: one of {parts} parts of a split GGUF file. Join them first "
                "(llama-gguf-split --merge)."
            )
        if self.prefix not in ARCHITECTURES:
            raise WeightsError(
                f"{self.file.path}: architecture {self.prefix!r} is not supported. "
                f"Supported in GGUF files: {', '.join(ARCHITECTURES)}."
            )
        return ARCHITECTURES[self.prefix]

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
        return _short(float(value))

    def refuse_unless(self, key: str, expected: int) -> None:
        value = self.get(key)
        if value is not None and value != expected:
            raise WeightsError(
                f"{self.file.path}: {self.prefix}.{key} is {value!r}; only {expected} is supported "
                "for this architecture. Use another model."
            )

    def wrong(self, key: str, value: Any) -> WeightsError:
        what = "is missing" if value is None else f"is {str(value)[:60]}, which makes no sense"
        return WeightsError(
            f"{self.file.path}: metadata {self.prefix}.{key} {what}. Convert the model again."
        )


def _rope_scaling(
    keys: _Keys, head_dim: int, factors: Sequence[float] | None
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
        f"{keys.file.path}: rope scaling {kind!r} is not supported in GGUF files. "
        "Use the safetensors directory of the model."
    )


def _yarn(keys: _Keys) -> dict[str, Any]:
    factor = keys.real("rope.scaling.factor")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
    }
    for key in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = keys.real(f"rope.scaling.yarn_{key}")
    if keys.get("rope.scaling.attn_factor") is not None:
        # GGUF stores what is multiplied onto the usual magnitude, HF the whole product
        usual = 0.1 * math.log(factor) + 1.0
        scaling["attention_factor"] = keys.real("rope.scaling.attn_factor") * usual
    return scaling


def _from_factors(keys: _Keys, head_dim: int, factors: Sequence[float]) -> dict[str, Any] | None:
    """What the divisors of the rotary frequencies mean in HF words.

    Llama 3 scaling when its formula gives these divisors, else longrope with them for any length.
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
        "factor": _short(float(values.max())),
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


def _vocab_size(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise WeightsError(
            f"{file.path}: no token embedding matrix, so this is not a language model. "
            "Use another file."
        )
    return info.shape[0]


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return value if isinstance(value, int) else float(str(np.float32(value)))
