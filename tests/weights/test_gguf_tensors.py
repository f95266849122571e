"""GGUF tensors against the `gguf` package and transformers, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.formats.gguf import TENSOR_TYPES, TensorInfo, read_gguf
from coterie.weights.formats.gguf_blocks import expand
from coterie.weights.formats.gguf_tensors import read_tensor
from coterie.weights.quantize import DenseWeight, Int4Weight, Int8Weight, dense, split
from tests.helpers.models.gguf_files import write_model

BLOCK_TYPES = {name: (block, size) for name, block, size in TENSOR_TYPES.values() if block > 1}


def _same_bits(got: torch.Tensor, expected: np.ndarray) -> None:
    """Equal bit for bit, where any NaN equals any NaN."""
    left, right = got.numpy().reshape(-1), expected.reshape(-1)
    assert np.array_equal(np.isnan(left), np.isnan(right))
    sound = ~np.isnan(left)
    assert sound.sum() > len(left) // 2
    assert np.array_equal(left[sound].view(np.uint32), right[sound].view(np.uint32))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_bytes_expand_like_the_oracle(kind: str) -> None:
    block, nbytes = BLOCK_TYPES[kind]
    random = np.random.default_rng(1)
    raw = random.integers(0, 256, (40, 6 * nbytes), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    got = expand(torch.from_numpy(raw).view(40, 6, nbytes), kind)
    assert got.shape == (40, 6 * block)
    # -0.0 and 0.0 are the same number; the oracle's order of operations decides the sign
    _same_bits(got + 0.0, expected + 0.0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_kept_types_hold_the_same_values(kind: str) -> None:
    random = np.random.default_rng(2)
    values = random.standard_normal((64, 256), dtype=np.float32)
    number = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(values, number)
    info = TensorInfo("t", (64, 256), kind, 0, raw.nbytes, Path("t"))
    weight = read_tensor({info.path: raw.reshape(-1).copy()}, info, None)
    parts = split(weight)
    assert isinstance(parts, Int8Weight if kind == "Q8_0" else Int4Weight)
    for each in (weight, parts):
        assert np.array_equal(dense(each).numpy(), gguf.quants.dequantize(raw, number))


def test_a_scale_too_large_for_fp16_falls_back_to_fp32() -> None:
    block = np.concatenate([np.array([20_000], np.float16).view(np.uint8), np.full(16, 0x0F)])
    raw = np.ascontiguousarray(block.astype(np.uint8))
    info = TensorInfo("t", (1, 32), "Q4_0", 0, 18, Path("t"))
    weight = split(read_tensor({info.path: raw}, info, None))
    assert isinstance(weight, DenseWeight)
    expected = gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(weight.tensor.numpy(), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *BLOCK_TYPES])
def test_whole_models_come_back_in_hf_order(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_model(path, kind=kind, seed=3)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(weights)
    # the oracle reads the raw tensor; the row order is undone here by hand
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    name = "model.layers.1.self_attn.k_proj.weight"
    there = reader["blk.1.attn_k.weight"]
    expected = gguf.quants.dequantize(there.data, there.tensor_type)
    expected = expected.reshape(2, 32, 2, 256).swapaxes(1, 2).reshape(128, 256)
    assert np.array_equal(dense(checkpoint.read(name)).numpy(), expected)
    assert checkpoint.stored_as(name) == kind
    assert checkpoint.shape(name) == (128, 256)
    if kind == "F32":
        for tensor, values in weights.items():
            assert np.array_equal(dense(checkpoint.read(tensor)).numpy(), values), tensor


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_rows_of_qwen_are_not_reordered(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_model(path, architecture, seed=4)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(weights)
    for name, values in weights.items():
        assert np.array_equal(dense(checkpoint.read(name)).numpy(), values), name


def test_default_model_equals_the_oracle(default_model_path: Path) -> None:
    checkpoint = open_checkpoint(default_model_path)
    infos = read_gguf(default_model_path).tensors
    raw = default_model_path.read_bytes()
    for name, there in (
        ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"),
        ("model.layers.29.self_attn.o_proj.weight", "blk.29.attn_output.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
    ):
        info = infos[there]
        data = np.frombuffer(raw, np.uint8, info.nbytes, info.offset).reshape(info.shape[0], -1)
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[info.type])
        got = dense(checkpoint.read(name)).numpy()
        assert np.array_equal(got, expected.reshape(info.shape)), name


@pytest.mark.full
def test_default_model_equals_transformers(default_model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name, dtype=torch.float32
    ).state_dict()
    checkpoint = open_checkpoint(default_model_path)
    kinds = set()
    for name in checkpoint.names():
        weight = checkpoint.read(name)
        kinds.add(type(split(weight)))
        assert torch.equal(dense(weight), oracle[name]), name
    assert kinds == {DenseWeight, Int8Weight, Int4Weight}
    assert set(oracle) - set(checkpoint.names()) == {"lm_head.weight"}
    assert checkpoint.config["tie_word_embeddings"]


def test_dense_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    checkpoint = open_checkpoint(path)
    first = checkpoint.read("model.norm.weight")
    again = checkpoint.read("model.norm.weight")
    assert isinstance(first, DenseWeight)
    assert isinstance(again, DenseWeight)
    assert first.tensor.data_ptr() == again.tensor.data_ptr()
    before = path.read_bytes()
    first.tensor.zero_()
    assert path.read_bytes() == before
