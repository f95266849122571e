"""Tiny random MoE checkpoints of every architecture, written without transformers.

The contract suite runs where nothing but torch and safetensors is installed; that these are what
transformers would write is tested where it is.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.folders import temporary_folder

VOCAB, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 96, 64, 64, 8, 2, 3
HEADS, KV_HEADS, HEAD = 4, 2, 32
RANK, NOPE, ROPE, VALUE = 32, 16, 8, 16

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 256,
    "num_experts_per_tok": TOP_K,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": INNER,
        "intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": INNER},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": INNER, "head_dim": HIDDEN // HEADS},
    "deepseek_v2": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": INNER,
        "intermediate_size": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "head_dim": ROPE,
        "num_key_value_heads": HEADS,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
    },
    "dwr": {"num_experts": EXPERTS, "intermediate_size": INNER, "hidden_act": "gelu"},
}
_CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "dwr": "DWRForCausalLM",
}
ARCHITECTURES = tuple(_CLASSES)

_FOLDER = temporary_folder("coterie-contract-")


@cache
def checkpoint_of(architecture: str, dtype: str = "float32", **changes: int) -> Path:
    """A directory that lives as long as the process. `changes` are config keys."""
    name = "-".join([architecture, dtype, *(f"{k}{v}" for k, v in changes.items())])
    path = _FOLDER / name
    path.mkdir()
    config = _SHARED | _OWN[architecture] | changes
    config |= {"architectures": [_CLASSES[architecture]], "model_type": architecture}
    config["dtype"] = dtype
    (path / "config.json").write_text(json.dumps(config))
    draw = _Draw(getattr(torch, dtype))
    {"dwr": _dwr, "deepseek_v2": _deepseek}.get(architecture, _llama_like)(
        architecture, config, draw
    )
    save_file(draw.tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class _Draw:
    def __init__(self, dtype: torch.dtype) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._dtype = dtype
        self._random = torch.Generator().manual_seed(7)

    def __call__(self, name: str, *shape: int, std: float = 0.15, mean: float = 0.0) -> None:
        values = torch.randn(shape, generator=self._random) * std + mean
        self.tensors[name] = values.to(self._dtype)

    def norm(self, name: str, width: int) -> None:
        self(f"{name}.weight", width, std=0.2, mean=1.0)

    def product(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        self(f"{name}.weight", rows, columns)
        if bias:
            self(f"{name}.bias", rows)

    def gated(self, name: str, inner: int, names: tuple[str, str, str]) -> None:
        gate, up, down = names
        self(f"{name}.{gate}.weight", inner, HIDDEN)
        self(f"{name}.{up}.weight", inner, HIDDEN)
        self(f"{name}.{down}.weight", HIDDEN, inner)

    def ends(self) -> None:
        self("model.embed_tokens.weight", VOCAB, HIDDEN, std=1.0)
        self("lm_head.weight", VOCAB, HIDDEN)
        self.norm("model.norm", HIDDEN)

    def around(self, layer: str) -> None:
        self.norm(f"{layer}.input_layernorm", HIDDEN)
        self.norm(f"{layer}.post_attention_layernorm", HIDDEN)


_PROJ = ("gate_proj", "up_proj", "down_proj")


def _llama_like(kind: str, config: dict[str, Any], draw: _Draw) -> None:
    head, heads, kv = config["head_dim"], HEADS, KV_HEADS
    count = config.get("num_experts", config.get("num_local_experts", EXPERTS))
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if kind == "mixtral" else _PROJ
    inner = config.get("moe_intermediate_size", config.get("intermediate_size", INNER))
    draw.ends()
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        draw.around(layer)
        for part, rows in (("q", heads * head), ("k", kv * head), ("v", kv * head)):
            draw.product(f"{layer}.self_attn.{part}_proj", rows, HIDDEN)
        draw.product(f"{layer}.self_attn.o_proj", HIDDEN, heads * head)
        if kind == "qwen3_moe":
            draw.norm(f"{layer}.self_attn.q_norm", head)
            draw.norm(f"{layer}.self_attn.k_norm", head)
        if kind == "olmoe":
            draw.norm(f"{layer}.self_attn.q_norm", heads * head)
            draw.norm(f"{layer}.self_attn.k_norm", kv * head)
        draw(f"{layer}.{block}.gate.weight", count, HIDDEN, std=0.4)
        for expert in range(count):
            draw.gated(f"{layer}.{block}.experts.{expert}", inner, names)


def _deepseek(_: str, config: dict[str, Any], draw: _Draw) -> None:
    draw.ends()
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        draw.around(layer)
        attention = f"{layer}.self_attn"
        draw.product(f"{attention}.q_proj", HEADS * (NOPE + ROPE), HIDDEN)
        draw.product(f"{attention}.kv_a_proj_with_mqa", RANK + ROPE, HIDDEN)
        draw.norm(f"{attention}.kv_a_layernorm", RANK)
        draw.product(f"{attention}.kv_b_proj", HEADS * (NOPE + VALUE), RANK)
        draw.product(f"{attention}.o_proj", HIDDEN, HEADS * VALUE)
        if index < config["first_k_dense_replace"]:
            draw.gated(f"{layer}.mlp", config["intermediate_size"], _PROJ)
            continue
        draw(f"{layer}.mlp.gate.weight", EXPERTS, HIDDEN, std=0.4)
        draw.gated(f"{layer}.mlp.shared_experts", INNER, _PROJ)
        for expert in range(EXPERTS):
            draw.gated(f"{layer}.mlp.experts.{expert}", INNER, _PROJ)


def _dwr(_: str, config: dict[str, Any], draw: _Draw) -> None:
    draw("embeddings.weight", VOCAB, HIDDEN, std=1.0)
    draw("positions.weight", config["max_position_embeddings"], HIDDEN, std=0.3)
    for index in range(config["num_hidden_layers"]):
        block = f"blocks.{index}"
        draw.product(f"{block}.attn.qkv", 3 * HIDDEN, HIDDEN, bias=True)
        draw.product(f"{block}.attn.out", HIDDEN, HIDDEN, bias=True)
        draw.product(f"{block}.router", EXPERTS, HIDDEN, bias=True)
        for name in ("norm1", "norm2"):
            draw.norm(f"{block}.{name}", HIDDEN)
            draw(f"{block}.{name}.bias", HIDDEN)
        for expert in range(EXPERTS):
            draw.product(f"{block}.experts.{expert}.fc1", INNER, HIDDEN, bias=True)
            draw.product(f"{block}.experts.{expert}.fc2", HIDDEN, INNER, bias=True)
    draw.norm("norm", HIDDEN)
    draw("norm.bias", HIDDEN)
    draw("output.weight", VOCAB, HIDDEN)
