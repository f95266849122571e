"""MistralForCausalLM: Llama's block without biases, with a sliding window in the first releases.

The window limits the served context: inside it, sliding and full attention are the same.
"""

from __future__ import annotations

from typing import Any

from coterie.core.errors import WeightsError
from coterie.models.spec import ModelSpec, read_dense


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    if config.get("layer_types"):
        raise WeightsError("config: layer_types is not supported for MistralForCausalLM")
    # transformers' defaults for keys that are not in the file
    defaults = {"num_key_value_heads": 8, "sliding_window": 4096}
    return read_dense({**defaults, **config}, max_context)
