"""Carving: equal groups, the dense model when every expert runs, and a model that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coterie.cli.main import main
from coterie.core.errors import ConfigError, WeightsError
from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM, load_model, read_spec
from coterie.models.carve.calibrate import LayerCarver
from coterie.models.carve.carve import LayerCut, balanced_groups, cut_layer, plan_carving
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.formats.safetensors import INDEX
from tests.helpers.models.paged_model import prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint

TEXT = "A model answers a question; another model checks the answer. Numbers such as 10 and 42."
ALL = MoeSettings(strategy="cpu_only", predict="off")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def carved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts of 16 neurons, 2 active, 32 of 160 neurons always on."""
    out = tmp_path_factory.mktemp("carved") / "out"
    notes = tmp_path_factory.mktemp("text") / "text.txt"
    notes.write_text(TEXT * 40)
    arguments = ["--experts", "8", "--active", "2", "--shared", "32", "--calibration", str(notes)]
    status = main(["carve", str(tiny_checkpoint(request.param)), "--out", str(out), *arguments])
    assert status == 0
    return out


def dense_of(path: Path) -> Path:
    kind = json.loads((path / "config.json").read_text())["carved_from"]
    return tiny_checkpoint(kind.removesuffix("ForCausalLM").lower())


def with_active(path: Path, active: int, target: Path) -> CausalLM:
    """The same weights with another number of experts per token."""
    target.mkdir()
    for file in path.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": active}))
    return load_model(open_checkpoint(target), dtype="fp32", dispatch=ALL)


def test_with_every_expert_it_is_the_dense_model(carved: Path, tmp_path: Path) -> None:
    dense = load_model(open_checkpoint(dense_of(carved)), dtype="fp32")
    ids = load_tokenizer(carved).encode(TEXT)
    model = with_active(carved, 8, tmp_path / "all")
    try:
        difference = prompt_logits(model, ids, len(ids)) - prompt_logits(dense, ids, len(ids))
        assert difference.abs().max() < 1e-4
    finally:
        model.close()


def test_with_some_experts_it_runs_and_differs(carved: Path) -> None:
    dense = load_model(open_checkpoint(dense_of(carved)), dtype="fp32")
    model = load_model(open_checkpoint(carved), dtype="fp32", dispatch=ALL)
    ids = load_tokenizer(carved).encode(TEXT)
    try:
        logits = prompt_logits(model, ids, len(ids))
        assert torch.isfinite(logits).all()
        assert torch.allclose(logits, prompt_logits(model, ids, 1), atol=1e-4)
        assert (logits - prompt_logits(dense, ids, len(ids))).abs().max() > 1e-2
    finally:
        model.close()


def test_every_neuron_is_in_exactly_one_place(carved: Path) -> None:
    """Rows of the dense gate are found again, each once."""
    dense = open_checkpoint(dense_of(carved)).read("model.layers.1.mlp.gate_proj.weight")
    checkpoint = open_checkpoint(carved)
    stem = "model.layers.1.mlp."
    names = [f"{stem}shared_experts.gate_proj.weight"]
    names += [f"{stem}experts.{e}.gate_proj.weight" for e in range(8)]
    parts = [checkpoint.read(name).tensor for name in names]  # type: ignore[union-attr]
    assert [len(part) for part in parts] == [32, *[16] * 8]
    found = torch.cat(parts)
    expected = dense.tensor  # type: ignore[union-attr]
    order = torch.cdist(found, expected).argmin(1)
    assert sorted(order.tolist()) == list(range(160))
    assert torch.equal(found, expected[order])


def test_others_may_read_it(carved: Path) -> None:
    assert {file.stat().st_mode & 0o044 for file in carved.glob("*.safetensors")} == {0o044}


def test_it_is_an_ordinary_directory(carved: Path) -> None:
    assert {"config.json", "tokenizer.json", "carve.json", INDEX} <= {
        file.name for file in carved.iterdir()
    }
    spec = read_spec(open_checkpoint(carved))
    assert spec.moe is not None and spec.moe.gate_rule.equal and spec.moe.shared == 32
    source = load_tokenizer(dense_of(carved))
    assert load_tokenizer(carved).encode(TEXT) == source.encode(TEXT)
    # nothing half-made is left beside it
    assert [file.name for file in carved.parent.iterdir()] == ["out"]


def example(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(300, 24, generator=draw)
    # four families of 16 neurons that fire together, and 16 that always do
    drive = (rows[:, :4] > 0).float().repeat_interleave(16, dim=1)
    noise = 0.1 * torch.rand(300, 64, generator=draw)
    always = 3 + torch.rand(300, 16, generator=draw)
    return rows, torch.cat([drive + noise, always], dim=1), torch.ones(24, 80)


def test_groups_are_what_fires_together() -> None:
    cut = cut_layer(*example(0), plan_carving(80, 4, 1, 16))
    assert cut.shared.tolist() == list(range(64, 80))
    families = {tuple(group.tolist()) for group in cut.experts}
    assert families == {tuple(range(start, start + 16)) for start in range(0, 64, 16)}


def test_the_router_finds_the_active_group() -> None:
    rows, activations, down = example(1)
    cut = cut_layer(rows, activations, down, plan_carving(80, 4, 1, 16))
    kept = (activations * cut.mask(rows, 2)).square().sum()
    blind = (activations * shuffled(cut).mask(rows, 2)).square().sum()
    assert kept > blind


def shuffled(cut: LayerCut) -> LayerCut:
    return LayerCut(cut.shared, cut.experts, cut.gate.roll(1, dims=0))


def test_grouping_is_balanced_and_depends_on_the_seed_alone() -> None:
    points = torch.nn.functional.normalize(
        torch.randn(96, 20, generator=torch.Generator().manual_seed(3)), dim=1
    )
    labels = balanced_groups(points, 8, seed=5)
    assert torch.bincount(labels).tolist() == [12] * 8
    assert torch.equal(labels, balanced_groups(points, 8, seed=5))
    assert not torch.equal(labels, balanced_groups(points, 8, seed=6))


def test_a_third_of_the_neurons_is_shared_unless_told() -> None:
    plan = plan_carving(1536, 64, 8)
    assert (plan.shared, plan.width) == (512, 16)
    assert plan.share(8) == pytest.approx(640 / 1536)
    assert plan_carving(1536, 64, 8, shared=0).width == 24


@pytest.mark.parametrize(
    ("experts", "active", "shared", "param"),
    [
        (1, 1, None, "experts"),
        (200, 1, None, "experts"),
        (8, 9, None, "active"),
        (8, 2, -1, "shared"),
        (8, 2, 160, "shared"),
        (8, 2, 33, "shared"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    experts: int, active: int, shared: int | None, param: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_carving(160, experts, active, shared)
    assert caught.value.param == param


def test_a_refusal_names_numbers_that_would_do() -> None:
    with pytest.raises(ConfigError, match="--shared 32 or 40"):
        plan_carving(160, 8, 2, 33)


def test_only_dense_models_are_carved(carved: Path) -> None:
    checkpoint = open_checkpoint(carved)
    with pytest.raises(WeightsError, match="can be carved"):
        LayerCarver(checkpoint, read_spec(checkpoint))


def test_an_existing_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    source, out = str(tiny_checkpoint("llama")), str(tmp_path / "mine")
    status = main(["carve", source, "--experts", "8", "--active", "2", "--out", out])
    assert status == 2
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
