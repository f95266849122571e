"""A GGUF file in its stored bits (Q4_K, Q6_K, Q5_0 in one) behaves as any model does: its tokens
depend neither on company and pieces, nor on where its experts are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core.moe import MoeSettings
from coterie.kernels.cpu.build import native
from coterie.models.base import load_model
from coterie.moe.dispatch.table import STRATEGIES
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.gguf_conversion import write_stored_bits
from tests.helpers.moe.dispatch_contract import ONE_HOST_SLOT
from tests.helpers.moe.dispatched_model import PROMPTS, DispatchedModel, Setting
from tests.helpers.serving.greedy_engine import run

needs_native = pytest.mark.skipif(native() is None, reason="no compiler on this machine")
ARCHITECTURES = ("qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ARCHITECTURES}
    return {kind: write_stored_bits(kind, folder)[0] for kind, folder in folders.items()}


@needs_native
@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_do_not_depend_on_company_and_pieces(
    files: dict[str, Path], architecture: str
) -> None:
    path = files[architecture]
    draws = torch.Generator().manual_seed(3)
    trunk = torch.randint(4, 384, (40,), generator=draws).tolist()
    prompts = [
        [*trunk, *torch.randint(4, 384, (1 + 5 * place,), generator=draws).tolist()]
        for place in range(8)
    ]
    everywhere = MoeSettings(strategy="persistent", warmup="none", predict="off")
    model = load_model(open_checkpoint(path), dispatch=everywhere)
    try:
        assert model.dtype == "q4_k"
        # greedy answers of such weights go round in circles
        drawn: dict[str, Any] = {"temperature": 1.0}
        alone = run(model, path, prompts, waves=8, prefix_cache=False, **drawn)
        torch.set_num_threads(3)
        # little room: some are put off and begun again, in steps of odd sizes
        together = run(
            model,
            path,
            prompts,
            waves=2,
            num_blocks=24,
            max_sequences=8,
            max_step_tokens=29,
            **drawn,
        )
    finally:
        model.close()
    assert together.stats["preemptions"] > 0 and together.stats["prefix_hits_tokens"] > 0
    assert together.tokens == alone.tokens
    assert sum(len(set(tokens)) > 16 for tokens in alone.tokens) > 4


@needs_native
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_same_logits(files: dict[str, Path], strategy: str) -> None:
    """Bit for bit those of a model whose experts are all in memory."""
    path = files["qwen3_moe"]
    with DispatchedModel(Setting(path, "cpu_only", dtype="auto")) as resident:
        want, tokens = resident.generate(PROMPTS, 7)
    host = "0.01%" if strategy in ONE_HOST_SLOT else "0"
    with DispatchedModel(Setting(path, strategy, 5, host, dtype="auto")) as dispatched:
        store = dispatched.runtime.parts.store
        assert store.layout(1).kinds == ("q4_k", "q4_k", "q6_k")
        logits, own = dispatched.generate(PROMPTS, 7)
    assert torch.equal(logits, want) and torch.equal(own, tokens)
