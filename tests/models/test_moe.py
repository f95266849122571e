"""Logits of every MoE architecture and router option against transformers, all experts resident."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from paged import Paged, prompt_logits
from resident import Resident
from tiny import tiny_checkpoint

from coterie.kernels.build import native
from coterie.models.base import CausalLM, load_model
from coterie.weights.checkpoint import open_checkpoint

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe plain weights": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe dense ends": ("qwen3_moe", {"mlp_only_layers": [0, 3], "num_hidden_layers": 4}),
    "qwen3_moe biases, tied": ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe one expert": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "qwen3_moe all experts": ("qwen3_moe", {"num_experts_per_tok": 8}),
}
BACKENDS = ["reference", "cpu"]


@cache
def model_for(case: str, backend: str) -> CausalLM:
    if backend == "cpu" and native() is None:
        pytest.skip("no compiler on this machine")
    kind, overrides = CASES[case]
    checkpoint = open_checkpoint(tiny_checkpoint(kind, **overrides))
    return load_model(checkpoint, dtype="fp32", backend=backend, experts=Resident)


@cache
def oracle(case: str) -> Any:
    from transformers import AutoModelForCausalLM

    kind, overrides = CASES[case]
    path = tiny_checkpoint(kind, **overrides)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def prompt(seed: int, length: int = 50) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 384, (length,), generator=generator).tolist()


@torch.no_grad()
def expected(case: str, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(case)(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode_logits(case: str, backend: str) -> None:
    ids = prompt(3)
    want, model = expected(case, ids), model_for(case, backend)
    for chunk in (50, 7, 1):
        got = prompt_logits(model, ids, chunk)
        assert (got - want).abs().max() < 1e-4, chunk


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["qwen3_moe"])
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
