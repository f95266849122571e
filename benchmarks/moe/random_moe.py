"""Writes a random Qwen3-MoE directory in seconds, without transformers, for the MoE benchmarks.

The default is the model of the published figures: 12 layers of 64 experts, 2.08 GB in bf16. Every
weight is random and none is repeated, so that caches do not help. `--skew` makes some experts more
popular than others, as training does.

    python -m benchmarks.moe.random_moe DIRECTORY [--layers 12 --experts 64 --skew 0.5]
"""

from __future__ import annotations

import argparse
import json
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INDEX = "model.safetensors.index.json"
STD = 0.02
_TABLE = 1 << 16


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int = 12
    experts: int = 64
    top_k: int = 8
    hidden: int = 1024
    intermediate: int = 384
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    vocab: int = 49152
    positions: int = 4096
    # 0 = all experts equal; the scale of the e-th most popular router row is (1 + e) ** -skew
    skew: float = 0.0
    # scale of the embeddings relative to other weights: with 1 routing depends on the mean of the
    # context (which hardly changes from token to token), with 10 on the token itself, as after
    # training
    spread: float = 1.0
    seed: int = 0

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.intermediate * self.experts * self.layers


def config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": shape.vocab - 1,
    }


def layer_shapes(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    head, wide = f"model.layers.{layer}", shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    names: dict[str, tuple[int, ...]] = {
        f"{head}.input_layernorm.weight": (shape.hidden,),
        f"{head}.post_attention_layernorm.weight": (shape.hidden,),
        f"{head}.self_attn.q_proj.weight": (wide, shape.hidden),
        f"{head}.self_attn.k_proj.weight": (narrow, shape.hidden),
        f"{head}.self_attn.v_proj.weight": (narrow, shape.hidden),
        f"{head}.self_attn.o_proj.weight": (shape.hidden, wide),
        f"{head}.self_attn.q_norm.weight": (shape.head_dim,),
        f"{head}.self_attn.k_norm.weight": (shape.head_dim,),
        f"{head}.mlp.gate.weight": (shape.experts, shape.hidden),
    }
    for expert in range(shape.experts):
        name = f"{head}.mlp.experts.{expert}"
        names[f"{name}.gate_proj.weight"] = (shape.intermediate, shape.hidden)
        names[f"{name}.up_proj.weight"] = (shape.intermediate, shape.hidden)
        names[f"{name}.down_proj.weight"] = (shape.hidden, shape.intermediate)
    return names


def shards(shape: Shape) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """File names and their tensors: one file per layer, one for the rest."""
    total = shape.layers + 1
    yield (
        f"model-00001-of-{total:05d}.safetensors",
        {
            "model.embed_tokens.weight": (shape.vocab, shape.hidden),
            "model.norm.weight": (shape.hidden,),
            "lm_head.weight": (shape.vocab, shape.hidden),
        },
    )
    for layer in range(shape.layers):
        name = f"model-{layer + 2:05d}-of-{total:05d}.safetensors"
        yield name, layer_shapes(shape, layer)


def write(path: Path, shape: Shape | None = None) -> Path:
    """Write the directory, unless it exists with the same shape."""
    shape = shape or Shape()
    note = path / "random_moe.json"
    if note.exists() and json.loads(note.read_text()) == asdict(shape):
        return path
    path.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    with ThreadPoolExecutor(2) as pool:
        jobs = []
        for number, (file, names) in enumerate(shards(shape)):
            where |= dict.fromkeys(names, file)
            jobs.append(pool.submit(_write_shard, path / file, names, shape, number))
        for job in jobs:
            job.result()
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps(config(shape), indent=1))
    _write_tokenizer(path, shape.vocab)
    note.write_text(json.dumps(asdict(shape)))
    return path


def _write_shard(path: Path, names: dict[str, tuple[int, ...]], shape: Shape, number: int) -> None:
    draw = _Draw(np.random.SFC64(np.random.SeedSequence([shape.seed, number])), shape)
    header: dict[str, Any] = {}
    offset = 0
    for name, size in names.items():
        end = offset + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in names.items():
            file.write(draw(name, size).tobytes())


class _Draw:
    """bf16 values as uint16: normal draws from a table of 65,536 of them, norms around one."""

    def __init__(self, source: np.random.SFC64, shape: Shape) -> None:
        self.source, self.shape = source, shape
        values = np.random.Generator(np.random.SFC64(1)).standard_normal(_TABLE, np.float32)
        self.table = _bf16(values * np.float32(STD))

    def __call__(self, name: str, size: tuple[int, ...]) -> npt.NDArray[np.uint16]:
        if len(size) == 1:
            return _bf16(np.full(size, 1.0, np.float32))
        count = int(np.prod(size))
        raw: npt.NDArray[np.uint64] = self.source.random_raw(-(-count // 4))
        drawn = self.table[raw.view(np.uint16)[:count]]
        if name.startswith("model.embed_tokens") and self.shape.spread != 1.0:
            return _bf16(_wide(drawn) * np.float32(self.shape.spread))
        if name.endswith("mlp.gate.weight") and self.shape.skew:
            return self._skewed(drawn.reshape(size))
        return drawn

    def _skewed(self, router: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        order = np.random.Generator(self.source).permutation(self.shape.experts)
        scale = (1.0 + order.astype(np.float32)) ** np.float32(-self.shape.skew)
        return _bf16(_wide(router) * scale[:, None])


def _wide(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits: npt.NDArray[np.uint16] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits


def _write_tokenizer(path: Path, vocab: int) -> None:
    """The first 256 tokens are bytes; the rest have names, so that any id can be decoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {text: number for number, text in enumerate(alphabet[:vocab])}
    words |= {f"w{number}": number for number in range(len(words), vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Qwen3-MoE directory.")
    parser.add_argument("directory", type=Path)
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args())
    directory = args.pop("directory")
    started = time.perf_counter()
    shape = Shape(**args)
    write(directory, shape)
    size = sum(file.stat().st_size for file in directory.iterdir())
    share = 2 * shape.expert_params / size
    print(
        f"{directory}: {size / 1e9:.2f} GB, {100 * share:.0f}% of it experts, "
        f"{time.perf_counter() - started:.1f} s"
    )


if __name__ == "__main__":
    main()
