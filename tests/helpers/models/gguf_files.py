"""GGUF files for tests, written with the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 2, 256, 4, 2, 64, 512, 96


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to q and k of llama: halves become neighbouring pairs."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def hf_weights(
    seed: int, *, tied: bool = False, norms: bool = False, biases: bool = False
) -> dict[str, np.ndarray]:
    """Random dense weights by their Hugging Face names."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * 0.1

    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = draw(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        weights |= {
            f"{stem}.input_layernorm.weight": draw(HIDDEN),
            f"{stem}.post_attention_layernorm.weight": draw(HIDDEN),
            f"{stem}.self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.mlp.gate_proj.weight": draw(INNER, HIDDEN),
            f"{stem}.mlp.up_proj.weight": draw(INNER, HIDDEN),
            f"{stem}.mlp.down_proj.weight": draw(HIDDEN, INNER),
        }
        if biases:
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                weights[f"{stem}.self_attn.{part}_proj.bias"] = draw(heads * HEAD_DIM)
        if norms:
            weights[f"{stem}.self_attn.q_norm.weight"] = draw(HEAD_DIM)
            weights[f"{stem}.self_attn.k_norm.weight"] = draw(HEAD_DIM)
    return weights


NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "model.norm.weight":
        return "output_norm.weight"
    parts = name.split(".")
    stem = NAMES[parts[-2]]
    return f"blk.{parts[2]}.{stem}.{parts[-1]}" if parts[1] == "layers" else f"{stem}.{parts[-1]}"


def write_model(
    path: Path,
    architecture: str = "llama",
    *,
    kind: str = "F32",
    mixed: dict[str, str] | None = None,
    seed: int = 0,
    tied: bool = False,
    parts: int = 1,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """A whole small model; answers its dense weights before they were quantised. `mixed`: the kinds
    of matrices that are not `kind`, by the part of a name before ".weight". Several parts are files
    beside `path`."""
    weights = hf_weights(
        seed, tied=tied, norms=architecture == "qwen3", biases=architecture == "qwen2"
    )
    most = 0 if parts == 1 else -(-len(weights) // parts)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, values in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        if architecture == "llama" and heads:
            values = permuted(values, heads)
        own = (mixed or {}).get(name.split(".")[-2], kind)
        add_tensor(writer, gguf_name(name), values, own if values.ndim == 2 else "F32")
    for name, values in (extra or {}).items():
        add_tensor(writer, name, values, "F32")
    finish(writer)
    return weights


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        adders.get(type(value), writer.add_string)(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        writer.add_tensor(name, random_blocks(values, kind), raw_dtype=number)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)


def random_blocks(like: np.ndarray, kind: str) -> np.ndarray:
    """Random bytes of that type in the shape of `like`, for values of 0.3 at most."""
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(like.size)
    raw = random.integers(0, 256, (like.size // block, nbytes), dtype=np.uint8)
    # where the factors are, and the largest integer that one scales
    places, most = {"Q4_K": ((0, 2), 945), "Q5_K": ((0, 2), 1953), "Q6_K": ((208,), 4064)}[kind]
    for at in places:
        scale = random.uniform(-0.3 / most, 0.3 / most, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    return raw.reshape(like.shape[0], -1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
