"""Soft prompts (PEFT's prompt tuning): vectors in front of a prompt's first token.

They take positions, KV and context like tokens. Reads `prompt_embeddings [tokens, hidden]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coterie.adapters.kinds import options
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

PEFT_TYPE = "PROMPT_TUNING"
MAX_TOKENS = 1 << 16

_NAME = "prompt_embeddings"
_UNDERSTOOD = options.keys(
    "num_virtual_tokens token_dim num_transformer_submodules",
    # the base model's shape, and where training began
    "num_attention_heads num_layers prompt_tuning_init prompt_tuning_init_text",
    "tokenizer_name_or_path tokenizer_kwargs",
)
_REFUSED = {"modules_to_save": "it replaces whole modules of the base model"}


def read(config: options.PeftConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """[tokens, hidden]."""
    options.check(config, _UNDERSTOOD, _REFUSED)
    if config.get("num_transformer_submodules") not in (None, 1):
        raise WeightsError(
            "adapter_config.json: num_transformer_submodules must be 1: a decoder has one stack"
        )
    count = tokens_of(config)
    if tensors.keys() != {_NAME}:
        raise WeightsError(f"a soft prompt is one tensor {_NAME!r}, not {sorted(tensors)[:4]}")
    soft = tensors[_NAME]
    if soft.dim() != 2 or len(soft) != count:
        raise WeightsError(
            f"{_NAME!r} has shape {list(soft.shape)}; adapter_config.json says {count} tokens"
        )
    width = config.get("token_dim")
    if width is not None and width != soft.shape[1]:
        raise WeightsError(f"{_NAME!r} is {soft.shape[1]} wide; token_dim says {width!r}")
    return soft


def tokens_of(config: options.PeftConfig) -> int:
    return options.whole(config, "num_virtual_tokens", 1, MAX_TOKENS)
