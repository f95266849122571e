"""DeepseekV2ForCausalLM: latent attention, experts routed and shared, dense first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coterie.core.errors import WeightsError
from coterie.models.config_fields import shown
from coterie.models.spec import (
    GateRule,
    LatentSpec,
    ModelSpec,
    MoeSpec,
    check_moe,
    flag,
    gated_parts,
    read_dense,
    whole,
)

# options with the only values that transformers' DeepSeek-V2 computes
_ONLY: dict[str, tuple[Any, ...]] = {
    "topk_method": ("greedy", "group_limited_greedy", None),
    "scoring_func": ("softmax", None),
    "moe_layer_freq": (1, None),
    # the published code divides by the sum here, transformers does not
    "norm_topk_prob": (False, None),
}


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    for key, allowed in _ONLY.items():
        if config.get(key) not in allowed:
            raise WeightsError(f"config: {key} {shown(config[key])} is not supported")
    heads = whole(config, "num_attention_heads")
    if config.get("num_key_value_heads") not in (heads, None):
        raise WeightsError("config: num_key_value_heads must be num_attention_heads")
    latent = LatentSpec(
        q_rank=None if config.get("q_lora_rank") is None else whole(config, "q_lora_rank"),
        kv_rank=whole(config, "kv_lora_rank"),
        nope=whole(config, "qk_nope_head_dim"),
        rope=whole(config, "qk_rope_head_dim"),
        value=whole(config, "v_head_dim"),
    )
    bias = flag(config, "attention_bias", False)
    spec = read_dense(
        # only these dimensions of a head are rotated
        {**config, "head_dim": latent.rope},
        max_context,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        latent=latent,
        moe=_experts(config),
    )
    return replace(spec, num_kv_heads=1, head_dim=latent.kv_rank + latent.rope)


def _experts(config: dict[str, Any]) -> MoeSpec:
    width = whole(config, "moe_intermediate_size")
    limited = config.get("topk_method") == "group_limited_greedy"
    first = config.get("first_k_dense_replace") or 0
    return check_moe(
        MoeSpec(
            layers=tuple(range(first, whole(config, "num_hidden_layers"))),
            num_experts=whole(config, "n_routed_experts", config.get("num_experts")),
            intermediate=width,
            gate_rule=GateRule(
                top_k=whole(config, "num_experts_per_tok"),
                normalise=False,
                scale=float(config.get("routed_scaling_factor") or 1.0),
                groups=whole(config, "n_group") if limited else 1,
                top_groups=whole(config, "topk_group") if limited else 1,
            ),
            gate="model.layers.{layer}.mlp.gate",
            parts=gated_parts("mlp"),
            shared=width * (config.get("n_shared_experts") or 0),
        )
    )
