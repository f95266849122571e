"""Hugging Face directories: exact tensors, and a sentence for everything that can be wrong."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coterie.core.errors import WeightsError
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.quantize import DenseWeight
from tests.helpers.models.tiny import tiny_checkpoint

INDEX = "model.safetensors.index.json"


def tensor_of(path: Path, name: str) -> torch.Tensor:
    weight = open_checkpoint(path).read(name)
    assert isinstance(weight, DenseWeight)
    return weight.tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small directory of two shards, cheap to damage."""
    generator = torch.Generator().manual_seed(0)
    for shard in (1, 2):
        values = {f"w{shard}.{i}": torch.randn(8, 6, generator=generator) for i in range(3)}
        save_file(values, tmp_path / f"model-0000{shard}-of-00002.safetensors")
    where = {f"w{s}.{i}": f"model-0000{s}-of-00002.safetensors" for s in (1, 2) for i in range(3)}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_file_reads_as_the_library_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    values = {"a": torch.randn(5, 7).to(dtype), "b": torch.randn(3).to(dtype)}
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint.names()) == ["a", "b"]
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        got = tensor_of(tmp_path, name)
        assert got.dtype == dtype
        assert torch.equal(got, expected)
        assert checkpoint.shape(name) == tuple(expected.shape)
    assert (
        checkpoint.stored_as("a")
        == {4: "F32", 2: ("F16", "BF16")[dtype == torch.bfloat16]}[dtype.itemsize]
    )


def test_a_sharded_model_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint("llama", max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.names()) == set(oracle)
    for name in checkpoint.names():
        assert torch.equal(tensor_of(path, name), oracle[name]), name
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation["eos_token_id"] == 1


def test_tensors_are_views_and_the_file_is_never_changed(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    first, again = checkpoint.read("w1.0"), checkpoint.read("w1.0")
    assert isinstance(first, DenseWeight)
    assert isinstance(again, DenseWeight)
    assert first.tensor.data_ptr() == again.tensor.data_ptr()
    before = (folder / "model-00001-of-00002.safetensors").read_bytes()
    first.tensor.fill_(7)
    assert (folder / "model-00001-of-00002.safetensors").read_bytes() == before


def test_an_unaligned_header_is_read(tmp_path: Path) -> None:
    table = {"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}
    header = json.dumps(table).encode()
    header += b" " * ((1 - len(header)) % 4)
    raw = struct.pack("<Q", len(header)) + header + struct.pack("<3f", 1, 2, 3)
    assert (8 + len(header)) % 4 == 1
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "config.json").write_text("{}")
    assert tensor_of(tmp_path, "x").tolist() == [1, 2, 3]


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.read(name)
    assert str(path.name) in str(caught.value)
    return str(caught.value)


def damage(folder: Path, file: str, change: Callable[[Any], Any]) -> None:
    path = folder / file
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def point_to(where: str) -> Callable[[Any], Any]:
    return lambda index: {"weight_map": {**index["weight_map"], "w1.0": where}}


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "config.json"),
    "broken config": (lambda p: (p / "config.json").write_text('{"a": '), "config.json"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "not a JSON object"),
    "deep config": (lambda p: (p / "config.json").write_text("[" * 200_000), "not valid JSON"),
    "broken index": (lambda p: (p / INDEX).write_text("{"), INDEX),
    "empty index": (lambda p: (p / INDEX).write_text("{}"), "weight_map"),
    "missing shard": (lambda p: (p / "model-00002-of-00002.safetensors").unlink(), "00002-of"),
    "escape": (lambda p: damage(p, INDEX, point_to("../x.safetensors")), "../x"),
    "absolute": (lambda p: damage(p, INDEX, point_to("/etc/x.safetensors")), "/etc/x"),
    "not safetensors": (lambda p: damage(p, INDEX, point_to("pytorch_model.bin")), ".bin"),
    "number": (lambda p: damage(p, INDEX, lambda i: {"weight_map": {"w1.0": 3}}), "points to 3"),
    "wrong shard": (
        lambda p: damage(p, INDEX, point_to("model-00002-of-00002.safetensors")),
        "w1.0",
    ),
    "quantised": (
        lambda p: damage(
            p, "config.json", lambda c: {**c, "quantization_config": {"quant_method": "gptq"}}
        ),
        "gptq",
    ),
    "no index": (lambda p: (p / INDEX).unlink(), INDEX),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(name: str, folder: Path) -> None:
    change, word = FAULTS[name]
    change(folder)
    assert word in refusal(folder)


def test_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "safetensors" in refusal(tmp_path)
    with pytest.raises(WeightsError, match="pickle"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_other_types_are_refused_by_name_when_read(tmp_path: Path) -> None:
    values = {"ids": torch.arange(4), "w": torch.ones(2)}
    save_file(values, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(tensor_of(tmp_path, "w"), torch.ones(2))
    with pytest.raises(WeightsError, match="I64"):
        checkpoint.read("ids")
    with pytest.raises(WeightsError, match="nothing"):
        checkpoint.read("nothing")


def test_truncation_at_many_places(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    whole = path.read_bytes()
    for cut in [*range(40), *range(40, len(whole), 29), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        refusal(folder)
    path.write_bytes(whole + b"\0")
    assert "overlong" in refusal(folder)


def test_flipped_bits_in_the_header_never_crash(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    whole = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(3)
    refused = 0
    for _ in range(300):
        at, bit = chance.randrange(end), 1 << chance.randrange(8)
        whole[at] ^= bit
        path.write_bytes(whole)
        whole[at] ^= bit
        try:
            checkpoint = open_checkpoint(folder)
            for name in checkpoint.names():
                checkpoint.read(name)
        except WeightsError as error:
            assert folder.name in str(error)
            refused += 1
    assert refused > 150


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "Q99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2]},
        7,
    ],
)
def test_senseless_entries(entry: Any, tmp_path: Path) -> None:
    header = json.dumps({"x": entry}).encode()
    raw = struct.pack("<Q", len(header)) + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "config.json").write_text("{}")
    assert "model.safetensors" in refusal(tmp_path)


def test_fingerprints_follow_the_content(folder: Path, tmp_path: Path) -> None:
    before = open_checkpoint(folder).fingerprint()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=lambda *_: ["copy"])
    assert open_checkpoint(copy).fingerprint() == before
    path = copy / "model-00002-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    assert open_checkpoint(copy).fingerprint() != before
