"""A LoRA for the tiny model in PEFT's layout, written by hand: importing PEFT takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK, WIDTH, LAYERS = 4, 64, 3


def write_lora(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = draw.normal(size=(RANK, WIDTH)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = draw.normal(size=(WIDTH, RANK)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
