"""The bytes of a model are known before it is loaded, and are those that it takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.models.base import load_model
from coterie.models.weight_sizes import matrix_bytes
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.gguf_files import write_model

MIXED = {"v_proj": "Q6_K", "down_proj": "Q8_0", "embed_tokens": "Q6_K", "q_proj": "Q5_0"}


@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0", "Q8_0", "BF16", "F16"])
def test_predicted_bytes_are_those_of_the_model(
    kind: str, tied: bool, dtype: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, kind=kind, mixed=MIXED if kind == "Q4_K" else {}, tied=tied)
    checkpoint = open_checkpoint(path)
    predicted = matrix_bytes(checkpoint, dtype, "cpu", tied=tied)
    assert predicted == load_model(checkpoint, dtype=dtype).weight_bytes


def test_a_device_that_does_not_keep_a_type_takes_fp32(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, kind="Q4_K", tied=True)
    checkpoint = open_checkpoint(path)
    shapes = [checkpoint.shape(name) for name in checkpoint.names()]
    elements = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    assert matrix_bytes(checkpoint, "auto", "mps", tied=True) == 4 * elements


def test_inspect_tells_the_bytes_in_file_and_memory(
    default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(default_model_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["weights"]
    checkpoint = open_checkpoint(default_model_path)
    assert found["file_bytes"] == sum(checkpoint.extent(n).nbytes for n in checkpoint.names())
    assert found["stored_as"].keys() == {checkpoint.stored_as(n) for n in checkpoint.names()}
    assert sum(found["stored_as"].values()) == found["file_bytes"]
    assert found["memory_bytes"] == load_model(checkpoint).weight_bytes
    assert main(["inspect", str(default_model_path)]) == 0
    assert "in memory on a CPU" in capsys.readouterr().out
