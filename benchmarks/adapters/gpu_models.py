"""Parts of `adapters.gpu`: random models and stacks without a file, steps, and the torch twin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks import random_models
from benchmarks.gpu_runs import make_batch
from benchmarks.random_models import RandomCheckpoint
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.patch import PARTS, Patch, PatchStack, Segment, Site
from coterie.models.base import CausalLM, load_model
from coterie.models.spec import ModelSpec
from coterie.weights.checkpoint import Checkpoint
from coterie.weights.quantize import DenseWeight, Weight

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "head_dim": 64,
}
# shapes, and the parts that adapters change: experts have none
SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "SmolLM2-135M": (random_models.SHAPES["SmolLM2-135M"], PARTS),
    "Qwen3-0.6B": (random_models.SHAPES["Qwen3-0.6B"], PARTS),
    "Qwen3-30B-A3B": (random_models.SHAPES["Qwen3-30B-A3B"], PARTS[:4]),
}
TINY = {
    **LLAMA,
    "hidden_size": 96,
    "intermediate_size": 416,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 384,
    "max_position_embeddings": 1024,
}
# fields of each stack of a check: (rank, type of a and b, fields, parts)
LORA, DORA = ("low_rank",), ("low_rank", "out_scale", "shift")
KINDS: list[tuple[int, torch.dtype, tuple[str, ...], tuple[str, ...]]] = [
    (16, torch.bfloat16, LORA, PARTS),
    (5, torch.float32, DORA, PARTS),
    (40, torch.float32, LORA, ("q", "v", "down")),
    (1, torch.float32, ("in_scale",), ("down",)),
    (200, torch.bfloat16, DORA, ("k", "o", "gate", "up")),
]
SCALED = (3, torch.float32, ("low_rank", "in_scale"), PARTS)
# name -> (model's type, stacks, how a step runs), largest relative error of logits
CHECKS: dict[str, tuple[tuple[str, list[Any], str], float]] = {
    "fp32, captured": (("fp32", KINDS, "captured"), 1e-4),
    "fp32, captured, bf16 adapters": (("fp32", KINDS[:1] * 3, "captured"), 1e-4),
    "fp32, eager": (("fp32", KINDS, "eager"), 1e-4),
    "fp32, prefill": (("fp32", KINDS, "prefill"), 1e-4),
    "fp32, a stack beyond the kernels": (("fp32", [*KINDS, SCALED], "beyond"), 1e-4),
    "bf16, captured": (("bf16", KINDS, "captured"), 4e-2),
    "bf16, captured, bf16 adapters": (("bf16", KINDS[:1] * 3, "captured"), 4e-2),
}


class Setting:
    """Sizes of one run."""

    def __init__(self, smoke: bool) -> None:
        self.device = "cpu" if smoke else "cuda"
        self.name = "cpu" if smoke else torch.cuda.get_device_name()
        self.backend = "reference" if smoke else "triton"
        self.shapes = {"tiny": (TINY, PARTS)} if smoke else SHAPES
        self.streams, self.adapters, self.rank = (4, 2, 4) if smoke else (32, 16, 16)
        self.context = 32 if smoke else 256
        self.prompts = (16,) if smoke else (128, 512, 2048)


class WideWeights(RandomCheckpoint):
    """Drawn so that a product keeps the size of its input: errors show in the logits."""

    def read(self, name: str) -> Weight:
        shape = self.shape(name)
        draw = torch.Generator(self.device).manual_seed(self.names().index(name))
        values = torch.randn(shape, generator=draw, device=self.device)
        values = values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * values
        return DenseWeight(values.bfloat16())


def make_model(config: dict[str, Any], dtype: str, setting: Setting, backend: str = "") -> CausalLM:
    if "num_experts" in config:
        return random_models.make_model(config, setting.device, dtype=dtype)
    weights = cast(Checkpoint, WideWeights(config, setting.device))
    return load_model(
        weights, dtype=dtype, device=setting.device, backend=backend or setting.backend
    )


def part_sizes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Part -> (in, out)."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden, spec.intermediate
    pairs = (hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inner), (hidden, inner)
    return dict(zip(PARTS, (*pairs, (inner, hidden)), strict=True))


def device_stack(
    spec: ModelSpec,
    rank: int,
    seed: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    fields: Sequence[str] = LORA,
    parts: Sequence[str] = PARTS,
) -> PatchStack:
    """A random stack, strong enough to change the logits visibly."""
    draw = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=draw, device=device) * scale

    patches: dict[Site, Patch] = {}
    for layer in range(spec.num_layers):
        for part in parts:
            width, height = part_sizes(spec)[part]
            low = "low_rank" in fields
            patches[layer, part] = Patch(
                drawn(rank, width, scale=width**-0.5).to(dtype) if low else None,
                drawn(rank, height, scale=0.3 * rank**-0.5).to(dtype) if low else None,
                1 + drawn(width, scale=0.2) if "in_scale" in fields else None,
                1 + drawn(height, scale=0.2) if "out_scale" in fields else None,
                drawn(height, scale=0.1) if "shift" in fields else None,
            )
    return PatchStack(f"stack-{seed}", seed % 128, patches)


def spread(stacks: Sequence[PatchStack], streams: int) -> tuple[Segment, ...]:
    """Distribute streams over the stacks, rows of one stack together, as the scheduler sorts
    them."""
    share = math.ceil(streams / len(stacks))
    cuts = [(i * share, min(streams, (i + 1) * share)) for i in range(len(stacks))]
    pairs = zip(cuts, stacks, strict=True)
    return tuple(Segment(first, last, stack) for (first, last), stack in pairs if first < last)


def new_caches(model: CausalLM, blocks: int, block_size: int = 16) -> list[Tensor]:
    shape = model.kv_shape(blocks, block_size)
    return [
        torch.zeros(shape, dtype=model.kv_dtype, device=model.device)
        for _ in range(model.spec.num_layers)
    ]


@dataclass(slots=True)
class Step:
    """One decode step, ready to be timed."""

    model: CausalLM
    batch: AttentionBatch
    kv: list[Tensor]
    tokens: Tensor
    # the batch's tensors as the host has them before a step
    host: dict[str, Tensor]

    def forward(self) -> Tensor:
        logits = self.model.forward(self.tokens, self.batch, self.kv, self.host["rows"])
        if self.model.experts is not None:
            # an engine takes the counts of each step
            self.model.launched_usage()
        return logits

    def captured(self) -> bool:
        """Whether the step is replayed, not run."""
        graphs, rows = self.model.graphs, self.host["rows"]
        with torch.inference_mode():
            return (
                graphs is not None
                and graphs.forward(self.tokens, self.batch, self.kv, rows) is not None
            )

    def step(self) -> list[int]:
        """Inputs from the host, forward, argmax, tokens to the host."""
        names = ("positions", "slots", "query_starts", "context_lens", "block_tables")
        moved: dict[str, Any] = {name: self.host[name].to(self.tokens.device) for name in names}
        self.batch = replace(self.batch, **moved)
        chosen: list[int] = self.forward().argmax(-1).tolist()
        self.tokens = torch.tensor(chosen, device=self.tokens.device)
        return chosen


def decode(model: CausalLM, streams: int, context: int, patches: tuple[Segment, ...]) -> Step:
    device = str(model.device)
    batch, blocks = make_batch([1] * streams, [context] * streams, device)
    names = ("positions", "slots", "query_starts", "context_lens", "block_tables")
    host = {name: getattr(batch, name).cpu() for name in names}
    host["rows"] = torch.arange(streams, device=device)
    batch = replace(batch, phase="decode", patches=patches)
    tokens = torch.arange(streams, device=device)
    return Step(model, batch, new_caches(model, blocks), tokens, host)


def check_error(setting: Setting, dtype: str, kinds: list[Any], mode: str) -> float:
    """Largest relative error of logits over three steps of rows with and without patches, against
    the torch path over the same weights in fp32. Infinite if a step was not captured that should
    have been, or the other way round."""
    mine = make_model(TINY, dtype, setting)
    theirs = make_model(TINY, "fp32", setting, "reference")
    if mode == "eager":
        mine.graphs = None
    stacks = [
        device_stack(mine.spec, rank, seed, setting.device, kept, fields, parts)
        for seed, (rank, kept, fields, parts) in enumerate(kinds)
    ]
    count, worst = 2 * len(stacks) + 3, 0.0
    for turn in range(3):
        patches = tuple(
            Segment(1 + 2 * i, 2 + 2 * i + (i == turn), stacks[(i + turn) % len(stacks)])
            for i in range(len(stacks))
        )
        got = decode(mine, count, 20 + turn, patches)
        want = decode(theirs, count, 20 + turn, patches)
        if mode == "prefill":
            # the same rows, those of one sequence in the middle
            rows = [1, count - 2, 1]
            batch, blocks = make_batch(rows, [9, count + turn, 30], setting.device)
            got.batch = replace(batch, patches=patches)
            got.kv, want.kv = new_caches(mine, blocks), new_caches(theirs, blocks)
        torch.manual_seed(turn)
        for cache, twin in zip(got.kv, want.kv, strict=True):
            cache.copy_(torch.randn(cache.shape, device=cache.device))
            twin.copy_(cache)
        want.batch = got.batch
        if setting.device == "cuda" and got.captured() != (mode == "captured"):
            return math.inf
        found, truth = got.forward().double(), want.forward().double()
        error = ((found - truth).norm(dim=-1) / truth.norm(dim=-1)).max().item()
        worst = max(worst, error if error == error else math.inf)
    return worst
