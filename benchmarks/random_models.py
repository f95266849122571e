"""Random models in memory with the shapes of real ones, for machines that have no files of them.

A tensor is drawn on the device when it is read, the same each time. An expert is a copy of one of a
few prepared records: 58 GB of experts are in place in seconds, and as each has its own slot on the
device, a step reads as many bytes as with experts that all differ.
"""

from __future__ import annotations

import ctypes
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from coterie.core.moe import MoeSettings
from coterie.kernels.cpu.expert_record import pack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.models.base import CausalLM, load_model
from coterie.models.build.moe import MoeRequirements
from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.store.base import ExpertGeometry, Key, StoreTimings
from coterie.moe.store.disk import DiskReader
from coterie.weights.checkpoint import Checkpoint
from coterie.weights.files import FileExtent
from coterie.weights.quantize import DenseWeight, Weight

_SHARED: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **_SHARED,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        **_SHARED,
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B": {
        **_SHARED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V2-Lite": {
        **_SHARED,
        "rope_theta": 1e4,
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "vocab_size": 102_400,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
    },
}
# the same architectures in a size that a CPU runs at once
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 384,
}

# of all matrices inside a layer
STD = 0.02
# an embedding this wide outweighs what layers add, so that routing depends on the token
_EMBEDDING_STD = 4.0
# the standard deviation of logits: a few tokens are likely, as in a trained model
_LOGITS_STD = 4.0
_RECORDS = 8


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    return {key: _TINY.get(key, value) for key, value in config.items()}


class RandomCheckpoint:
    """A `Checkpoint` without a file. It has no experts: `RandomExperts` makes them."""

    def __init__(self, config: dict[str, Any], device: str, skewed: bool = False) -> None:
        self.config, self.path, self._skewed = config, Path("random"), skewed
        self.generation: dict[str, Any] = {}
        self.device, self._shapes = device, tensor_shapes(config)
        self._seeds = {name: seed for seed, name in enumerate(self._shapes)}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored_as(self, name: str) -> str:
        return "BF16"

    def read(self, name: str) -> Weight:
        draw = torch.Generator(self.device).manual_seed(self._seeds[name])
        values = torch.randn(self._shapes[name], generator=draw, device=self.device)
        mean, std = drawn_as(name, self.config)
        values.mul_(std).add_(mean)
        if self._skewed:
            _skew(name, values, draw)
        return DenseWeight(values.bfloat16())

    def raw(self, name: str) -> NoReturn:
        raise NotImplementedError("a random model has no bytes on disk")

    def extent(self, name: str) -> FileExtent:
        return FileExtent(self.path, 0, 0)

    def unmap(self) -> None:
        """Nothing is kept."""

    release = unmap

    def fingerprint(self) -> str:
        return "random"


# the first channel is the same for all tokens: what gates multiply it with is a bias
_CONSTANT = 3.0


def _skew(name: str, values: Tensor, draw: torch.Generator) -> None:
    """The bias of the expert of rank r is -log(1 + r); every layer has its own order. The rest of
    a gate's logits is normal, not Gumbel, and scaled to the same deviation."""
    if name == "model.embed_tokens.weight":
        values[:, 0] = _CONSTANT * _EMBEDDING_STD
    elif name.endswith("mlp.gate.weight"):
        experts, hidden = values.shape
        ranks = torch.randperm(experts, generator=draw, device=values.device)
        values *= math.pi / math.sqrt(6) / (STD * math.sqrt(hidden))
        values[:, 0] = -torch.log1p(ranks.float()) / _CONSTANT


def drawn_as(name: str, config: dict[str, Any]) -> tuple[float, float]:
    """The mean and the standard deviation of a tensor's values."""
    tied = config["tie_word_embeddings"]
    if name == "model.norm.weight" and tied:
        # signs differ, or every token would predict itself
        return 0.0, 1.0
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name == "model.embed_tokens.weight" and not tied:
        return 0.0, _EMBEDDING_STD
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        return 0.0, _LOGITS_STD / math.sqrt(config["hidden_size"])
    return 0.0, STD


