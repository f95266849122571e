"""The comparison with llama.cpp: its files, its tables and what it calls a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.dense import gguf_speed, gguf_start
from benchmarks.dense.gguf_speed import AGAIN, OURS, PEER, FileRates
from benchmarks.dense.gguf_start import FileStarts, Started
from benchmarks.moe import random_moe
from benchmarks.peers import random_gguf
from benchmarks.peers.quantised_files import has_experts, token_bytes
from coterie.models.base import load_model
from coterie.models.text.tokenizer import load_tokenizer
from coterie.weights.checkpoint import open_checkpoint
from coterie.weights.formats.gguf import read_gguf
from tests.helpers.models.gguf_files import write_model
from tests.helpers.models.paged_model import prompt_logits

SHAPE = random_moe.Shape(
    layers=1, experts=8, top_k=2, hidden=64, intermediate=32, heads=2, kv_heads=1, vocab=300
)
CASE, PROMPT = "decode 1 stream", "prefill 512"


def test_a_token_reads_the_embedding_only_as_a_head(tmp_path: Path) -> None:
    sizes = {}
    for tied in (False, True):
        path = tmp_path / f"{tied}.gguf"
        write_model(path, kind="Q8_0", tied=tied)
        tensors = read_gguf(path).tensors
        sizes[tied] = token_bytes(path)
        every = sum(info.nbytes for info in tensors.values())
        assert sizes[tied] == every - (0 if tied else tensors["token_embd.weight"].nbytes)
        assert not has_experts(path)
    assert sizes[True] == sizes[False]


def test_a_random_model_with_experts_is_the_same_in_gguf(tmp_path: Path) -> None:
    folder = random_moe.write(tmp_path / "moe", SHAPE)
    path = random_gguf.gguf(folder, "BF16")
    tensors = read_gguf(path).tensors
    experts = sum(info.nbytes for name, info in tensors.items() if "_exps." in name)
    every = sum(info.nbytes for info in tensors.values())
    embedding = tensors["token_embd.weight"].nbytes
    assert has_experts(path) and token_bytes(path) == every - embedding - experts * 3 // 4
    assert load_tokenizer(path).decode([5, 6]) == load_tokenizer(folder).decode([5, 6])
    twins = (load_model(open_checkpoint(each), dtype="fp32") for each in (folder, path))
    first, second = (prompt_logits(model, [5, 9, 200, 7], 4) for model in twins)
    assert first.equal(second)


def test_ratios_are_of_one_round_and_noise_of_our_own_figure() -> None:
    rates = {
        OURS: {CASE: [10.0, 20.0, 33.0], PROMPT: [100.0]},
        PEER: {CASE: [5.0, 16.0, 30.0], PROMPT: [50.0]},
        AGAIN: {CASE: [19.0, 20.0, 25.0]},
    }
    file = FileRates(500, 400, False, bandwidths=[1e4], rates=rates)
    assert file.ratio(CASE) == 1.25 and file.noise(CASE) == 0.0
    assert file.share(OURS, CASE) == pytest.approx(0.8) and file.share(OURS, PROMPT) is None
    assert file.noise(PROMPT) is None and file.ratio("prefill 2,048") is None
    text = gguf_speed.table({"one": file}, [CASE, PROMPT])
    assert "| one | decode 1 stream | 20.0 | 16.0 | 1.25 | 80%, 64% | 0.0% |" in text
    assert "| one | prefill 512 | 100.0 | 50.0 | 2.00 | -, - | - |" in text


def test_the_goal_of_a_start_is_the_file_and_a_worker_without_one() -> None:
    bare = Started(1.0, 200_000_000, 210_000_000, 90_000_000)
    starts = {
        f"{OURS} first": [Started(4.0, 330_000_000, 340_000_000)],
        f"{OURS} second": [Started(2.5, 320_000_000, 350_000_000)],
        f"{PEER} first": [Started(1.5, 150_000_000, 160_000_000)],
        f"{PEER} second": [Started(0.5, 140_000_000, 150_000_000)],
    }
    file = FileStarts(100_000_000, 50e6, starts)
    text = gguf_start.table({"one": file}, bare)
    row = "| one | 100 | 330 (310) | 350 (325) | 140, 150 | 4.0 (5.0) | 2.5 | 1.5, 0.5 |"
    assert row in text
