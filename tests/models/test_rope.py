"""Rotary tables against transformers' own module, for every scaling variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coterie.core.errors import WeightsError
from coterie.models.build.rope import VARIANTS, read_rope

DIM, LIMIT = 32, 512
FACTORS = [1.0 + 0.1 * i for i in range(DIM // 2)]

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "large theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "attention_factor": 1.2,
        "original_max_position_embeddings": 256,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": [2 * f for f in FACTORS],
        "original_max_position_embeddings": 128,
    },
}


def theirs(parameters: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = {"rope_theta": 10_000.0, **parameters}
    config = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=LIMIT,
        rope_parameters=given,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]


def ours(parameters: dict[str, Any], served: int, **config: Any) -> tuple[Any, Any]:
    keys = {"max_position_embeddings": LIMIT, "rope_parameters": parameters, **config}
    return read_rope(keys, DIM, served).tables()


def test_every_variant_has_a_case() -> None:
    assert {case["rope_type"] for case in CASES.values()} == set(VARIANTS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("served", [100, LIMIT])
def test_tables_equal_transformers(name: str, served: int) -> None:
    """At 100 positions longrope uses its short factors, at 512 its long ones."""
    for mine, their in zip(ours(CASES[name], served), theirs(CASES[name], served), strict=True):
        assert mine.shape == (served, DIM // 2)
        torch.testing.assert_close(mine, their, atol=1e-6, rtol=0)


def test_dynamic_stretches_for_a_longer_context() -> None:
    served = 3 * LIMIT
    for mine, their in zip(
        ours(CASES["dynamic"], served), theirs(CASES["dynamic"], served), strict=True
    ):
        torch.testing.assert_close(mine, their, atol=1e-6, rtol=0)
    assert not torch.allclose(ours(CASES["dynamic"], LIMIT)[0], mine[:LIMIT])


def test_older_files_spell_it_differently() -> None:
    new = ours({**CASES["llama3"], "rope_theta": 5e5}, LIMIT)
    renamed = {k: v for k, v in CASES["llama3"].items() if k != "rope_type"}
    old = ours({}, LIMIT, rope_scaling={**renamed, "type": "llama3"}, rope_theta=5e5)
    assert torch.equal(new[0], old[0]) and torch.equal(new[1], old[1])


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**CASES["longrope"], "long_factor": [1.0]}, "longrope"),
    ],
)
def test_unknown_meanings_are_refused_by_name(parameters: dict[str, Any], word: str) -> None:
    with pytest.raises(WeightsError, match=word):
        ours(parameters, LIMIT)
