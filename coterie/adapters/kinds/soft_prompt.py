"""Soft prompts (PEFT's prompt tuning): vectors before the first token of a prompt.

They use positions, KV and context like tokens. Reads `prompt_embeddings [tokens, hidden]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coterie.adapters.base import AdapterContent
from coterie.adapters.kinds import options
from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import FORMATS, PROMPT, PeftConfig

if TYPE_CHECKING:
    from torch import Tensor

_UNDERSTOOD = options.keys(
    "num_virtual_tokens token_dim num_transformer_submodules",
    # the shape of the base model, and the start of training
    "num_attention_heads num_layers prompt_tuning_init prompt_tuning_init_text",
    "tokenizer_name_or_path tokenizer_kwargs",
)
_REFUSED = {"modules_to_save": "it replaces whole modules of the base model"}


def read(config: PeftConfig, tensors: Mapping[str, Tensor]) -> AdapterContent:
    options.check(config, _UNDERSTOOD, _REFUSED)
    if config.get("num_transformer_submodules") not in (None, 1):
        raise WeightsError(
            "adapter_config.json: num_transformer_submodules must be 1: a decoder has one stack"
        )
    count = FORMATS["soft_prompt"].soft_tokens(config)
    if tensors.keys() != {PROMPT}:
        raise WeightsError(f"a soft prompt is one tensor {PROMPT!r}, not {sorted(tensors)[:4]}")
    soft = tensors[PROMPT]
    if soft.dim() != 2 or len(soft) != count:
        raise WeightsError(
            f"{PROMPT!r} has shape {list(soft.shape)}; adapter_config.json says {count} tokens"
        )
    width = config.get("token_dim")
    if width is not None and width != soft.shape[1]:
        raise WeightsError(f"{PROMPT!r} is {soft.shape[1]} wide; token_dim says {width!r}")
    return AdapterContent(soft=soft)
