"""Qwen3ForCausalLM: Llama's block with an RMS norm on each query and key head before rope."""

from __future__ import annotations

from typing import Any

from coterie.models.spec import ModelSpec, read_dense


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window") if any_layer_slides(config) else None
    # head_dim is not hidden_size / heads in this family; 128 is transformers' default
    settings = {"head_dim": 128, **config, "sliding_window": window}
    return read_dense(settings, max_context, qk_norm=True, qkv_bias=bias, o_bias=bias)


def any_layer_slides(config: dict[str, Any]) -> bool:
    """Whether any layer uses the window (transformers does not by default)."""
    if not config.get("use_sliding_window", False):
        return False
    kinds = config.get("layer_types")
    if kinds:
        return "sliding_attention" in kinds
    return bool(config.get("max_window_layers", 28) < config["num_hidden_layers"])
