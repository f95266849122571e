"""Stored bits of GGUF against transformers in fp32 over the same values: the comparison that
`benchmarks.dense.gguf_numbers` makes beside llama.cpp, without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.dense.gguf_numbers import (
    Distances,
    distances,
    fp32_logits,
    our_logits,
    partings,
    questions,
    until_end,
)
from coterie.models.base import load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.gguf_files import write_model
from tests.helpers.serving.greedy_engine import expected, run

MIXES = {
    "Q4_K_M": ("Q4_K", {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"}),
    "Q5_K_M": ("Q5_K", {"v_proj": "Q6_K", "lm_head": "Q6_K"}),
    "Q6_K": ("Q6_K", {}),
    "Q8_0": ("Q8_0", {}),
    "Q4_1": ("Q4_1", {"embed_tokens": "Q8_0"}),
}
# activations of 15 bits; what a cache of keys and values in bf16 adds
ACTIVATIONS, CACHE = 1e-3, 4e-3


def measured(path: Path, prompts: list[list[int]], kv_dtype: torch.dtype) -> Distances:
    model, fp32 = load_model(open_checkpoint(path)), fp32_logits(path)
    model.kv_dtype = kv_dtype
    return distances([(our_logits(model)(ids), fp32(ids)) for ids in prompts])


@pytest.mark.parametrize("mix", MIXES)
def test_a_small_file_is_near_fp32(mix: str, tmp_path: Path) -> None:
    kind, mixed = MIXES[mix]
    path = tmp_path / "model.gguf"
    write_model(path, kind=kind, mixed=mixed)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 96, (80,), generator=draw).tolist() for _ in range(4)]
    found = measured(path, prompts, torch.float32)
    assert found.positions == 320 and found.p99 < ACTIVATIONS, found
    assert measured(path, prompts, torch.bfloat16).median < CACHE


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("several_threads")
def test_the_default_model_is_near_fp32(default_model_path: Path) -> None:
    """Its file is Q4_1; each answer follows fp32 up to a near tie."""
    prompts = questions(load_tokenizer(default_model_path), 10)
    found = measured(default_model_path, prompts, torch.bfloat16)
    assert found.median < CACHE, found
    got = run(load_model(open_checkpoint(default_model_path)), default_model_path, prompts)
    exact = expected(default_model_path, prompts, got)
    ours = [answer[: len(other)] for answer, other in zip(got.tokens, exact, strict=True)]
    for parting in partings(prompts, ours, exact, fp32_logits(default_model_path)):
        assert parting.behind <= 2 * found.largest_error, parting


def test_a_parting_is_told_by_the_logits_of_fp32() -> None:
    def fp32(ids: Sequence[int]) -> Tensor:
        return torch.tensor([[0.0, 3.0, 1.0, 2.5]]).expand(len(ids), -1)

    found = partings([[7], [8]], [[1, 3, 0], [1, 1]], [[1, 2, 1], [1, 1]], fp32)
    assert [(p.prompt, p.place, p.ours, p.theirs, p.best) for p in found] == [(0, 1, 3, 2, 1)]
    assert found[0].gap == 0.5 and found[0].behind == 2.0


def test_distances_are_of_logits_about_their_mean() -> None:
    want = torch.randn(70, 50, generator=torch.Generator().manual_seed(2))
    moved = distances([(want + 3.0, want)])
    assert moved.median < 1e-6 and moved.same_best == 1.0 and moved.positions == 70
    off = distances([(want * 1.1, want)])
    assert off.median == pytest.approx(0.1, rel=1e-3) and off.mean_divergence > 0


def test_an_answer_ends_with_its_first_end() -> None:
    assert until_end([4, 9, 2, 9], [9]) == [4, 9]
    assert until_end([4, 5], [9]) == [4, 5]
