"""`coterie sweep`: capacities and other experts, on tiny models; its variants are what they say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coterie.cli.main import main
from coterie.cli.sweep import capacities
from coterie.core.errors import ConfigError
from coterie.models.carve.variant import ModelVariant, write_variant
from coterie.weights.checkpoint import open_checkpoint
from coterie.workers.embedded import LLM
from tests.helpers.models.tiny import tiny_checkpoint

LAYERS, EXPERTS = 3, 8


def sweep(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    model = str(tiny_checkpoint("qwen3_moe"))
    fixed = ["--json", "--tokens", "12", "--repeat", "1", "--threads", "1"]
    assert main(["sweep", model, *fixed, *arguments]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_less_memory_has_fewer_hits_and_never_more_than_the_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = sweep(capsys, "--capacities", "100%,50%,3", "--strategies", "lru,adaptive")
    assert [(run["strategy"], run["slots"]) for run in report["runs"]] == [
        ("lru", 24), ("adaptive", 24), ("lru", 12), ("adaptive", 12), ("lru", 3), ("adaptive", 3)
    ]  # fmt: skip
    lru = [run for run in report["runs"] if run["strategy"] == "lru"]
    for more, less in itertools.pairwise(lru):
        assert more["hit_rate"] > less["hit_rate"]
        assert more["share"] > less["share"]
        assert more["best_hit_rate"] > less["best_hit_rate"]
    assert lru[0]["share"] == pytest.approx(1.0)
    # a slot is an expert: 3 of 24 and the backbone
    expert = (lru[0]["device_bytes"] - lru[1]["device_bytes"]) / 12
    assert lru[2]["device_bytes"] == pytest.approx(lru[0]["device_bytes"] - 21 * expert)
    assert all(run["hit_rate"] <= run["best_hit_rate"] + 1e-9 for run in lru)
    assert all(run["tokens_s"] > 0 and run["read_bytes"] > 0 for run in report["runs"])


def test_ablations_change_one_thing_each(capsys: pytest.CaptureFixture[str]) -> None:
    ablations = ["--active", "1", "--experts", "4", "--neurons", "24"]
    report = sweep(capsys, "--capacities", "50%", "--strategies", "lru", *ablations)
    runs = {run["variant"]: run for run in report["runs"]}
    assert list(runs) == ["as it is", "1 active", "4 experts", "24 neurons"]
    assert [run["slots"] for run in runs.values()] == [12, 12, 6, 12]
    plain = runs["as it is"]
    assert runs["1 active"]["device_bytes"] == plain["device_bytes"]
    assert runs["4 experts"]["share"] < runs["24 neurons"]["share"] < plain["share"]
    assert runs["4 experts"]["read_bytes"] < plain["read_bytes"]


@pytest.mark.parametrize(
    ("arch", "variant"),
    [
        ("qwen3_moe", ModelVariant(active=1)),
        ("qwen3_moe", ModelVariant(experts=5)),
        ("mixtral", ModelVariant(experts=4)),
        ("olmoe", ModelVariant(width=16)),
        ("deepseek_v2", ModelVariant(active=1)),
    ],
    ids=str,
)
def test_a_variant_is_what_transformers_reads_of_it(
    arch: str, variant: ModelVariant, tmp_path: Path
) -> None:
    out = tmp_path / "variant"
    write_variant(open_checkpoint(tiny_checkpoint(arch)), variant, out)
    judge = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    prompt = [1, 40, 41, 42]
    with torch.no_grad():
        wanted = judge.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
    given = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with LLM(str(out), dtype="fp32", threads=1, kv_bytes=2_000_000) as llm:
        assert list(llm.generate(prompt, **given)[0].token_ids) == wanted.tolist()


@pytest.mark.parametrize(
    ("arch", "variant", "param"),
    [
        ("qwen3_moe", ModelVariant(active=9), "active"),
        ("qwen3_moe", ModelVariant(active=6, experts=5), "active"),
        ("qwen3_moe", ModelVariant(experts=1), "experts"),
        ("qwen3_moe", ModelVariant(width=10_000), "width"),
        ("deepseek_v2", ModelVariant(width=16), "width"),
        ("llama", ModelVariant(active=1), "model"),
    ],
    ids=str,
)
def test_what_no_model_can_be_is_refused_and_nothing_is_written(
    arch: str, variant: ModelVariant, param: str, tmp_path: Path
) -> None:
    out = tmp_path / "variant"
    with pytest.raises(ConfigError) as refused:
        write_variant(open_checkpoint(tiny_checkpoint(arch)), variant, out)
    assert refused.value.param == param
    assert not out.exists()


def test_a_dense_model_and_unreadable_capacities_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sweep", str(tiny_checkpoint("llama"))]) != 0
    assert "coterie carve" in capsys.readouterr().err
    for text in ("0", "101%", "half", "-3"):
        with pytest.raises(Exception, match="number of experts"):
            capacities(text)
    assert capacities("96, 12.5%") == ["96", "12.5%"]
