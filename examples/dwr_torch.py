"""The DWR-Transformer as one trainable torch module, with the experts' matrices stacked.

Post-norm blocks: attention, then the two best of sixteen experts, each followed by residual and
LayerNorm. `state` gives the tensors under the names that Coterie loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# rows per expert are padded to a multiple of this, so that shapes repeat
ROWS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int = 6
    hidden: int = 512
    intermediate: int = 2048
    experts: int = 16
    top_k: int = 2
    heads: int = 8
    vocab: int = 50_304
    positions: int = 512

    def parameters(self) -> int:
        """259,712,096 for the published shape."""
        d, wide = self.hidden, self.intermediate
        attention = 4 * d * d + 4 * d
        experts = self.experts * (2 * d * wide + wide + d)
        block = attention + experts + (d + 1) * self.experts + 4 * d
        return self.layers * block + (2 * self.vocab + self.positions) * d + 2 * d

    def config(self) -> dict[str, Any]:
        """config.json of `DWRForCausalLM`."""
        return {
            "architectures": ["DWRForCausalLM"],
            "model_type": "dwr",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_attention_heads": self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": 0,
            "tie_word_embeddings": False,
            "dtype": "float32",
        }


class Experts(nn.Module):
    """Sixteen MLPs as two stacks of matrices. No row is dropped: each expert's batch is padded to
    the longest."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, wide, narrow = shape.experts, shape.intermediate, shape.hidden
        self.top_k = shape.top_k
        self.router = nn.Linear(narrow, count)
        self.fc1 = nn.Parameter(torch.empty(count, narrow, wide).normal_(std=0.02))
        self.fc1_bias = nn.Parameter(torch.zeros(count, wide))
        self.fc2 = nn.Parameter(torch.empty(count, wide, narrow).normal_(std=0.02))
        self.fc2_bias = nn.Parameter(torch.zeros(count, narrow))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Output [T, D], and how unevenly the router loads the experts (1 = evenly)."""
        with torch.autocast(rows.device.type, enabled=False):
            odds = torch.softmax(self.router(rows.float()), dim=-1)
        weights, picked = odds.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        experts = odds.shape[1]
        counts = torch.bincount(picked.flatten(), minlength=experts)
        uneven = experts * (counts / picked.numel() * odds.mean(0)).sum()
        # pairs of one expert are adjacent; `place` is a pair's row in its expert's padded batch
        owner, order = picked.flatten().sort(stable=True)
        starts = counts.cumsum(0) - counts
        place = torch.arange(len(owner), device=rows.device) - starts[owner]
        longest = -(-int(counts.max()) // ROWS) * ROWS
        where = owner * longest + place
        tokens = order // self.top_k
        narrow = rows.to(_product_dtype(rows))
        padded = narrow.new_zeros(experts * longest, rows.shape[1])
        padded = padded.index_copy(0, where, narrow[tokens]).view(experts, longest, -1)
        fc1_bias, fc2_bias = (b[:, None].to(narrow.dtype) for b in (self.fc1_bias, self.fc2_bias))
        inner = functional.gelu(torch.baddbmm(fc1_bias, padded, self.fc1))
        outer = torch.baddbmm(fc2_bias, inner, self.fc2)
        weighted = outer.view(experts * longest, -1)[where]
        share = weights.flatten()[order].to(weighted.dtype)[:, None]
        out = torch.zeros_like(rows).index_add(0, tokens, (weighted * share).to(rows.dtype))
        return out, uneven


def _product_dtype(like: Tensor) -> torch.dtype:
    """The type in which autocast multiplies, if it is on."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.experts = Experts(shape)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [B, N, D]"""
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        hidden = self.norm1(hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape)))
        rows, uneven = self.experts(hidden.reshape(-1, width))
        return self.norm2(hidden + rows.view(hidden.shape)), uneven


class DWR(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V], and the routers' mean unevenness."""
        where = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.embeddings(ids) + self.positions(where)
        total = hidden.new_zeros(())
        for block in self.blocks:
            hidden, uneven = block(hidden)
            total = total + uneven
        return self.output(self.norm(hidden)), total / len(self.blocks)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """fp32 tensors on the CPU, named as coterie/models/arch/dwr.py reads them."""
        tensors: dict[str, Tensor] = {
            "embeddings.weight": self.embeddings.weight,
            "positions.weight": self.positions.weight,
            "output.weight": self.output.weight,
            "norm.weight": self.norm.weight,
            "norm.bias": self.norm.bias,
        }
        for index, block in enumerate(self.blocks):
            stem = f"blocks.{index}."
            parts = {
                "attn.qkv": block.qkv,
                "attn.out": block.out,
                "norm1": block.norm1,
                "norm2": block.norm2,
                "router": block.experts.router,
            }
            for name, module in parts.items():
                tensors[f"{stem}{name}.weight"] = module.weight
                tensors[f"{stem}{name}.bias"] = module.bias
            for number in range(self.shape.experts):
                expert = f"{stem}experts.{number}."
                tensors[f"{expert}fc1.weight"] = block.experts.fc1[number].T
                tensors[f"{expert}fc1.bias"] = block.experts.fc1_bias[number]
                tensors[f"{expert}fc2.weight"] = block.experts.fc2[number].T
                tensors[f"{expert}fc2.bias"] = block.experts.fc2_bias[number]
        return {
            name: value.detach().float().cpu().contiguous().clone()
            for name, value in tensors.items()
        }
