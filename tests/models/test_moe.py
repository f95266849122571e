"""Logits of every MoE architecture and router option against transformers, experts in place."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from coterie.core.moe import MoeSettings
from coterie.kernels.cpu.build import native
from coterie.models.arch import dwr
from coterie.models.base import CausalLM, load_model
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.dwr_reference import SEED_SHAPE, StaticDWR, load_static
from tests.helpers.models.paged_model import Paged, prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
    "beta_fast": 32,
    "beta_slow": 1,
}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe plain weights": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe dense ends": ("qwen3_moe", {"mlp_only_layers": [0, 3], "num_hidden_layers": 4}),
    "qwen3_moe biases, tied": ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe one expert": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "qwen3_moe all experts": ("qwen3_moe", {"num_experts_per_tok": 8}),
    "mixtral": ("mixtral", {}),
    "mixtral window": ("mixtral", {"sliding_window": 64}),
    "mixtral three of five": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "olmoe": ("olmoe", {}),
    "olmoe clipped, normed weights": ("olmoe", {"clip_qkv": 0.8, "norm_topk_prob": True}),
    "olmoe biases": ("olmoe", {"attention_bias": True, "num_key_value_heads": 4}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 limited groups": ("deepseek_v2", {**LIMITED, "routed_scaling_factor": 2.5}),
    "deepseek_v2 low-rank queries, yarn": (
        "deepseek_v2",
        {"q_lora_rank": 24, "rope_parameters": YARN, "first_k_dense_replace": 0},
    ),
    "deepseek_v2 biases": ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}),
    "deepseek_v2 wide values": ("deepseek_v2", {"v_head_dim": 24, "q_lora_rank": 24}),
    "dwr": ("dwr", {}),
    "dwr three of five": ("dwr", {"num_experts": 5, "num_experts_per_tok": 3}),
}
BACKENDS = ["reference", "cpu"]


@cache
def model_for(case: str, backend: str) -> CausalLM:
    if backend == "cpu" and native() is None:
        pytest.skip("no compiler on this machine")
    kind, overrides = CASES[case]
    checkpoint = open_checkpoint(tiny_checkpoint(kind, **overrides))
    settings = MoeSettings(strategy="persistent", warmup="none", predict="off")
    return load_model(checkpoint, dtype="fp32", backend=backend, dispatch=settings)


@cache
def oracle(case: str) -> Any:
    from transformers import AutoModelForCausalLM

    kind, overrides = CASES[case]
    path = tiny_checkpoint(kind, **overrides)
    if kind == "dwr":
        return load_static(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def prompt(seed: int, length: int = 50) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 384, (length,), generator=generator).tolist()


@torch.no_grad()
def expected(case: str, ids: list[int]) -> torch.Tensor:
    out = oracle(case)(torch.tensor([ids]))
    logits: torch.Tensor = getattr(out, "logits", out)[0]
    return logits


# `make test` runs the torch path once for each architecture
PATHS = [
    pytest.param(
        case, backend, marks=pytest.mark.full if backend == "reference" and " " in case else ()
    )
    for case in CASES
    for backend in BACKENDS
]


@pytest.mark.parametrize(("case", "backend"), PATHS)
def test_prefill_and_decode_logits(case: str, backend: str) -> None:
    ids = prompt(3)
    want, model = expected(case, ids), model_for(case, backend)
    for chunk in (50, 7, 1):
        got = prompt_logits(model, ids, chunk)
        assert (got - want).abs().max() < 1e-4, chunk


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "dwr"])
def test_native_bits_do_not_depend_on_the_chunk(kind: str, dtype: str) -> None:
    if native() is None:
        pytest.skip("no compiler on this machine")
    ids, settings = prompt(4, 24), MoeSettings(strategy="persistent", predict="off")
    checkpoint = open_checkpoint(tiny_checkpoint(kind))
    model = load_model(checkpoint, dtype=dtype, backend="cpu", dispatch=settings)
    want = prompt_logits(model, ids, 24)
    for chunk in (1, 7):
        assert torch.equal(prompt_logits(model, ids, chunk), want), chunk
    model.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "dwr"])
def test_mixed_batch_of_prefill_and_decode(case: str, backend: str) -> None:
    """Sequences of different lengths and phases in one step do not see each other."""
    prompts = [prompt(seed, length) for seed, length in enumerate((33, 5, 17))]
    wants = [expected(case, ids) for ids in prompts]
    paged = Paged(model_for(case, backend), 3, 33)
    got: list[list[torch.Tensor]] = [[], [], []]
    plans = [
        [(0, 8), (1, 1)],
        [(2, 5), (1, 1), (0, 1)],
        [(0, 1), (2, 1), (1, 3)],
        [(0, 23), (2, 11)],
    ]
    for plan in plans:
        done = paged.lengths.copy()
        rows = [(s, prompts[s][done[s] : done[s] + count]) for s, count in plan]
        for (sequence, _), logits in zip(plan, paged.step(rows), strict=True):
            got[sequence].append(logits)
    assert paged.lengths == [33, 5, 17]
    for mine, want in zip(got, wants, strict=True):
        assert (torch.cat(mine) - want).abs().max() < 1e-4


def test_dwr_has_the_published_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm):
        monkeypatch.setattr(kind, "reset_parameters", lambda _: None)
    with torch.device("meta"):
        model = StaticDWR(SEED_SHAPE)
    assert sum(parameter.numel() for parameter in model.parameters()) == 259_712_096
    spec = dwr.read({"architectures": ["DWRForCausalLM"], **SEED_SHAPE})
    assert spec.moe is not None
    blocks: Any = model.blocks
    expert = sum(math.prod(p.shape) for p in blocks[0].experts[0].parameters())
    assert expert == 2_099_712 == 2 * spec.hidden * spec.moe.intermediate + 2048 + 512
    assert len(spec.moe.layers) * spec.moe.num_experts == 96
