"""The DWR trainer learns, and Coterie computes what the trained torch module does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coterie.core.moe import MoeSettings
from coterie.models.base import load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from examples.dwr_torch import DWR, Shape
from examples.train_dwr import Span, Windows, read_corpus, train, validate, write
from tests.helpers.models.paged_model import prompt_logits

TINY = Shape(layers=2, hidden=64, intermediate=96, experts=8, heads=4, vocab=400, positions=32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[DWR, Path, dict[str, float]]:
    torch.manual_seed(0)
    here = Path(__file__).resolve().parent.parent
    corpus = read_corpus(TINY, 3_000_000, [here])
    model = DWR(TINY)
    windows = Windows(corpus, TINY.positions, "cpu")
    before = validate(model, windows.validation)
    report = train(model, windows, Span(steps=30), 8)
    out = tmp_path_factory.mktemp("dwr") / "model"
    write(model, corpus.tokenizer, out, report)
    return model, out, {"before": before, "after": report["val_loss"]}


def test_the_published_shape_has_its_number_of_parameters() -> None:
    assert DWR(TINY).num_parameters() == TINY.parameters()
    assert Shape().parameters() == 259_712_096


@pytest.mark.full
def test_training_lowers_the_held_out_loss(trained: tuple[DWR, Path, dict[str, float]]) -> None:
    losses = trained[2]
    assert losses["after"] < losses["before"] - 0.1


@pytest.mark.full
def test_coterie_runs_the_checkpoint(trained: tuple[DWR, Path, dict[str, float]]) -> None:
    module, path, _ = trained
    ids = load_tokenizer(path).encode("def add(left, right):\n    return left + right\n")[:24]
    with torch.no_grad():
        expected = module(torch.tensor([ids]))[0][0]
    settings = MoeSettings(strategy="lru", cache_capacity=3, host_budget="0")
    model = load_model(open_checkpoint(path), dtype="fp32", dispatch=settings)
    try:
        for chunk in (len(ids), 1):
            assert torch.allclose(prompt_logits(model, ids, chunk), expected, atol=1e-4)
    finally:
        model.close()
