"""Experts straight from checkpoints: every spelling and type, equal to the weights in the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coterie.core.errors import ConfigError, WeightsError
from coterie.moe.store.base import ExpertGeometry
from coterie.moe.store.checkpoint import open_store
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.formats.gguf_tensors import decode
from coterie.weights.quantize import convert, dense
from tests.helpers.moe import store_files

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("stored", DTYPES)
def test_one_tensor_per_expert(tmp_path: Path, stored: str, dtype: str) -> None:
    weights = store_files.draw(DTYPES[stored])
    store = store_files.opened(
        store_files.write(tmp_path / "m", store_files.singles(weights)), dtype
    )
    store_files.expect(store, weights, dtype)
    kinds = {"auto": "bf16" if stored == "BF16" else "fp32"}
    assert store.layout(0).kinds == (kinds.get(dtype, dtype),) * 3
    assert store.slot_bytes == store.layout(2).nbytes and store.slot_bytes % 4096 == 0
    assert store.expert_bytes == len(weights) * store.slot_bytes


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_fused_stacks(tmp_path: Path, turned: bool, dtype: str) -> None:
    weights = store_files.draw(torch.bfloat16)
    path = store_files.write(tmp_path / "m", store_files.fused(weights, turned=turned))
    store_files.expect(store_files.opened(path, dtype), weights, dtype)


def test_square_stacks_lie_as_the_others_do(tmp_path: Path) -> None:
    """[E, D, 2I] with D = 2I fits either way; down_proj tells which."""
    inner = store_files.HIDDEN // 2
    both = torch.randn(store_files.EXPERTS, store_files.HIDDEN, 2 * inner)
    down = torch.randn(store_files.EXPERTS, inner, store_files.HIDDEN)
    stem = "model.layers.0.mlp.experts"
    tensors = {f"{stem}.gate_up_proj": both, f"{stem}.down_proj": down}
    checkpoint = open_checkpoint(store_files.write(tmp_path / "m", tensors))
    store = open_store(
        checkpoint, ExpertGeometry((0,), store_files.EXPERTS, 2), store_files.NAMES, "auto",
        hidden=store_files.HIDDEN, intermediate=inner, gated=True,
    )  # fmt: skip
    found = store_files.parts_of(store, (0, 1))
    assert torch.equal(found["gate"], both[1, :, :inner].T)
    assert torch.equal(found["up"], both[1, :, inner:].T)
    assert torch.equal(found["down"], down[1].T)


@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_experts_with_biases(tmp_path: Path, dtype: str) -> None:
    weights = store_files.draw(gated=False)
    tensors = store_files.singles(weights, store_files.PLAIN_NAMES)
    path = store_files.write(tmp_path / "m", tensors)
    store_files.expect(store_files.opened(path, dtype, gated=False), weights, dtype)


@pytest.mark.parametrize(
    ("stored", "down", "kinds"),
    [
        ("F32", None, ("fp32", "fp32", "fp32")),
        ("F16", None, ("fp32", "fp32", "fp32")),
        ("BF16", None, ("bf16", "bf16", "bf16")),
        ("Q8_0", None, ("int8", "int8", "int8")),
        ("Q4_0", None, ("int4", "int4", "int4")),
        ("Q4_1", "Q8_0", ("int4", "int4", "int8")),
        ("Q5_0", "Q5_1", ("q5_0", "q5_0", "q5_1")),
        ("Q4_K", "Q6_K", ("q4_k", "q4_k", "q6_k")),
        ("Q5_K", None, ("q5_k", "q5_k", "q5_k")),
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "fp32", "int8"])
def test_gguf_stacks(
    tmp_path: Path, stored: str, down: str | None, kinds: tuple[str, ...], dtype: str
) -> None:
    checkpoint = store_files.write_gguf(tmp_path / "m.gguf", stored, down)
    store = store_files.open_gguf(checkpoint, dtype)
    if dtype == "auto":
        assert store.layout(0).kinds == kinds
    for expert in range(store_files.GGUF_EXPERTS):
        found = store_files.parts_of(store, (0, expert))
        for part in ("gate", "up", "down"):
            name = f"blk.0.ffn_{part}_exps.weight"
            raw = np.split(checkpoint.raw(name), store_files.GGUF_EXPERTS)[expert]
            shape = checkpoint.shape(name)[1:]
            stored_weight = decode(torch.from_numpy(raw.copy()), checkpoint.stored_as(name), shape)
            wanted = dense(convert(stored_weight, dtype))
            assert torch.equal(found[part], wanted), (expert, part)


def test_q4_0_scales_beyond_fp16_are_refused_at_the_read(tmp_path: Path) -> None:
    checkpoint = store_files.write_gguf(tmp_path / "m.gguf", "Q4_0")
    extent = checkpoint.extent("blk.0.ffn_up_exps.weight")
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.seek(extent.offset)
        file.write(np.float16(60000).tobytes())
    checkpoint = store_files.PlainGGUF(tmp_path / "m.gguf")
    store = store_files.open_gguf(checkpoint)
    with pytest.raises(WeightsError, match=r"ffn_up_exps.*fp32"):
        store_files.parts_of(store, (0, 0))
    store_files.parts_of(store, (0, 1))
    store_files.parts_of(store_files.open_gguf(checkpoint, "fp32"), (0, 0))


@pytest.mark.parametrize(("method", "said"), [("fp8", "FP8"), ("mxfp4", "MXFP4")])
def test_quantised_safetensors_are_refused_by_name(tmp_path: Path, method: str, said: str) -> None:
    path = store_files.write(tmp_path / "m", store_files.singles(store_files.draw()))
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    with pytest.raises(WeightsError, match=rf"{said}.*GGUF"):
        open_checkpoint(path)


def broken(path: Path, change: str) -> Path:
    """A model with something wrong in one expert."""
    tensors = load_file(
        store_files.write(path, store_files.singles(store_files.draw())) / "model.safetensors"
    )
    name = "model.layers.2.mlp.experts.4.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif change == "type":
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif change == "mixed":
        tensors[name] = tensors[name].bfloat16()
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "has no tensor"),
        ("shape", r"\(96, 63\), not \(96, 64\)"),
        ("type", "F8_E4M3"),
    ],
)
def test_what_is_wrong_is_said_at_open_and_names_the_tensor(
    tmp_path: Path, change: str, said: str
) -> None:
    with pytest.raises(WeightsError, match=said) as caught:
        store_files.opened(broken(tmp_path / "m", change))
    assert "model.layers.2.mlp.experts.4.up_proj.weight" in caught.value.message


def test_a_layer_of_two_types_needs_one_precision(tmp_path: Path) -> None:
    path = broken(tmp_path / "m", "mixed")
    with pytest.raises(WeightsError, match="--dtype"):
        store_files.opened(path)
    assert store_files.opened(path, "bf16").layout(2).kinds == ("bf16",) * 3


def test_wrong_words_name_the_parameter(tmp_path: Path) -> None:
    path = store_files.write(tmp_path / "m", store_files.singles(store_files.draw()))
    for arguments, param in ((("int2", "auto"), "dtype"), (("auto", "mmap"), "reads")):
        with pytest.raises(ConfigError) as caught:
            store_files.opened(path, *arguments)
        assert caught.value.param == param
