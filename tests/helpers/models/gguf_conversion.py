"""A Hugging Face directory as the GGUF file a converter makes of it, and its twin in safetensors.

With `Q4_K_M`, matrices are mixed as quantisers mix them: Q4_K, Q6_K where it matters more, Q5_0
where rows are no whole blocks of 256, norms and routers dense.

Names come from the `gguf` package's own maps; the steps between (stacking experts, reordering q and
k of llama, cutting kv_b in two) are those of llama.cpp's converter.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.gguf_files import random_blocks
from tests.helpers.models.tiny import tiny_checkpoint

ARCHITECTURES = {
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
}
# in Q6_K
_FINER = ("v_proj", "down_proj", "lm_head")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write_twins(
    source: Path, folder: Path, kind: str, *, split_kv: bool = False
) -> tuple[Path, Path]:
    """`folder`/model.gguf at `kind` (F32, Q8_0 or Q4_K_M, whose K blocks are random), with the
    tokenizer of `source`, and a directory of the values that are in it."""
    config = json.loads((source / "config.json").read_text())
    tensors = {k: v.numpy() for k, v in load_file(source / "model.safetensors").items()}
    architecture = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_metadata(writer, config, split_kv)
    _add_tokenizer(writer, source)
    twin: dict[str, np.ndarray] = {}
    for name, values in _stacked(tensors).items():
        own = _type_of(name, values, kind)
        kept = _rounded(values, own)
        for single, part in _unstacked(name, kept):
            twin[single] = part
        for stored_name, stored in _converted(name, kept, config, split_kv):
            found = names.get_name(stored_name, try_suffixes=(".weight", ".bias"))
            assert found, stored_name
            _add(writer, found, stored, own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, _write_twin(source, folder / "twin", twin)


def write_stored_bits(architecture: str, folder: Path) -> tuple[Path, Path]:
    """`write_twins` in Q4_K_M of a tiny qwen3 or qwen3_moe that is wide enough for blocks of 256;
    one in `folder`."""
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    if architecture == "qwen3_moe":
        wide |= {"moe_intermediate_size": 256, "norm_topk_prob": True}
    return write_twins(tiny_checkpoint(architecture, **wide), folder, "Q4_K_M")


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to q and k of llama: halves become neighbouring pairs."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert:
            found.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = values
    plain = {name: values for name, values in tensors.items() if not _EXPERT.fullmatch(name)}
    stacks = {name: np.stack([one[i] for i in range(len(one))]) for name, one in found.items()}
    return plain | stacks


def _unstacked(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    if ".experts." not in name:
        return [(name, values)]
    return [(name.replace(".experts.", f".experts.{i}."), one) for i, one in enumerate(values)]


def _type_of(name: str, values: np.ndarray, kind: str) -> str:
    if kind != "Q4_K_M":
        return kind
    if values.ndim < 2 or name.endswith(".gate.weight"):
        return "F32"
    if values.shape[-1] % 256:
        return "Q5_0"
    return "Q6_K" if name.split(".")[-2] in _FINER else "Q4_K"


def _rounded(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "F32" or values.ndim < 2 or values.shape[-1] % 32:
        return values
    return gguf.quants.dequantize(_quantised(values, kind), gguf.GGMLQuantizationType[kind])


def _quantised(values: np.ndarray, kind: str) -> np.ndarray:
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    # the package only reads these: blocks drawn by the tensor's size, whatever its values
    raw = random_blocks(values.reshape(-1, values.shape[-1]), kind)
    return raw.reshape(*values.shape[:-1], -1)


def _converted(
    name: str, values: np.ndarray, config: dict[str, Any], split_kv: bool
) -> list[tuple[str, np.ndarray]]:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if config["model_type"] == "mixtral" and part in heads:
        return [(name, permuted(values, config[heads[part]]))]
    if split_kv and part == "kv_b_proj":
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        by_head = values.reshape(config["num_attention_heads"], nope + value, -1)
        keys = np.ascontiguousarray(by_head[:, :nope].swapaxes(1, 2))
        own = np.ascontiguousarray(by_head[:, nope:])
        return [(name.replace("kv_b", "k_b"), keys), (name.replace("kv_b", "v_b"), own)]
    return [(name, values)]


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    # the keys' half of kv_b is no longer in groups along its rows
    if kind == "F32" or values.ndim < 2 or values.shape[-1] % 32 or "attn_k_b" in name:
        writer.add_tensor(name, values.astype(np.float32))
        return
    raw_type = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, _quantised(values, kind), raw_dtype=raw_type)


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    """Of bytes and merges, with its template."""
    whole = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    tokens = sorted(whole["model"]["vocab"], key=whole["model"]["vocab"].__getitem__)
    named = {added["id"] for added in whole["added_tokens"]}
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[place in named] for place in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in whole["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(settings["bos_token"]))
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    writer.add_add_bos_token(True)
    writer.add_chat_template(settings["chat_template"])


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], split_kv: bool) -> None:
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    experts = [config.get(k) for k in ("num_experts", "num_local_experts", "n_routed_experts")]
    if any(experts):
        writer.add_expert_count(next(count for count in experts if count))
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "kv_lora_rank" not in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        return
    _add_latent_metadata(writer, config, split_kv)


def _add_latent_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], split_kv: bool) -> None:
    rope, own = config["qk_rope_head_dim"], config["v_head_dim"]
    rank, size = config["kv_lora_rank"], config["qk_nope_head_dim"] + rope
    writer.add_head_count_kv(1 if split_kv else config["num_attention_heads"])
    writer.add_key_length(rank + rope if split_kv else size)
    writer.add_value_length(rank if split_kv else own)
    if split_kv:
        writer.add_key_length_mla(size)
        writer.add_value_length_mla(own)
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rope)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    scaling = config["rope_parameters"]
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def _write_twin(source: Path, folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    own = {name: torch.from_numpy(values.copy()) for name, values in tensors.items()}
    save_file(own, folder / "model.safetensors")
    return folder
