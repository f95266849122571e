"""Whole models from packed stores: the same logits as from the checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.cli.main import main
from coterie.core.moe import MoeSettings
from coterie.models.base import load_model
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.store.edit import prune
from coterie.moe.store.packed import open_packed
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.models.gguf_conversion import write_twins
from tests.helpers.models.paged_model import prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint

IDS = torch.randint(4, 384, (20,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(path: Path, dtype: str = "auto") -> Tensor:
    settings = MoeSettings(strategy="lru", cache_capacity=3, warmup="none", predict="off")
    model = load_model(open_checkpoint(path), dtype=dtype, dispatch=settings)
    try:
        return prompt_logits(model, IDS, 8)
    finally:
        model.close()


def packed(model: Path, out: Path, *options: str) -> Path:
    assert main(["store", "export", str(model), str(out), *options]) == 0
    return out


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2", "dwr"])
def test_safetensors(tmp_path: Path, architecture: str) -> None:
    model = tiny_checkpoint(architecture)
    assert torch.equal(logits(packed(model, tmp_path / "p")), logits(model))
    # experts quantised once, at the export or at each read
    whole = packed(model, tmp_path / "int8", "--dtype", "int8")
    assert torch.equal(logits(whole, "int8"), logits(model, "int8"))


def test_gguf_backbone_keeps_its_blocks_and_row_order(tmp_path: Path) -> None:
    """Mixtral's q and k are reordered in GGUF files."""
    source = tiny_checkpoint("mixtral", intermediate_size=64)
    model, _ = write_twins(source, tmp_path, "Q8_0")
    store = packed(model, tmp_path / "p")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert open_checkpoint(store).stored_as(name) == "Q8_0"
    assert open_packed(store).index.dtype == "int8"
    assert torch.equal(logits(store), logits(model))


def test_a_pruned_model_never_asks_for_what_is_gone(tmp_path: Path) -> None:
    model = tiny_checkpoint("qwen3_moe")
    store = packed(model, tmp_path / "p")
    counts = np.zeros((3, 8))
    counts[:, [1, 4, 6]] = 1
    whole = logits(store)
    done = prune(store, Heatmap(open_packed(store).geometry, counts))
    assert done.dropped[1] == (0, 2, 3, 5, 7)
    found = logits(store)
    assert bool(torch.isfinite(found).all()) and not torch.equal(found, whole)
