"""Flags that say where experts live: aliases, refusals, what reaches the settings, `--report`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coterie.cli import serve
from coterie.cli.main import build_parser, main
from coterie.cli.options import moe_options
from coterie.core.errors import ConfigError
from tests.helpers.models.tiny import tiny_checkpoint

ASKED = ["--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--context", "64"]


@pytest.fixture
def moe(tmp_path: Path) -> str:
    return str(shutil.copytree(tiny_checkpoint("qwen3_moe"), tmp_path / "moe"))


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        (["--strategy", "auto"], "auto"),
        (["--strategy", "persistent+lru"], "persistent+lru"),
        (["--strategy", "layer_grouped:4"], "layer_grouped:4"),
        (["--no-gpu-decode"], "cpu_only"),
        (["--expert-divisor", "0"], "chunked"),
        (["--expert-divisor", "1"], "persistent"),
        (["--expert-divisor", "3"], "layer_grouped:3"),
        (["--expert-divisor", "3", "--no-gpu-decode"], "layer_grouped:3+cpu_only"),
        (["--expert-divisor", "2", "--cache-strategy", "static_pin"], "layer_grouped:2+static_pin"),
        (["--cache-strategy", "weighted_pin"], "weighted_pin"),
        (["--cache-strategy", "lru"], "lru+active_only"),
        ([], None),
    ],
)
def test_every_spelling_of_a_strategy(flags: list[str], strategy: str | None) -> None:
    args = build_parser().parse_args(["run", "m", "--prompt", "a", *flags])
    assert moe_options(args).get("strategy") == strategy


def test_serve_flags_become_settings(tmp_path: Path) -> None:
    file = tmp_path / "coterie.toml"
    file.write_text(
        '[[specialists]]\nmodel = "m"\n[specialists.moe]\nhost_budget = "1GB"\nreads = "direct"'
    )
    flags = ["--config", str(file), "--device-budget", "25%", "--cache-capacity", "32",
             "--warmup", "hybrid", "--workload", "code", "--predict", "protect",
             "--deterministic", "--cache-strategy", "lru"]  # fmt: skip
    experts = serve.settings(build_parser().parse_args(["serve", *flags])).specialists[0].moe
    assert experts.strategy == "lru+active_only" and experts.device_budget == "25%"
    assert experts.host_budget == "1GB" and experts.reads == "direct"
    assert experts.cache_capacity == 32 and experts.deterministic
    assert (experts.warmup, experts.workload, experts.predict) == ("hybrid", "code", "protect")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--strategy", "lrux"], "did you mean lru?"),
        (["--strategy", "lru+lru+lru"], "PREFILL+DECODE"),
        (["--device-budget", "some"], "25%"),
        (["--host-budget", "250%"], "0% to 100%"),
        (["--cache-capacity", "-1"], "above 0"),
        (["--warmup", "long"], "hybrid"),
        (["--workload", "../x"], "a name of letters"),
        (["--cache-strategy", "lru", "--strategy", "lru"], "not both"),
        (["--cache-strategy", "lrux"], "did you mean lru?"),
        (["--expert-divisor", "-2"], "0 or more"),
    ],
)
def test_mistakes_are_named(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["serve", "m", "--port", "0", *flags])
    except SystemExit as exit:
        status = exit.code  # type: ignore[assignment]
    assert status == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_a_wrong_strategy_in_a_file_is_named_before_anything_loads(tmp_path: Path) -> None:
    from coterie.core.config import load
    from coterie.service.build import build

    file = tmp_path / "coterie.toml"
    file.write_text('[[specialists]]\nmodel = "/nowhere"\n[specialists.moe]\nstrategy = "lruu"')
    with pytest.raises(ConfigError, match="did you mean lru") as refused:
        build(load(file))
    assert refused.value.param == "specialists.0.moe.strategy"


def test_report_fits_a_terminal(
    moe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    budgets = ["--cache-strategy", "lru", "--cache-capacity", "4", "--host-budget", "20%"]
    assert main(["run", moe, "--prompt", "hello", *ASKED, *budgets, "--report"]) == 0
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= 80
    for word in ("prefill", "ttft", "decode", "tok/s", "lru+active_only", "4 slots", "hits",
                 "misses", "read from disk", "routing", "lookup", "io", "compute", "stall",
                 "updates", "swaps", "fallback rate", "saved"):  # fmt: skip
        assert word in shown, word


def test_report_tells_how_good_guesses_were(moe: str, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["--strategy", "adaptive", "--cache-capacity", "6", "--host-budget", "0"]
    asked = ["run", moe, "--prompt", "hello", *ASKED, *budgets, "--report", "--predict"]
    assert main([*asked, "prefetch"]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "guesses " in shown and "% of layers exactly" in shown and "fetched ahead" in shown
    assert main([*asked, "off"]) == 0
    assert "guesses" not in capsys.readouterr().err


def test_a_trace_is_what_plan_replays(
    moe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "run.npz")
    assert main(["run", moe, "--prompt", "hello", *ASKED, "--trace", kept]) == 0
    budgets = ["--cache-capacity", "6", "--host-budget", "100%"]
    capsys.readouterr()
    assert main(["plan", moe, *budgets, "--trace", kept, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["workload"] == "recorded trace run.npz, from a cold start (one request)"
    dense = str(tiny_checkpoint("llama"))
    assert main(["run", dense, "--prompt", "hello", *ASKED, "--trace", kept]) == 2
    assert "no routed experts" in capsys.readouterr().err


def test_what_is_decided_while_loading_is_said(
    moe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = ["--strategy", "persistent", "--cache-capacity", "4"]
    broken = Path(moe) / "heatmaps" / "default.json"
    broken.parent.mkdir()
    broken.write_text("{}")
    assert main(["run", moe, "--prompt", "hello", *ASKED, *budgets]) == 0
    said = capsys.readouterr().err.splitlines()
    assert any(line.startswith("coterie: persistent needs 24 slots and has 4") for line in said)
    assert any(line.startswith("coterie: heatmap_ignored: ") and moe in line for line in said)


def test_report_as_json(moe: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "active_only", "--cache-capacity", "1", "--host-budget", "0",
             "--predict", "off"]  # fmt: skip
    assert main(["run", moe, "--prompt", "hello", *ASKED, *flags, "--json", "--report"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["speed"]["ttft_s"] > 0 and report["speed"]["decode_tok_s"] > 0
    # one slot, nothing in RAM: everything is read, as often as it is asked for
    assert report["experts"]["device_misses"] == report["experts"]["host_misses"]
    assert report["experts"]["read_bytes"] == report["tiers"]["total"]["read_bytes"] > 0
    held = report["tiers"]["tiers"]["device"]["budget_bytes"]
    assert report["tiers"]["memory_saved_bytes"] == report["tiers"]["expert_bytes"] - held


def test_a_dense_model_reports_speed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_checkpoint("llama"))
    assert main(["run", model, "--prompt", "hello", *ASKED, "--report"]) == 0
    shown = capsys.readouterr().err
    assert "decode" in shown and "strategy" not in shown
    assert main(["run", model, "--prompt", "hello", "--device-budget", "1GB"]) == 2
    assert "no routed experts" in capsys.readouterr().err
