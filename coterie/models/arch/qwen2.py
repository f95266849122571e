"""Qwen2ForCausalLM (Qwen2, Qwen2.5): Llama's block with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from coterie.models.arch.qwen3 import any_layer_slides
from coterie.models.spec import ModelSpec, read_dense


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    window = config.get("sliding_window") if any_layer_slides(config) else None
    return read_dense({**config, "sliding_window": window}, max_context, qkv_bias=True)
