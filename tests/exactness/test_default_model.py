"""Greedy output of the default model in fp32 equals transformers over the same weights.

`make test` runs two prompts, `make test-all` twenty, also against transformers' cached generation.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.serving.greedy_engine import expected, model_at, oracle_for, run

TEXTS = [
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "def fibonacci(n):\n    ",
    "Q: If a train travels 60 miles in 45 minutes, what is its speed in miles per hour?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Translate to German: The weather is beautiful today and we are going to the beach.",
    'Return JSON with the keys name and age: {"',
    "Once",
    "Photosynthesis is the process by which plants convert light into chemical energy. " * 6,
    "List five uses of copper:\n1.",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "In 1969, the Apollo 11 mission",
    "Ingredients: two eggs, a cup of flour, a pinch of salt. Method:",
    "¿Cuál es la capital de España? Respuesta:",
    "Roses are red, violets are blue,",
    "The mitochondria is the powerhouse of the cell. Explain this to a child. " * 3,
    "<html>\n<head>\n<title>",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer",
    "Breaking news: scientists announced on Tuesday that",
]
# the torch path and the oracle decode at a few tokens a second on a busy machine
pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("several_threads")]
PATHS = ["cpu", pytest.param("reference", marks=pytest.mark.full)]


def encoded(path: Path, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(path)
    return [tokenizer.encode(text) for text in TEXTS[:count]]


@pytest.mark.parametrize("backend", PATHS)
def test_together_in_odd_chunks(default_model_path: Path, backend: str) -> None:
    prompts = encoded(default_model_path, 2)
    model = model_at(default_model_path, backend)
    got = run(model, default_model_path, prompts, max_step_tokens=37, max_sequences=16)
    assert got.tokens == expected(default_model_path, prompts, got)


@pytest.mark.full
def test_torch_path(default_model_path: Path) -> None:
    """One prompt, so that the path without a compiler is never left unchecked."""
    prompts = encoded(default_model_path, 1)
    got = run(model_at(default_model_path, "reference"), default_model_path, prompts)
    assert got.tokens == expected(default_model_path, prompts, got)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_twenty_against_generate(default_model_path: Path, backend: str) -> None:
    prompts = encoded(default_model_path, 20)
    model = model_at(default_model_path, backend)
    want = [oracle_for(default_model_path).greedy(ids) for ids in prompts]
    alone = run(model, default_model_path, prompts, waves=20, prefix_cache=False)
    assert alone.tokens == want
    together = run(model, default_model_path, prompts, max_sequences=16)
    assert together.tokens == want


@pytest.mark.full
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_under_pressure_with_shared_prefixes(default_model_path: Path, backend: str) -> None:
    trunk = encoded(default_model_path, 9)[8]
    prompts = [trunk + ids for ids in encoded(default_model_path, 8)]
    model = model_at(default_model_path, backend)
    got = run(model, default_model_path, prompts, num_blocks=40, max_sequences=8, waves=2)
    assert got.stats["preemptions"] > 0 and got.stats["prefix_hits_tokens"] > 0
    assert got.tokens == expected(default_model_path, prompts, got)
