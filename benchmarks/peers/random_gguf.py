"""Random models as GGUF files, which llama.cpp reads too. Random weights: speed anchors.

Llama, Qwen3 and Qwen3-MoE. The vocabulary has bytes and a name for every other token. Rows of a
Llama's q and k are written in the order they have, which a converter would change: one more random
model, the same for whoever reads the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.weights.checkpoint import Checkpoint, open_checkpoint
from coterie.weights.quantize import dense

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
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_ENDS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
_ORDINARY, _CONTROL = 1, 3


def gguf(model: Path, form: str) -> Path:
    """A Hugging Face directory as BF16, Q8_0 or Q4_0; written once, beside the model."""
    target = model / f"{form}.gguf-peer"
    if not target.exists():
        write(open_checkpoint(model), form, target)
    return target


def write(checkpoint: Checkpoint, form: str, target: Path) -> None:
    import gguf as package

    config, kind = checkpoint.config, package.GGMLQuantizationType[form]
    partial = target.with_suffix(".part")
    writer = package.GGUFWriter(partial, _ARCHITECTURES[config["architectures"][0]])
    _describe(writer, config)
    _add_vocabulary(writer, config["vocab_size"])
    names = set(checkpoint.names())

    def values(name: str) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = dense(checkpoint.read(name + ".weight")).numpy()
        return found

    def add(name: str, data: npt.NDArray[np.float32]) -> None:
        if data.ndim == 1 or name.endswith("gate_inp.weight"):
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, package.quantize(data, kind), raw_dtype=kind)

    for source, name in _ENDS.items():
        if f"{source}.weight" in names:
            add(f"{name}.weight", values(source))
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        for source, name in _LAYER.items():
            if f"{stem}{source}.weight" in names:
                add(f"blk.{layer}.{name}.weight", values(stem + source))
        for source, name in _EXPERT.items() if "num_experts" in config else ():
            stack = [
                values(f"{stem}mlp.experts.{e}.{source}") for e in range(config["num_experts"])
            ]
            add(f"blk.{layer}.{name}.weight", np.stack(stack))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _describe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if "num_experts" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_vocabulary(writer: Any, size: int) -> None:
    """Byte-level; "aa" is there because both programs want at least one merge."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "aa"]
    tokens += [f"w{number}" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_ORDINARY] * (size - 1) + [_CONTROL])
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
