"""GGUF metadata in Hugging Face words, against transformers and the converter's own formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.core.errors import WeightsError
from coterie.models.build.rope import read_rope
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.gguf_files import HEAD_DIM, HIDDEN, VOCAB, write_model


def _config(path: Path, **options: Any) -> dict[str, Any]:
    write_model(path / "model.gguf", **options)
    return open_checkpoint(path / "model.gguf").config


@pytest.mark.full
def test_default_model_config_equals_transformers(default_model_path: Path) -> None:
    from transformers import AutoConfig

    oracle = AutoConfig.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name
    )
    config = open_checkpoint(default_model_path).config
    keys = [
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias",
        "bos_token_id", "eos_token_id",
    ]  # fmt: skip
    for key in keys:
        assert config[key] == getattr(oracle, key), key
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == oracle.rope_parameters["rope_theta"]
    assert config["rms_norm_eps"] == pytest.approx(oracle.rms_norm_eps, rel=1e-6)


def test_llama_and_qwen3(tmp_path: Path) -> None:
    llama = _config(tmp_path)
    assert llama["architectures"] == ["LlamaForCausalLM"]
    assert llama["rms_norm_eps"] == 1e-5
    assert llama["rope_scaling"] is None
    assert llama["tie_word_embeddings"] is False
    assert (llama["vocab_size"], llama["hidden_size"], llama["head_dim"]) == (VOCAB, HIDDEN, 64)
    older = _config(tmp_path, architecture="qwen2")
    assert older["architectures"] == ["Qwen2ForCausalLM"] and older["attention_bias"]
    qwen = _config(tmp_path, architecture="qwen3", tied=True)
    assert qwen["architectures"] == ["Qwen3ForCausalLM"]
    assert qwen["tie_word_embeddings"] is True


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert _config(tmp_path, metadata=linear)["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.attn_factor": 0.5,
    }
    got = _config(tmp_path, metadata=yarn)["rope_scaling"]
    assert got.pop("attention_factor") == pytest.approx(0.5 * (1 + 0.1 * math.log(4.0)))
    assert got == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def _llama3_factors(theta: float, factor: float, original: int) -> np.ndarray:
    """The loop of the converter."""
    found = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * theta ** (i / HEAD_DIM)
        if wavelength < original / 4.0:
            found.append(1.0)
        elif wavelength > original / 1.0:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path: Path) -> None:
    factors = _llama3_factors(10_000.0, 32.0, 8192)
    assert 1.0 < np.sort(np.unique(factors))[1] < 32.0
    config = _config(tmp_path, extra={"rope_freqs.weight": factors})
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in open_checkpoint(tmp_path / "model.gguf").names()


def test_other_divisors_keep_their_values(tmp_path: Path) -> None:
    factors = np.linspace(1, 5, HEAD_DIM // 2).astype(np.float32)
    config = _config(tmp_path, extra={"rope_freqs.weight": factors})
    cos, _ = read_rope(config, HEAD_DIM, 64).tables()
    frequencies = 10_000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / factors
    assert np.allclose(cos[7].numpy(), np.cos(7 * frequencies), atol=1e-5)


def test_ones_are_no_scaling(tmp_path: Path) -> None:
    ones = np.ones(HEAD_DIM // 2, dtype=np.float32)
    assert _config(tmp_path, extra={"rope_freqs.weight": ones})["rope_scaling"] is None


def test_sampling_defaults_and_stop_tokens(tmp_path: Path) -> None:
    metadata = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
    }
    write_model(tmp_path / "model.gguf", metadata=metadata)
    assert open_checkpoint(tmp_path / "model.gguf").generation == {
        "temperature": 0.7,
        "top_k": 20,
        "eos_token_id": [5, 7],
    }


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"llama.expert_count": 8}, "expert_used_count"),
        ({"llama.rope.dimension_count": 32}, "dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"split.count": 3}, "parts"),
    ],
)
def test_what_cannot_be_translated_is_refused(
    metadata: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=word) as caught:
        _config(tmp_path, metadata=metadata)
    assert "model.gguf" in str(caught.value)


def test_unknown_architecture_and_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="mamba"):
        _config(tmp_path, architecture="mamba")
    with pytest.raises(WeightsError, match=r"blk\.0\.secret"):
        _config(tmp_path, extra={"blk.0.secret.weight": np.ones(4, dtype=np.float32)})
