"""A random Qwen3-MoE directory as a GGUF file, for llama.cpp. Random weights: a speed anchor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
_EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_ENDS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf(model: Path, form: str) -> Path:
    """`form` is BF16, Q8_0 or Q4_0; written once, beside the model."""
    target = model / f"{form}.gguf-peer"
    if not target.exists():
        partial = target.with_suffix(".part")
        _write(model, form, partial)
        partial.rename(target)
    return target


def _write(model: Path, form: str, target: Path) -> None:
    import gguf as package

    from coterie.weights.checkpoint import open_checkpoint
    from coterie.weights.quantize import dense

    checkpoint = open_checkpoint(model)
    config = json.loads((model / "config.json").read_text())
    kind = package.GGMLQuantizationType[form]
    writer = package.GGUFWriter(target, "qwen3moe")
    _describe(writer, config)

    def values(name: str) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = dense(checkpoint.read(name + ".weight")).numpy()
        return found

    def add(name: str, data: npt.NDArray[np.float32]) -> None:
        if data.ndim == 1 or name.endswith("gate_inp.weight"):
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, package.quantize(data, kind), raw_dtype=kind)

    for source, name in _ENDS.items():
        add(f"{name}.weight", values(source))
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        for source, name in _LAYER.items():
            add(f"blk.{layer}.{name}.weight", values(stem + source))
        for source, name in _EXPERT.items():
            stack = [
                values(f"{stem}mlp.experts.{e}.{source}") for e in range(config["num_experts"])
            ]
            add(f"blk.{layer}.{name}.weight", np.stack(stack))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    # the benchmark uses token ids only, so llama.cpp needs no vocabulary
    writer.add_tokenizer_model("none")
