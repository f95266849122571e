"""Random LoRA adapters in PEFT's format, as many as a benchmark needs, in a library by digest.

Weights are drawn, not trained: what serving an adapter costs does not depend on what it learnt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from coterie.core.plan import AdapterChoice
from coterie.models.spec import ModelSpec
from coterie.packages.paths import digest_of

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# small enough that a stack of them hardly changes the model's answers
SPREAD = 0.01


def sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Module -> (in, out)."""
    wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden, spec.intermediate
    return {
        "q_proj": (hidden, wide),
        "k_proj": (hidden, narrow),
        "v_proj": (hidden, narrow),
        "o_proj": (wide, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def adapter_bytes(spec: ModelSpec, rank: int, modules: Sequence[str], width: int = 2) -> int:
    shapes = sizes(spec)
    return spec.num_layers * sum(rank * sum(shapes[module]) for module in modules) * width


def write_adapter(
    folder: Path, spec: ModelSpec, seed: int, rank: int, modules: Sequence[str]
) -> Path:
    """A PEFT directory of bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(spec.num_layers):
        for module in modules:
            width, height = sizes(spec)[module]
            block = "mlp" if module in ALL_LINEAR[4:] else "self_attn"
            stem = f"base_model.model.model.layers.{layer}.{block}.{module}"
            for name, shape in (("lora_A", (rank, width)), ("lora_B", (height, rank))):
                values = torch.randn(shape, generator=draw) * SPREAD
                tensors[f"{stem}.{name}.weight"] = values.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def fill_library(
    library: Path, spec: ModelSpec, count: int, rank: int, modules: Sequence[str]
) -> list[AdapterChoice]:
    """`count` adapters under their digests; adapters that already exist under a name are kept."""
    library.mkdir(parents=True, exist_ok=True)
    known = library / f"drawn-{count}-{rank}-{len(modules)}.json"
    if known.exists():
        return [
            AdapterChoice(f"a{i}", digest) for i, digest in enumerate(json.loads(known.read_text()))
        ]
    digests = []
    for seed in range(count):
        made = write_adapter(library / "making", spec, seed, rank, modules)
        digest = digest_of(made)
        if (library / digest).exists():
            shutil.rmtree(made)
        else:
            made.rename(library / digest)
        digests.append(digest)
    known.write_text(json.dumps(digests))
    return [AdapterChoice(f"a{i}", digest) for i, digest in enumerate(digests)]
