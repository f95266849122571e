"""Logits of every architecture and option against transformers: prefill, chunks and decode."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.kernels.cpu.build import native
from coterie.models.base import CausalLM, load_model
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import DenseWeight, dense
from tests.helpers.models.paged_model import Paged, prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 48, "num_key_value_heads": 4}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn rope": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
}
BACKENDS = ["reference", "cpu"]


@cache
def model_for(case: str, backend: str, dtype: str = "fp32") -> CausalLM:
    if backend == "cpu" and native() is None:
        pytest.skip("no compiler on this machine")
    kind, overrides = CASES[case]
    checkpoint = open_checkpoint(tiny_checkpoint(kind, **overrides))
    return load_model(checkpoint, dtype=dtype, backend=backend)


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
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3"])
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_lower_precision_is_its_own_weights(dtype: str, backend: str) -> None:
    """A quantised model computes what its dequantised weights say: the error is the activations'
    alone (KV in bf16), far below what the weights' rounding does."""
    from coterie.weights.quantize import convert

    ids, model = prompt(5), model_for("qwen3", backend, dtype)
    rounded = oracle_copy("qwen3")
    for name, parameter in rounded.named_parameters():
        if parameter.ndim == 2:
            ends = "embed" in name or "lm_head" in name
            kept = convert(
                DenseWeight(parameter.data), "int8" if ends and dtype == "int4" else dtype
            )
            parameter.data = dense(kept)
    with torch.no_grad():
        want = rounded(torch.tensor([ids])).logits[0]
    error = (prompt_logits(model, ids, 50) - want).norm() / want.norm()
    assert error < 0.02
    full = (want - expected("qwen3", ids)).norm() / want.norm()
    assert full > 0, "rounding the weights must show"


def oracle_copy(case: str) -> Any:
    from copy import deepcopy

    return deepcopy(oracle(case))


def test_no_logits_asked_gives_none() -> None:
    model = model_for("llama", "reference")
    paged = Paged(model, 1, 8)
    from coterie.kernels.batch import AttentionBatch

    batch = AttentionBatch(
        torch.arange(4),
        paged.tables[0, 0].long() * 16 + torch.arange(4),
        torch.tensor([0, 4], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        paged.tables,
        16,
    )
    logits = model.forward(torch.arange(4, 8), batch, paged.kv, torch.empty(0, dtype=torch.int64))
    assert logits.shape == (0, 384) and logits.dtype == torch.float32


def test_auto_keeps_what_the_file_stores(default_model_path: Any) -> None:
    model = load_model(open_checkpoint(default_model_path), backend="reference")
    assert model.dtype == "int4" and model.kv_dtype == torch.bfloat16
    assert model.kv_bytes_per_token() == 2 * 30 * 3 * 64 * 2
    assert (
        load_model(open_checkpoint(tiny_checkpoint("llama")), backend="reference").dtype == "fp32"
    )
    stored = open_checkpoint(tiny_checkpoint("llama", dtype="bfloat16"))
    assert load_model(stored, backend="reference").dtype == "bf16"


def test_quantised_embedding_is_widened_by_row() -> None:
    from coterie.models.build.layers import stored_embedding
    from coterie.weights.quantize import quantize_int8

    table = quantize_int8(torch.randn(40, 64, generator=torch.Generator().manual_seed(0)))
    embedding = stored_embedding(table, torch.device("cpu"), torch.float32)
    assert embedding.nbytes == table.nbytes
    ids = torch.tensor([3, 39, 3])
    assert torch.equal(embedding(ids), dense(table)[ids])


def test_progress_counts_up_to_its_total() -> None:
    heard: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    load_model(checkpoint, backend="reference", progress=lambda *pair: heard.append(pair))
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_empty_cache_costs_nothing_until_it_is_written() -> None:
    """A GB of KV that nobody has used: no page of it is here, and every page is zeros."""

    def taken() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model = model_for("llama", "reference")
    size = model.kv_bytes_per_token() * 16
    before = taken()
    kv = model.new_kv(10**9 // size, 16)
    assert sum(layer.nbytes for layer in kv) > 0.99e9 and taken() - before < 0.2e9
    assert all(layer.dtype == model.kv_dtype and layer.data_ptr() % 64 == 0 for layer in kv)
    assert all(layer.shape == model.kv_shape(10**9 // size, 16) for layer in kv)
    assert not any(layer[:, part].any() for layer in kv for part in (0, layer.shape[1] // 2, -1))
