"""DWR as a plain static torch model: the oracle, and the writer of checkpoints.

Everything is computed for every position, without a cache, every expert in memory. Parameter names
are the tensor names of a checkpoint (docs/models.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# config.json of the published shape
SEED_SHAPE = {
    "vocab_size": 50_304,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Expert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, experts = config["hidden_size"], config["num_experts"]
        self.top_k = config["num_experts_per_tok"]
        self.attn = Attention(hidden, config["num_attention_heads"])
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.router = nn.Linear(hidden, experts)
        inner = config["intermediate_size"]
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        chances, chosen = self.router(x).softmax(-1).topk(self.top_k)
        shares = torch.zeros(*x.shape[:2], len(self.experts))
        shares.scatter_(-1, chosen, chances / chances.sum(-1, keepdim=True))
        mixed = sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return self.norm2(x + mixed)


class StaticDWR(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.settings = config
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        self.embeddings = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(config["max_position_embeddings"], hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        tokens = list(ids)
        for _ in range(count):
            tokens.append(int(self(torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[len(ids) :]

    def save(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        from safetensors.torch import save_file

        tensors = {name: value.to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, path / "model.safetensors")
        facts = {"architectures": ["DWRForCausalLM"], "model_type": "dwr", **self.settings}
        (path / "config.json").write_text(json.dumps(facts, indent=1))


def random_dwr(config: dict[str, Any], seed: int = 0) -> StaticDWR:
    """Weights drawn wide enough that output and routing vary, norms and biases too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = StaticDWR(config)
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                nn.init.uniform_(parameter, 0.6, 1.4)
            else:
                nn.init.normal_(parameter, std=0.3 if "router" in name else 0.15)
    return model.eval()


def load_static(path: Path) -> StaticDWR:
    from safetensors.torch import load_file

    model = StaticDWR(json.loads((path / "config.json").read_text()))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.float().eval()
