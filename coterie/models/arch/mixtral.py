"""MixtralForCausalLM: Mistral's block with experts in every layer."""

from __future__ import annotations

from typing import Any

from coterie.models.spec import GateRule, ModelSpec, MoeSpec, check_moe, read_dense, whole

_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    # transformers' defaults for keys that are not in the file
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }
    stem = "model.layers.{layer}.block_sparse_moe."
    moe = MoeSpec(
        layers=tuple(range(whole(config, "num_hidden_layers"))),
        num_experts=whole(config, "num_local_experts", 8),
        intermediate=whole(config, "intermediate_size"),
        gate_rule=GateRule(top_k=whole(config, "num_experts_per_tok", 2), normalise=True),
        gate=stem + "gate",
        parts={part: f"{stem}experts.{{expert}}.{name}.weight" for part, name in _PARTS.items()},
    )
    return read_dense({**defaults, **config}, max_context, moe=check_moe(moe))
