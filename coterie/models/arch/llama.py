"""LlamaForCausalLM: Llama 1 to 3.x, SmolLM2, and all models saved in its format."""

from __future__ import annotations

from typing import Any

from coterie.models.spec import ModelSpec, read_dense


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return read_dense(
        config,
        max_context,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
