"""DWR through the engine: greedy output equals the plain static model's, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.models.dwr_reference import load_static
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.greedy_engine import model_at, run


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_greedy_through_the_engine(backend: str) -> None:
    path = tiny_checkpoint("dwr")
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(4, 384, (n,), generator=generator).tolist() for n in (1, 9, 33, 70)]
    oracle = load_static(path)
    small = {"max_step_tokens": 13, "max_sequences": 4}
    lanes: tuple[dict[str, Any], ...] = ({}, {"num_blocks": 14, "prefix_cache": False}, small)
    # lanes are the engine's business: once through all of them is enough
    for lane in lanes if backend == "cpu" else lanes[:1]:
        got = run(model_at(path, backend), path, prompts, **lane)
        for ids, tokens in zip(prompts, got.tokens, strict=True):
            assert len(set(tokens)) > 4
            with torch.no_grad():
                best = oracle(torch.tensor([[*ids, *tokens]]))[0].argmax(-1)
            assert best[len(ids) - 1 : -1].tolist() == tokens
