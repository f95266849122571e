"""`coterie plan`: a table that fits a terminal, JSON that a script can read, one measurement."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.moe.random_moe import Shape, write
from coterie.cli.main import main
from coterie.cli.plan import _graph_reserve, share_of
from coterie.core.moe import MoeSettings
from coterie.kernels.cpu.build import native
from coterie.models.plan_inputs import open_plan_inputs
from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.planner import machine, measure
from coterie.moe.runtime.budget import share
from coterie.weights.checkpoint import open_checkpoint

NATIVE = native() is not None
SHAPE = Shape(2, 8, 2, 64, 32, 4, 2, 16, 320, 128, skew=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("moe"), SHAPE)


@pytest.fixture(autouse=True)
def quick(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept apart from this user's own measurements; small arrays are enough here."""
    folder = tmp_path_factory.getbasetemp() / "plan-state"
    monkeypatch.setattr(machine, "state_dir", lambda: folder)
    monkeypatch.setattr(measure, "_DRAM_BYTES", 1 << 22)


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["plan", *arguments])
    return status, out.getvalue(), err.getvalue()


def test_the_table_fits_80_columns_and_names_its_choice(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(str(model), "--device-budget", "25%", "--host-budget", "100%")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    shown = {word.strip(">+") for line in out.splitlines() for word in line.split()}
    assert shown >= {*STRATEGIES, "(bound)", "choice", "workload", "strategy"}
    assert sum(line.startswith(">") for line in out.splitlines()) == 1
    assert "Zipf" in out
    assert "persistent as" in out, "what it falls back to with these slots"
    rows = [line for line in out.splitlines() if re.match("[ >][a-z(]", line)]
    assert len(rows) <= 12 and rows[-1].startswith(" (bound)")
    told = "".join(line for line in out.splitlines() if line.startswith("one call"))
    assert ("cpu_only" in told) == ("hot_cached_static" in told) == NATIVE
    assert "lru" not in told


def test_a_plan_for_a_gpu_leaves_room_for_captured_graphs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server there does; what is free is made up."""
    free = 4 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
    given = open_plan_inputs(open_checkpoint(model), "auto", "cuda")
    on_cpu = open_plan_inputs(open_checkpoint(model), "auto", "cpu")
    try:
        reserve = _graph_reserve(given)
        assert 256 << 20 < reserve < 2 << 30 and _graph_reserve(on_cpu) == 0
        [way] = given.memory_divisions(MoeSettings(), 1000, reserve)
        [plain] = given.memory_divisions(MoeSettings(), 1000)
        assert way.needs.graph_bytes == reserve and plain.needs.graph_bytes == 0
        sizes = given.planned_model().sizes
        slots = way.tiers("persistent", sizes)
        assert slots is not None and slots.device == sizes.total
        assert plain.kv_room(slots, 10) - way.kv_room(slots, 10) == reserve
        # not all experts fit, and RAM does not hold the others: nothing is captured
        disk = MoeSettings(device_budget="50%", host_budget="10%")
        [half] = given.memory_divisions(disk, 1000, reserve)
        assert half.needs.graph_bytes == 0
    finally:
        given.store.close()
        on_cpu.store.close()


def test_json_is_whole_and_can_be_saved(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    status, out, _ = run(
        str(model), "--json", "--cache-capacity", "4", "--context", "100", "--save", str(file)
    )
    document = json.loads(out)
    assert status == 0 and json.loads(file.read_text()) == document
    names = {"model", "machine", "workload", "rows", "choice", "advice", "flags", "made_at"}
    assert names == set(document)
    assert document["model"]["experts"] == 16 and document["model"]["top_k"] == 2
    assert document["model"]["context"] == 100 and document["model"]["backbone_measured"]
    # 2 planes, 2 layers, 2 heads of 16 in bf16
    assert document["model"]["kv_bytes"] == 100 * 2 * 2 * 2 * 16 * 2
    assert document["model"]["graph_bytes"] == 0
    slots = {row["strategy"]: row["device_slots"] for row in document["rows"]}
    assert slots["lru"] == 4 and slots["cpu_only"] == 0
    assert all(row["decode_tokens_s"] > 0 for row in document["rows"])
    alone = {row["strategy"] for row in document["rows"] if row["one_call"]}
    assert ("cpu_only" in alone) == NATIVE
    assert alone.isdisjoint({"lru", "static_pin", "chunked", "belady"})


@pytest.mark.full
def test_the_machine_is_measured_once(model: Path) -> None:
    run(str(model), "--cache-capacity", "4")
    _, _, said = run(str(model), "--cache-capacity", "8")
    assert "measuring" not in said
    _, _, said = run(str(model), "--cache-capacity", "8", "--remeasure")
    # a busy machine is told too
    first, *others = said.splitlines()
    assert first.startswith("measuring this machine, once, about")
    assert all(line.startswith("the measurement was disturbed") for line in others)


def test_a_budget_too_small_and_a_wrong_trace_are_told(model: Path, tmp_path: Path) -> None:
    budgets = ("--device-budget", "1KB", "--host-budget", "0B")
    status, _, said = run(str(model), *budgets)
    assert status == 2 and "no strategy fits" in said.splitlines()[-1]
    wrong = tmp_path / "trace.npz"
    wrong.write_bytes(os.urandom(64))
    status, _, said = run(str(model), "--trace", str(wrong))
    assert status == 1 and "not a readable trace" in said


def planned(*arguments: str) -> dict[str, Any]:
    status, out, said = run(*arguments, "--json")
    assert status == 0, said
    document: dict[str, Any] = json.loads(out)
    return document


def chosen(document: dict[str, Any]) -> dict[str, Any]:
    wanted = document["choice"]
    [row] = [
        row
        for row in document["rows"]
        if all(row[k] == wanted[k] for k in ("strategy", "device_budget", "host_budget"))
    ]
    told = ("strategy", "device_slots", "host_slots", "prefill_tokens_s", "decode_tokens_s", "runs")
    return {key: row[key] for key in told} | {"context": document["model"]["context"]}


@pytest.mark.parametrize(
    "given",
    [
        (),
        pytest.param(
            ("--cache-capacity", "5", "--context", "100", "--elastic-memory"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--device-budget", "30%", "--host-budget", "40%", "--context", "64"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("--strategy", "persistent", "--device-budget", "50%", "--host-budget", "0B"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_flags_give_the_plan_again(model: Path, given: tuple[str, ...]) -> None:
    first = planned(str(model), *given)
    flags = " ".join(first["flags"]).split()
    assert {"--strategy", "--host-budget", "--context"} <= set(flags)
    again = planned(str(model), *flags)
    assert chosen(again) == chosen(first)
    assert again["flags"] == first["flags"]


def test_what_a_file_of_settings_says_is_planned(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "coterie.toml"
    file.write_text(
        f'[[specialists]]\nname = "moe"\nmodel = "{model}"\n'
        'moe = {strategy = "lru", cache_capacity = 5, elastic_memory = true}\n'
    )
    flags = planned("--config", str(file))["flags"]
    assert flags[-1] == "--elastic-memory"
    assert {"--strategy lru", "--cache-capacity 5"} <= set(flags)


def test_the_bound_is_one(model: Path) -> None:
    for given in ((), ("--device-budget", "25%", "--host-budget", "25%")):
        rows = planned(str(model), *given)["rows"]
        bounds = [row for row in rows if row["strategy"] == "belady"]
        assert bounds
        for bound in bounds:
            same = [row for row in rows if row["device_budget"] == bound["device_budget"]]
            for key in ("prefill_tokens_s", "decode_tokens_s"):
                assert bound[key] >= max(row[key] for row in same)


@pytest.mark.parametrize("total", [1, 7, 16, 1920, 6144])
def test_shares_come_to_the_slots_they_stand_for(total: int) -> None:
    for slots in range(1, total + 1, max(1, total // 97)):
        assert share(share_of(slots, total), total, "device_budget") == slots


def test_bytes_are_for_people(model: Path) -> None:
    _, out, _ = run(str(model))
    assert not re.search(r"\d{7,}B", out)


def test_what_a_server_refuses_is_not_planned(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flag, value, said in (
        ("--device", "cuda", "there is no CUDA device here"),
        ("--device", "banana", "it is auto, cpu, cuda or cuda:N"),
        ("--threads", "100000", "it must be 1 to 1024"),
        ("--context", "129", "over the model's own limit of 128"),
    ):
        status, out, err = run(str(model), flag, value)
        assert (status, out) == (2, "") and said in err, err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert run(str(model), "--device", "cuda:2")[0] == 2
