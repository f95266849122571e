"""`coterie store` on a real tiny model: every action, its JSON, and its one-line errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coterie.cli.main import main
from coterie.models.base import load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.base import ExpertGeometry
from coterie.moe.store.packed import open_packed
from coterie.weights.checkpoint import Checkpoint, open_checkpoint
from coterie.weights.quantize import DenseWeight
from tests.helpers.models.tiny import tiny_checkpoint

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "packed"
    assert main(["store", "export", str(model), str(out)]) == 0
    return out


@pytest.fixture
def packed(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "packed")


def run(capsys: Capture, *arguments: object) -> Any:
    capsys.readouterr()
    assert main(["store", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, *arguments: object) -> str:
    """One line, and no traceback."""
    capsys.readouterr()
    assert main(["store", *map(str, arguments)]) in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("coterie: ")
    return said[0]


def heatmap_file(path: Path, fingerprint: str, used: dict[int, int]) -> Path:
    counts = np.zeros((3, 8))
    for expert, count in used.items():
        counts[:, expert] = count
    heatmap = Heatmap(ExpertGeometry((0, 1, 2), 8, 2), counts)
    heatmap.save(path, fingerprint=fingerprint, workload="chat")
    return path


def test_export_is_a_model(model: Path, packed: Path, capsys: Capture) -> None:
    """Same tokenizer, same backbone, same experts: the whole model runs from it."""
    assert load_tokenizer(packed).encode("The fox") == load_tokenizer(model).encode("The fox")
    shown = run(capsys, "inspect", packed)
    assert len(shown["experts"]) == 24 and shown["absent"] == []
    again = run(capsys, "export", packed, packed.with_name("int4"), "--dtype", "int4")
    # rows of 48 (down) do not divide into groups of 32
    assert again["dtype"] == "fp32+int4" and again["experts"] == 24 and again["resumed"] == 0
    whole = sum(t.nbytes for t in _tensors(model).values())
    both = sum(t.nbytes for t in _tensors(packed).values()) + open_packed(packed).expert_bytes
    assert whole <= both < whole * 1.2
    load_model(open_checkpoint(packed)).close()


def _tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    weight = checkpoint.read(name)
    assert isinstance(weight, DenseWeight)
    return weight.tensor


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    return {name: _tensor(checkpoint, name) for name in checkpoint.names()}


def test_inspect_shows_one_layer_with_counts(model: Path, packed: Path, capsys: Capture) -> None:
    source = open_packed(packed).index.lineage[0]
    heatmap = heatmap_file(packed.with_name("chat.json"), source, {3: 7})
    for target in (model, packed):
        shown = run(capsys, "inspect", target, "--layer", 1, "--heatmap", heatmap)
        counts = [expert["count"] for expert in shown["experts"]]
        assert counts == [0, 0, 0, 7, 0, 0, 0, 0]
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        norm = float(_tensor(open_checkpoint(model), name).norm())
        assert shown["experts"][3]["norms"]["up"] == pytest.approx(norm)
    assert main(["store", "inspect", str(packed), "--layer", "1"]) == 0
    text = capsys.readouterr().out
    assert "|down|" in text and "count" not in text
    # what live traffic left beside the model is shown without being named
    beside = packed / "heatmaps" / "default.json"
    heatmap_file(beside, open_packed(packed).fingerprint, {2: 5})
    assert main(["store", "inspect", str(packed), "--layer", "1"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:4]] == [
        "count", "0", "0", "5",
    ]  # fmt: skip
    shutil.rmtree(beside.parent)
    assert "layer 7 has no experts" in refused(capsys, "inspect", packed, "--layer", 7)
    foreign = heatmap_file(packed.with_name("other.json"), "other", {3: 7})
    assert "another fingerprint" in refused(capsys, "inspect", packed, "--heatmap", foreign)


def test_verify(model: Path, packed: Path, capsys: Capture) -> None:
    assert run(capsys, "verify", packed)["sound"]
    assert run(capsys, "verify", model) | {"nbytes": 0} == {
        "experts": 24, "nbytes": 0, "faults": [], "checksums": False, "sound": True,
    }  # fmt: skip
    with (packed / "experts.bin").open("r+b") as file:
        file.write(b"\xff" * 8)
    capsys.readouterr()
    assert main(["store", "verify", str(packed)]) == 1
    assert "expert 0 of layer 0" in capsys.readouterr().out


def test_prune_reports_what_is_gone(packed: Path, capsys: Capture) -> None:
    old = open_packed(packed).index
    heatmap = heatmap_file(packed.with_name("chat.json"), old.lineage[0], {0: 4, 3: 7, 6: 1})
    out = packed.with_name("smaller")
    copied = run(capsys, "prune", packed, "--heatmap", heatmap, "--out", out)
    assert copied["dropped"] == {str(layer): [1, 2, 4, 5, 7] for layer in range(3)}
    assert copied["experts"] == 15 and copied["fingerprint"] != old.fingerprint
    assert open_packed(out).geometry.total == 9
    assert main(["store", "prune", str(packed), "--heatmap", str(heatmap)]) == 0
    said = capsys.readouterr().out
    assert "may no longer pick" in said and "1 2 4 5 7" in said
    # the heatmap of the store it came from is still good for the pruned one
    assert run(capsys, "prune", packed, "--heatmap", heatmap)["experts"] == 0
    missing = packed.with_name("none.json")
    assert "none.json" in refused(capsys, "prune", packed, "--heatmap", missing)


def test_replace_from_a_model_and_from_a_file(model: Path, packed: Path, capsys: Capture) -> None:
    other = tiny_checkpoint("qwen3_moe", seed=1)
    before = open_packed(packed).fingerprint
    done = run(capsys, "replace", packed, 2, 5, "--from", other)
    assert done["fingerprint"] == open_packed(packed).fingerprint != before
    stem = "model.layers.2.mlp.experts.5."
    norms = run(capsys, "inspect", packed, "--layer", 2)["experts"][5]["norms"]
    parts = {p: _tensor(open_checkpoint(other), f"{stem}{p}_proj.weight") for p in norms}
    assert norms == {part: pytest.approx(float(t.norm())) for part, t in parts.items()}
    file = packed.with_name("expert.safetensors")
    save_file({part: tensor * 2 for part, tensor in parts.items()}, file)
    run(capsys, "replace", packed, 2, 5, "--from", file)
    twice = run(capsys, "inspect", packed, "--layer", 2)["experts"][5]["norms"]
    assert twice == {part: pytest.approx(2 * norm) for part, norm in norms.items()}
    assert "has no expert 8" in refused(capsys, "replace", packed, 2, 8, "--from", other)
    assert "not a packed store" in refused(capsys, "replace", model, 2, 5, "--from", other)


def test_profile(model: Path, packed: Path, capsys: Capture) -> None:
    for target in (model, packed):
        shown = run(capsys, "profile", target, "--depth", 1, 4)
        assert {(s["depth"], s["experts"]) for s in shown["samples"]} == {(1, 24), (4, 24)}
    assert main(["store", "profile", str(packed), "--depth", "2"]) == 0
    assert "GB/s" in capsys.readouterr().out


def test_dense_models_and_help(capsys: Capture) -> None:
    dense = tiny_checkpoint("llama")
    assert "dense model" in refused(capsys, "verify", dense)
    assert main(["store"]) == 0
    assert "examples:" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["store", "prune", "--help"])
    assert "--heatmap FILE" in capsys.readouterr().out
