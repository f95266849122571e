"""Reading config.json: what the family understands, and how the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import ConfigError, WeightsError
from coterie.models.base import MODELS, load_model, read_spec
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.tiny import tiny_checkpoint

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}


def read(max_context: int | None = None, **changes: Any) -> Any:
    config = {**BASE, **changes}
    return MODELS[config["architectures"][0]].read(config, max_context)


def test_head_dim_defaults_by_architecture() -> None:
    assert read().head_dim == 16
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert read(head_dim=24).head_dim == 24


def test_sliding_window_caps_the_context() -> None:
    mistral = ["MistralForCausalLM"]
    assert read(architectures=mistral, sliding_window=256).max_positions == 256
    assert read(architectures=mistral, sliding_window=None).max_positions == 1024
    assert read(architectures=mistral).max_positions == 1024
    qwen: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 256}
    assert read(**qwen).max_positions == 1024
    assert read(**qwen, use_sliding_window=True, max_window_layers=0).max_positions == 256
    assert read(**qwen, use_sliding_window=True, max_window_layers=2).max_positions == 1024


def test_context_is_bounded_by_the_model() -> None:
    assert read(512).max_positions == 512
    with pytest.raises(ConfigError, match="1024"):
        read(2048)
    stretched = read(2048, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert stretched.max_positions == 2048


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            "layer_types",
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(WeightsError, match=word):
        read(**changes)


def copied(source: Path, target: Path, **changes: Any) -> Path:
    """`source` with other config keys; the tensors stay."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_unknown_architecture(tmp_path: Path) -> None:
    path = copied(tiny_checkpoint("llama"), tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(WeightsError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        load_model(open_checkpoint(path))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"intermediate_size": 96}, r"gate_proj.*\(160, 64\).*\(96, 64\)"),
        ({"num_hidden_layers": 4}, "layers.3.*missing"),
        ({"num_hidden_layers": 2}, "no place for the tensor"),
        ({"attention_bias": True}, "q_proj.bias.*missing"),
    ],
)
def test_file_and_config_must_agree(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    path = copied(tiny_checkpoint("llama"), tmp_path, **changes)
    with pytest.raises(WeightsError, match=word):
        load_model(open_checkpoint(path), backend="reference")


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="int3"):
        load_model(open_checkpoint(tiny_checkpoint("llama")), dtype="int3")


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    path = copied(tiny_checkpoint("llama"), tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert read_spec(open_checkpoint(path)).eos_ids == (1, 3)
