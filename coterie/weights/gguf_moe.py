"""The MoE half of GGUF metadata in Hugging Face words: experts, routing, latent attention.

One function per architecture in `EXPERT_KEYS`. What a converter does not write down is taken as
llama.cpp computes it. Knows no tensor's bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coterie.weights.gguf_keys import Keys

_SOFTMAX = 1

LAYER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    # kv_b_proj cut in two, head by head, the keys' half turned: [heads, kv_rank, nope]
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}

MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}

# files from before experts were stacked: blk.0.ffn_gate.7
MIXTRAL_SINGLE = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}


def expert_keys(keys: Keys, family: str) -> dict[str, Any]:
    """Config keys of the experts of `family`, a key of EXPERT_KEYS."""
    keys.refuse_unless("expert_gating_func", _SOFTMAX)
    if family != "deepseek2":
        keys.refuse_unless("expert_shared_count", 0)
        keys.refuse_unless("expert_group_count", 1)
        keys.refuse_unless("expert_weights_scale", 1)
    return {
        "num_experts_per_tok": keys.whole("expert_used_count"),
        **EXPERT_KEYS[family](keys),
    }


def _qwen3moe(keys: Keys) -> dict[str, Any]:
    layers = range(keys.whole("block_count"))
    return {
        "num_experts": keys.whole("expert_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "mlp_only_layers": [
            layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in keys.file.tensors
        ],
    }


def _mixtral(keys: Keys) -> dict[str, Any]:
    keys.refuse_unless("expert_weights_norm", True)
    return {"num_local_experts": keys.whole("expert_count")}


def _olmoe(keys: Keys) -> dict[str, Any]:
    clip = keys.get("attention.clamp_kqv")
    return {
        "num_experts": keys.whole("expert_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "clip_qkv": keys.real("attention.clamp_kqv") if clip else None,
    }


def _deepseek2(keys: Keys) -> dict[str, Any]:
    keys.refuse_unless("expert_weights_norm", False)
    groups = keys.get("expert_group_count")
    limited = isinstance(groups, int) and groups > 1
    rope = keys.whole("rope.dimension_count")
    # newer converters say what the cache holds in key_length, and a head's own sizes here
    mla = "_mla" if keys.get("attention.key_length_mla") is not None else ""
    ranked = keys.get("attention.q_lora_rank") is not None
    return {
        "n_routed_experts": keys.whole("expert_count"),
        "n_shared_experts": keys.get("expert_shared_count") or 0,
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get("leading_dense_block_count") or 0,
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "topk_method": "group_limited_greedy" if limited else "greedy",
        "n_group": keys.whole("expert_group_count") if limited else None,
        "topk_group": keys.whole("expert_group_used_count") if limited else None,
        "q_lora_rank": keys.whole("attention.q_lora_rank") if ranked else None,
        "kv_lora_rank": keys.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": keys.whole(f"attention.key_length{mla}") - rope,
        "v_head_dim": keys.whole(f"attention.value_length{mla}"),
        "num_key_value_heads": keys.whole("attention.head_count"),
        "head_dim": rope,
    }


EXPERT_KEYS: dict[str, Callable[[Keys], dict[str, Any]]] = {
    "qwen3moe": _qwen3moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "deepseek2": _deepseek2,
}
