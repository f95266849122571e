"""Qwen3MoeForCausalLM: Qwen3's attention; some layers have experts, the others Qwen3's MLP."""

from __future__ import annotations

from typing import Any

from coterie.models.spec import (
    GateRule,
    ModelSpec,
    MoeSpec,
    check_moe,
    flag,
    gated_parts,
    read_dense,
    whole,
)


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    # unlike in Qwen3 the window applies to all layers, and head_dim has no own default
    window = config.get("sliding_window") if flag(config, "use_sliding_window", False) else None
    bias = flag(config, "attention_bias", False)
    return read_dense(
        {**config, "sliding_window": window},
        max_context,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        moe=_experts(config),
    )


def _experts(config: dict[str, Any]) -> MoeSpec:
    step = whole(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    every = range(whole(config, "num_hidden_layers"))
    return check_moe(
        MoeSpec(
            layers=tuple(i for i in every if i not in dense and (i + 1) % step == 0),
            # newer files say num_local_experts
            num_experts=whole(config, "num_experts", config.get("num_local_experts")),
            intermediate=whole(config, "moe_intermediate_size"),
            gate_rule=GateRule(
                top_k=whole(config, "num_experts_per_tok"),
                normalise=flag(config, "norm_topk_prob", False),
            ),
            gate="model.layers.{layer}.mlp.gate",
            parts=gated_parts("mlp"),
        )
    )
