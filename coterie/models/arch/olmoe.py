"""OlmoeForCausalLM: experts in every layer; queries and keys are normed across all heads."""

from __future__ import annotations

from typing import Any

from coterie.core.errors import WeightsError
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
    moe = MoeSpec(
        layers=tuple(range(whole(config, "num_hidden_layers"))),
        num_experts=whole(config, "num_experts", config.get("num_local_experts")),
        intermediate=whole(config, "intermediate_size"),
        gate_rule=GateRule(
            top_k=whole(config, "num_experts_per_tok"),
            normalise=flag(config, "norm_topk_prob", False),
        ),
        gate="model.layers.{layer}.mlp.gate",
        parts=gated_parts("mlp"),
    )
    bias = flag(config, "attention_bias", False)
    return read_dense(
        {"rms_norm_eps": 1e-5, **config, "clip_qkv": None},
        max_context,
        qk_norm=True,
        flat_qk_norm=True,
        clip_qkv=_clip(config),
        qkv_bias=bias,
        o_bias=bias,
        moe=check_moe(moe),
    )


def _clip(config: dict[str, Any]) -> float | None:
    value = config.get("clip_qkv")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise WeightsError(f"config: clip_qkv must be a positive number, not {value!r}")
    return float(value)
