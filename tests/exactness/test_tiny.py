"""Greedy output equals transformers, token for token: tiny random models of every architecture.

Alone, together, under KV pressure, over shared prefixes and in odd prefill chunks, on the native
and on the torch path. `make test` checks a slice by one pass of transformers over each answer,
`make test-all` all twenty prompts against its cached generation.
"""

from __future__ import annotations

import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.greedy_engine import expected, model_at, oracle_for, random_prompts, run

PATHS = [
    ("llama", "cpu"),
    pytest.param("mistral", "cpu", marks=pytest.mark.full),
    pytest.param("qwen2", "cpu", marks=pytest.mark.full),
    pytest.param("qwen3", "cpu", marks=pytest.mark.full),
    ("llama", "reference"),
    ("qwen3_moe", "cpu"),
    ("deepseek_v2", "cpu"),
    pytest.param("mixtral", "cpu", marks=pytest.mark.full),
    pytest.param("olmoe", "cpu", marks=pytest.mark.full),
    pytest.param("qwen3_moe", "reference", marks=pytest.mark.full),
    pytest.param("deepseek_v2", "reference", marks=pytest.mark.full),
    pytest.param("mistral", "reference", marks=pytest.mark.full),
    pytest.param("qwen2", "reference", marks=pytest.mark.full),
    pytest.param("qwen3", "reference", marks=pytest.mark.full),
]

pytestmark = pytest.mark.parametrize(("kind", "backend"), PATHS)


def test_alone(kind: str, backend: str) -> None:
    path = tiny_checkpoint(kind)
    prompts = random_prompts(path, 16)[:3]
    got = run(model_at(path, backend), path, prompts, waves=len(prompts), prefix_cache=False)
    assert got.tokens == expected(path, prompts, got)


@pytest.mark.full
def test_twenty_against_generate(kind: str, backend: str) -> None:
    path = tiny_checkpoint(kind)
    prompts = random_prompts(path, 20)
    model = model_at(path, backend)
    want = [oracle_for(path).greedy(ids) for ids in prompts]
    assert run(model, path, prompts, waves=20, prefix_cache=False).tokens == want
    assert run(model, path, prompts, max_sequences=16).tokens == want


def test_sixteen_together(kind: str, backend: str) -> None:
    path = tiny_checkpoint(kind)
    prompts = random_prompts(path, 16)
    got = run(model_at(path, backend), path, prompts, max_sequences=16)
    assert got.tokens == expected(path, prompts, got)


def test_under_pressure(kind: str, backend: str) -> None:
    """Room for about three of eight sequences: the rest is preempted and computed again."""
    path = tiny_checkpoint(kind)
    prompts = random_prompts(path, 16)[:8]
    lane = {"num_blocks": 30, "max_sequences": 8, "prefix_cache": False}
    got = run(model_at(path, backend), path, prompts, **lane)
    assert got.stats["preemptions"] > 0
    assert got.tokens == expected(path, prompts, got)


@pytest.mark.parametrize("num_blocks", [40, pytest.param(512, marks=pytest.mark.full)])
def test_shared_prefixes(kind: str, backend: str, num_blocks: int) -> None:
    """Turns of a conversation and siblings of one prompt; with few blocks, also evicted ones."""
    path = tiny_checkpoint(kind)
    trunk, *tails = random_prompts(path, 16)[:5]
    trunk = (trunk * 60)[:53]
    prompts = [trunk[:30], trunk, *(trunk + tail for tail in tails), trunk]
    got = run(model_at(path, backend), path, prompts, waves=4, num_blocks=num_blocks)
    assert got.stats["prefix_hits_tokens"] > 0
    assert sum(got.cached) > 0
    assert got.tokens == expected(path, prompts, got)


@pytest.mark.parametrize(
    ("chunk", "block_size"), [(13, 32), pytest.param(5, 8, marks=pytest.mark.full)]
)
def test_odd_chunks(kind: str, backend: str, chunk: int, block_size: int) -> None:
    path = tiny_checkpoint(kind)
    prompts = random_prompts(path, 16)[8:]
    lane = {"max_step_tokens": chunk, "max_sequences": 5, "block_size": block_size}
    got = run(model_at(path, backend), path, prompts, **lane)
    assert got.tokens == expected(path, prompts, got)
