"""Writes an adapter as PEFT 0.21 does: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from examples.expert_training.modules import Adapted

PEFT_VERSION = "0.21.2"

_COMMON: dict[str, Any] = {
    "auto_mapping": None,
    "inference_mode": True,
    "modules_to_save": None,
    "peft_version": PEFT_VERSION,
    "revision": None,
    "task_type": "CAUSAL_LM",
}
_LORA: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "monteclora_config": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
_IA3: dict[str, Any] = {
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "init_ia3_weights": True,
    "peft_type": "IA3",
}


def save(adapted: Adapted, out: Path, base_name: str) -> int:
    """Returns the bytes of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu() for name, value in adapted.tensors().items()}
    tensors = {name: tensors[name].contiguous() for name in sorted(tensors)}
    weights = out / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    values = _config(adapted) | {"base_model_name_or_path": base_name}
    (out / "adapter_config.json").write_text(json.dumps(values, indent=2, sort_keys=True))
    return weights.stat().st_size


def _config(adapted: Adapted) -> dict[str, Any]:
    shape = adapted.shape
    targets = {"target_modules": list(shape.targets)}
    if shape.kind == "ia3":
        chosen = [name for name in shape.feedforward if name in shape.targets]
        return _COMMON | _IA3 | targets | {"feedforward_modules": chosen}
    if adapted.prompt is not None:
        return _COMMON | _prompt_tuning(adapted.model, len(adapted.prompt))
    own = {"r": shape.rank, "lora_alpha": shape.alpha, "use_dora": shape.kind == "dora"}
    return _COMMON | _LORA | targets | own


def _prompt_tuning(model: nn.Module, tokens: int) -> dict[str, Any]:
    return {
        "num_attention_heads": model.config.num_attention_heads,
        "num_layers": model.config.num_hidden_layers,
        "num_transformer_submodules": 1,
        "num_virtual_tokens": tokens,
        "peft_type": "PROMPT_TUNING",
        "prompt_tuning_init": "RANDOM",
        "prompt_tuning_init_text": None,
        "token_dim": model.config.hidden_size,
        "tokenizer_kwargs": None,
        "tokenizer_name_or_path": None,
    }
