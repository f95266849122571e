"""Models of GGUF's block types on the device: logits beside those of the same values in fp32, one
row, few and many at a time, captured and eager; and that their bits are kept.

The files are safetensors with blocks, as packed stores have them: no `gguf` package is needed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.moe import MoeSettings
from coterie.kernels.backend import best_backend
from coterie.models.base import load_model
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES
from coterie.weights.formats.safetensors import BLOCKS_KEY
from tests.cuda.suite import Check
from tests.helpers.kernels.kernel_inputs import blocks
from tests.helpers.models.paged_model import prompt_logits

# kind of most matrices, and of others by a part of their names; 0.5B models are of "odd"
MIXES: dict[str, tuple[str, dict[str, str]]] = {
    "q4_k_m": ("q4_k", {"v_proj": "q6_k", "down_proj": "q6_k", "embed_tokens": "q6_k"}),
    "q5_k_m": ("q5_k", {"v_proj": "q6_k", "lm_head": "q6_k"}),
    "q6_k": ("q6_k", {}),
    "odd": ("q5_0", {"down_proj": "q6_k", "o_proj": "q4_k", "v_proj": "q5_1"}),
    "q5_1": ("q5_1", {}),
}
HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS = 512, 768, 8, 2, 64, 400, 2
# of activations and keys in bf16, and of weights rounded to it where several rows are computed
TOLERANCE = 0.03
ROWS = (1, 5, 40, 300)
EXPERTS = 6


def checks(device: str) -> Iterator[Check]:
    for mix in MIXES:
        for tied in (True, False):
            name = f"blocks/{mix}{' tied' * tied}"
            yield Check("blocks", name, partial(_equals_its_values, device, mix, tied))
    for strategy in ("persistent", "lru"):
        call = partial(_experts_equal_their_values, device, strategy)
        yield Check("blocks experts", f"blocks/experts {strategy}", call)


def _equals_its_values(device: str, mix: str, tied: bool) -> str:
    checkpoint = open_checkpoint(_written(mix, tied))
    draw = torch.Generator(device="cpu").manual_seed(3)
    ids = torch.randint(0, VOCAB, (300,), generator=draw, device="cpu").tolist()
    exact = load_model(checkpoint, dtype="fp32", device=device)
    want = prompt_logits(exact, ids, 300)
    model = load_model(checkpoint, device=device)
    share = model.weight_bytes / exact.weight_bytes
    # torch alone keeps no blocks
    kept = best_backend(device) == "reference" or share < 0.22
    assert kept, f"{share:.2f} of the bytes in fp32"
    worst = 0.0
    for rows in ROWS:
        part = ids[:24] if rows == 1 else ids
        got = prompt_logits(model, part, rows)
        error = _relative(got, want[: len(part)])
        assert error < TOLERANCE, f"{rows} rows: {error:.3f}"
        worst = max(worst, error)
    captured = prompt_logits(model, ids[:24], 1)
    model.graphs = None
    assert torch.equal(prompt_logits(model, ids[:24], 1), captured)
    return f"the worst {worst:.4f}; {share:.1%} of the bytes in fp32"


def _experts_equal_their_values(device: str, strategy: str) -> str:
    """Experts stay in stored bits too, whatever computes them."""
    checkpoint = open_checkpoint(_written("q4_k_m", tied=True, experts=EXPERTS))
    draw = torch.Generator(device="cpu").manual_seed(4)
    ids = torch.randint(0, VOCAB, (40,), generator=draw, device="cpu").tolist()
    found = []
    for dtype in ("fp32", "auto"):
        share = "100%" if strategy == "persistent" else "60%"
        settings = MoeSettings(strategy, device_budget=share, host_budget="100%", predict="off")
        model = load_model(checkpoint, dtype=dtype, device=device, dispatch=settings)
        found += [prompt_logits(model, ids, rows) for rows in (1, 40)]
        if dtype == "auto":
            runtime: Any = model.experts
            assert runtime.parts.store.layout(0).kinds == ("q4_k", "q4_k", "q6_k")
        model.close()
    # where a rounding chose another expert, the answer is another: most are the same
    errors = [
        (got - want).norm(dim=1) / want.norm(dim=1)
        for got, want in zip(found[2:], found[:2], strict=True)
    ]
    middle = max(float(error.median()) for error in errors)
    assert middle < TOLERANCE, f"{middle:.3f}"
    return f"half of the rows within {middle:.4f}"


def _relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return ((got - want).norm() / want.norm()).item()


@cache
def _written(mix: str, tied: bool, experts: int = 0) -> Path:
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp(prefix="blocks-"))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors, table = {}, {}
    for name, shape in _shapes(tied, experts).items():
        if len(shape) == 1:
            tensors[name] = 1 + 0.1 * torch.randn(shape)
            continue
        if name.endswith("mlp.gate.weight"):
            tensors[name] = torch.randn(shape)
            continue
        kind, others = MIXES[mix]
        kind = next((other for part, other in others.items() if part in name), kind)
        tensors[name] = _signed(kind, *shape).flatten()
        table[name] = [kind.upper(), list(shape)]
    metadata = {"format": "pt", BLOCKS_KEY: json.dumps(table)}
    save_file(tensors, folder / "model.safetensors", metadata)
    return folder


def _signed(kind: str, rows: int, width: int) -> Tensor:
    """Blocks of which half have the other sign: else all rows would be nearly the same."""
    data = blocks(kind, rows, width).data.view(-1, BLOCK_SIZES[kind.upper()][1])
    places = (209,) if kind == "q6_k" else (1,) if kind == "q5_0" else (1, 3)
    for place in places:
        data[:, place] ^= torch.randint(0, 2, (len(data),)).to(torch.uint8) << 7
    return data


def _shapes(tied: bool, experts: int = 0) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        found["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        found |= {
            f"{stem}.input_layernorm.weight": (HIDDEN,),
            f"{stem}.post_attention_layernorm.weight": (HIDDEN,),
            f"{stem}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        }
        if experts:
            found |= {f"{stem}.self_attn.{part}_norm.weight": (HEAD,) for part in "qk"}
            found[f"{stem}.mlp.gate.weight"] = (experts, HIDDEN)
        stems = [f"{stem}.mlp.experts.{expert}" for expert in range(experts)] or [f"{stem}.mlp"]
        inner = 256 if experts else INNER
        for own in stems:
            found |= {
                f"{own}.gate_proj.weight": (inner, HIDDEN),
                f"{own}.up_proj.weight": (inner, HIDDEN),
                f"{own}.down_proj.weight": (HIDDEN, inner),
            }
    return found
