"""A row's result must not depend on the rows beside it: bit for bit on the native path.

fp32, bf16, int8 and int4 alike; so a request gives the same tokens alone and among sixteen. On the
torch path this is not promised: there the rate of divergence is printed (`pytest -s`).
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.greedy_engine import model_at, random_prompts, run

DTYPES = ["fp32", "bf16", "int8", "int4"]


def both(backend: str, dtype: str) -> tuple[list[list[int]], list[list[int]]]:
    path = tiny_checkpoint("qwen3")
    prompts = random_prompts(path, 16)
    model = model_at(path, backend, dtype)
    alone = run(model, path, prompts, waves=16, prefix_cache=False)
    # nor on the number of threads
    torch.set_num_threads(3)
    together = run(model, path, prompts, max_step_tokens=29, max_sequences=16)
    return alone.tokens, together.tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_tokens_do_not_depend_on_the_batch(dtype: str) -> None:
    alone, together = both("cpu", dtype)
    assert alone == together


@pytest.mark.full
def test_torch_path_reports_its_divergence() -> None:
    alone, together = both("reference", "bf16")
    pairs = list(zip(alone, together, strict=True))
    rate = sum(a != b for a, b in pairs) / len(pairs)
    print(f"torch path, bf16: {rate:.0%} of requests differ between alone and 16 together")
    assert rate < 0.5