def weight_bytes(config: dict[str, Any]) -> int:
    """Of all but the experts, in bf16."""
    return 2 * sum(map(math.prod, tensor_shapes(config).values()))


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """All tensors of a Llama, Qwen3, Qwen3-MoE or DeepSeek-V2, except experts."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    architecture = config["architectures"][0]
    latent = architecture == "DeepseekV2ForCausalLM"
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        found |= {
            stem + "input_layernorm.weight": (hidden,),
            stem + "post_attention_layernorm.weight": (hidden,),
        }
        found |= (_latent_shapes if latent else _attention_shapes)(config, stem + "self_attn.")
        if architecture == "Qwen3MoeForCausalLM":
            found[stem + "mlp.gate.weight"] = (config["num_experts"], hidden)
        elif latent and layer >= config["first_k_dense_replace"]:
            found[stem + "mlp.gate.weight"] = (config["n_routed_experts"], hidden)
            width = config["n_shared_experts"] * config["moe_intermediate_size"]
            found |= _mlp_shapes(hidden, width, stem + "mlp.shared_experts.")
        else:
            found |= _mlp_shapes(hidden, inner, stem + "mlp.")
    return found


def _mlp_shapes(hidden: int, inner: int, stem: str) -> dict[str, tuple[int, ...]]:
    return {
        stem + "gate_proj.weight": (inner, hidden),
        stem + "up_proj.weight": (inner, hidden),
        stem + "down_proj.weight": (hidden, inner),
    }


def _attention_shapes(config: dict[str, Any], stem: str) -> dict[str, tuple[int, ...]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {
        stem + "q_proj.weight": (heads, hidden),
        stem + "k_proj.weight": (kv_heads, hidden),
        stem + "v_proj.weight": (kv_heads, hidden),
        stem + "o_proj.weight": (hidden, heads),
    }
    if config["architectures"][0].startswith("Qwen3"):
        found |= {stem + f"{part}_norm.weight": (dim,) for part in "qk"}
    return found


def _latent_shapes(config: dict[str, Any], stem: str) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["kv_lora_rank"],
    )
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    return {
        stem + "q_proj.weight": (heads * (nope + rope), hidden),
        stem + "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        stem + "kv_a_layernorm.weight": (rank,),
        stem + "kv_b_proj.weight": (heads * (nope + value), rank),
        stem + "o_proj.weight": (hidden, heads * value),
    }


class RandomExperts:
    """An `ExpertStore` without a file: every expert is a copy of one of a few records."""

    def __init__(
        self, geometry: ExpertGeometry, hidden: int, intermediate: int, dtype: str
    ) -> None:
        self.geometry = geometry
        self._layout = ExpertLayout(hidden, intermediate, True, (dtype,) * 3)
        self.slot_bytes = self._layout.nbytes
        self.expert_bytes = geometry.total * self.slot_bytes
        self.staging_bytes = 0
        self.disk, self.spent = DiskReader(), StoreTimings()
        self._records = [self._draw(seed) for seed in range(_RECORDS)]

    @property
    def fingerprint(self) -> str:
        return "random"

    @property
    def lineage(self) -> tuple[str, ...]:
        return (self.fingerprint,)

    def layout(self, layer: int) -> ExpertLayout:
        return self._layout

    def read_bytes(self, key: Key) -> int:
        return self.slot_bytes

    def read(self, key: Key, out: Tensor) -> int:
        # neighbours in a layer, and the same expert of neighbouring layers, are different records
        record = self._records[(3 * key[0] + key[1]) % _RECORDS]
        # ctypes lets other threads run meanwhile
        ctypes.memmove(out.data_ptr(), record.data_ptr(), self.slot_bytes)
        return self.slot_bytes

    def tensors(self) -> frozenset[str]:
        return frozenset()

    def files(self) -> frozenset[Path]:
        return frozenset()

    def close(self) -> None:
        self.disk.close()

    def _draw(self, seed: int) -> Tensor:
        """Symmetric around zero, or all experts would push hidden states the same way."""
        draw = torch.Generator().manual_seed(seed)
        record = torch.empty(self.slot_bytes, dtype=torch.uint8)
        parts: dict[str, Weight | Tensor] = {
            place.name: DenseWeight(
                (torch.randn(place.rows, place.columns, generator=draw) * STD).bfloat16()
            )
            for place in self._layout.parts()
        }
        pack_record(self._layout, parts, record)
        return record


def make_model(
    config: dict[str, Any],
    device: str,
    *,
    dtype: str = "bf16",
    experts: str = "",
    backend: str | None = None,
    dispatch: MoeSettings | None = None,
    skewed: bool = False,
    own_kv: int | None = None,
) -> CausalLM:
    """`experts`: their precision, if it is not that of the rest. All of them are resident, unless
    `dispatch` says where they are. `skewed`: gates prefer some experts, about as Zipf's law.
    `own_kv`: with elastic memory, bytes that KV always has, by default one full context."""

    def open_runtime(wanted: MoeRequirements) -> ExpertRuntime:
        geometry = wanted.geometry()
        kind = experts or dtype
        store = RandomExperts(geometry, wanted.hidden, wanted.moe.intermediate, kind)
        settings = dispatch or MoeSettings(
            strategy="persistent", cache_capacity=geometry.total, warmup="none", predict="off"
        )
        kv, nbytes = wanted.shared_kv(settings, wanted.kv_bytes if own_kv is None else own_kv)
        opened = open_experts(store, settings, device=wanted.device, kv_bytes=nbytes, kv=kv)
        opened.wait_loaded()
        return opened

    weights = cast(Checkpoint, RandomCheckpoint(config, device, skewed))
    return load_model(weights, dtype=dtype, device=device, backend=backend, experts=open_runtime)


def make_tokenizer(vocab: int) -> Tokenizer:
    """Bytes, and a name for every other token, so that any id can be decoded."""
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
        write_tokenizer(Path(folder), vocab)
        return load_tokenizer(Path(folder))


def write_tokenizer(path: Path, vocab: int) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", "<pad>", *letters]
    words += [f"w{index}" for index in range(vocab - len(words))]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(words[:3])
    backend.save(str(path / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(facts))


def make_prompts(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=draw).tolist() for n in lengths]


def make_peer(config: dict[str, Any], device: str) -> Any:
    """transformers with random bf16 weights of the same distributions, made on the device."""
    import transformers

    settings = {key: value for key, value in config.items() if key != "architectures"}
    model_class = getattr(transformers, config["architectures"][0])
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            peer = model_class(model_class.config_class(**settings)).eval()
    finally:
        torch.set_default_dtype(usual)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            mean, std = drawn_as(name, config)
            parameter.normal_(mean, std)
    return peer
