"""A MoE model in a GGUF file is the model its safetensors twin is, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM, load_model
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.gguf_conversion import write_stored_bits, write_twins
from tests.helpers.models.paged_model import Paged, prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
# widths are multiples of 32, so that everything is quantised
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 64, "norm_topk_prob": True}, False),
    "mixtral": ("mixtral", {"intermediate_size": 64}, False),
    "olmoe": ("olmoe", {"intermediate_size": 64}, False),
    "deepseek_v2": ("deepseek_v2", {"moe_intermediate_size": 64}, False),
    "deepseek_v2 split": (
        "deepseek_v2",
        {"moe_intermediate_size": 64, "q_lora_rank": 32, "rope_parameters": YARN},
        True,
    ),
}


def loaded(path: Path, dtype: str) -> CausalLM:
    settings = MoeSettings(strategy="persistent", warmup="none", predict="off")
    return load_model(open_checkpoint(path), dtype=dtype, dispatch=settings)


def greedy(model: CausalLM, ids: list[int], count: int) -> list[int]:
    paged, tokens, given = Paged(model, 1, len(ids) + count), [], ids
    for _ in range(count):
        tokens.append(int(paged.step([(0, given)])[0][-1].argmax()))
        given = tokens[-1:]
    return tokens


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_the_twin(case: str, kind: str, tmp_path: Path) -> None:
    architecture, overrides, split = CASES[case]
    source = tiny_checkpoint(architecture, **overrides)
    path, twin = write_twins(source, tmp_path, kind, split_kv=split)
    ids = torch.randint(4, 384, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    mine, theirs = loaded(path, "fp32"), loaded(twin, "fp32")
    want = prompt_logits(theirs, ids, 20)
    assert (prompt_logits(mine, ids, 20) - want).abs().max() < 1e-5
    tokens = greedy(theirs, ids, 24)
    assert len(set(tokens)) > 4
    assert greedy(mine, ids, 24) == tokens
    kept = loaded(path, "auto")
    assert kept.dtype == {"F32": "fp32", "Q8_0": "int8"}[kind]
    # by row, because a rounded row may choose another expert
    error = (prompt_logits(kept, ids, 20) - want).norm(dim=1) / want.norm(dim=1)
    assert error.median() < (1e-5 if kind == "F32" else 0.02)
    for model in (mine, theirs, kept):
        model.close()


def test_k_quants_run_as_they_are_stored(tmp_path: Path) -> None:
    """Experts of Q4_K and Q6_K, through slots that hold few of them: the blocks' own values."""
    path, twin = write_stored_bits("qwen3_moe", tmp_path)
    settings = MoeSettings("lru", cache_capacity=5, host_budget="0", predict="off")
    stored = load_model(open_checkpoint(path), dispatch=settings)
    experts: Any = stored.experts
    assert experts is not None
    assert experts.parts.store.layout(1).kinds == ("q4_k", "q4_k", "q6_k")
    # 4.5, 4.5 and 6.5625 bits a weight, in whole pages
    assert experts.parts.store.slot_bytes <= 256 * 256 * 15.5625 / 8 + 4096
    plain, wide = loaded(path, "fp32"), loaded(twin, "fp32")
    ids = torch.randint(4, 384, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    want = prompt_logits(wide, ids, 20)
    assert (prompt_logits(plain, ids, 20) - want).abs().max() < 1e-4 * want.abs().max()
    error = (prompt_logits(stored, ids, 20) - want).norm(dim=1) / want.norm(dim=1)
    assert error.median() < 0.02
    for model in (stored, plain, wide):
        model.close()
