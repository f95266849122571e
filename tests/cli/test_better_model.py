"""A better model where there is room: one line on a terminal only; `--yes` takes it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from coterie.cli import better
from coterie.cli.main import main
from coterie.moe.planner.machine import (
    MACHINE,
    STALE_AFTER_S,
    Machine,
    MachineIdentity,
    MeasurementMark,
    save,
)
from coterie.weights.room import ModelRoom, model_room
from coterie.weights.sources.names import better_models
from coterie.workers.memory import cores, cpu_name
from tests.helpers.hub_site import HubRepo, HubSite, reachable_hub

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, private_home: Path) -> Iterator[HubSite]:
    """It has every model that may be offered, each with a byte of it."""
    with reachable_hub(monkeypatch, private_home) as site:
        for model in better_models():
            repo = model.source.removeprefix("hf:").partition(":")[0]
            site.repos[repo] = HubRepo({model.file: b"G"})
        yield site


def room(gigabytes: float, *, is_gpu: bool = False) -> ModelRoom:
    return ModelRoom(int(gigabytes * GB), is_gpu=is_gpu)


def name(gigabytes: float, *, is_gpu: bool = False) -> str:
    model = better.best_model(room(gigabytes, is_gpu=is_gpu))
    return model.name if model else ""


def test_the_best_that_fits(private_home: Path) -> None:
    """A CPU of unknown speed gets none that reads more than it can for each token."""
    assert [name(size) for size in (0.5, 1, 4, 8, 16, 64)] == [
        "",
        "qwen3:0.6b",
        "qwen3:4b",
        "qwen3:4b",
        "qwen3:4b",
        # most of its experts rest
        "qwen3:30b",
    ]
    assert [name(size, is_gpu=True) for size in (8, 16, 64)] == [
        "qwen3:8b",
        "qwen3:14b",
        "qwen3:30b",
    ]


def measured(bandwidth: float, *, cpu: str = "", at: float = 0.0, disturbed: str = "") -> Machine:
    identity = MachineIdentity(cpu or cpu_name(), cores(), "cpu", "2", "native")
    mark = MeasurementMark(at or time.time(), {}, disturbed)
    return Machine(identity, mark.at, bandwidth, bandwidth, 1e-5, marks={MACHINE: mark})


def test_the_speed_is_that_of_the_measured_memory(private_home: Path) -> None:
    [model] = [item for item in better_models() if item.name == "qwen3:4b"]
    assert better.offer_line(model, room(8), "serve") == (
        "better: qwen3:4b, 2.5 GB, Apache-2.0: coterie serve qwen3:4b"
    )
    save(measured(100e9))
    assert "<40 tok/s: coterie run qwen3:4b" in better.offer_line(model, room(8), "run")
    # a slow memory: what reads less for each token
    assert name(16) == "qwen3:14b"
    save(measured(10e9))
    assert name(16) == "qwen3:1.7b" and name(64) == "qwen3:1.7b"
    assert "tok/s" not in better.offer_line(model, room(8, is_gpu=True), "run")


@pytest.mark.parametrize(
    "machine",
    [
        measured(1e9, cpu="another"),
        measured(1e9, at=time.time() - STALE_AFTER_S - 60),
        measured(1e9, disturbed="another process"),
    ],
)
def test_a_measurement_of_another_time_or_machine_counts_for_nothing(
    private_home: Path, machine: Machine
) -> None:
    path = save(machine)
    assert json.loads(path.read_text())["identity"] == asdict(machine.identity)
    assert name(16) == "qwen3:4b"
    path.write_text("[]")
    assert name(16) == "qwen3:4b"


def test_the_line_fits_a_terminal(private_home: Path) -> None:
    save(measured(900e9))
    for model in better_models():
        for command in ("run", "serve"):
            line = better.offer_line(model, room(99), command)
            assert " tok/s" in line and len(line) <= 80


class OnTerminal:
    """A command as a person sees it. It is killed at the end, if it has not ended."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *arguments],
            stdout=theirs,
            stderr=theirs,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "80", "TERM": "xterm"},
        )
        os.close(theirs)
        self.shown = ""

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.read_until("nothing that it says")
        self.process.wait(120)
        os.close(self._ours)

    def read_until(self, words: str) -> str:
        """What it has said when it says the words, or at its end."""
        try:
            while words not in self.shown and (piece := os.read(self._ours, 65536)):
                self.shown += piece.decode(errors="replace")
        except OSError:
            # the last process has closed the terminal
            pass
        return self.shown


@pytest.fixture
def default_here(private_home: Path, default_model_path: Path) -> None:
    """The default model and the compiled kernels in the home of the test."""
    (private_home / "models").mkdir()
    folder = default_model_path.parent
    (private_home / "models" / folder.name).symlink_to(folder)
    (private_home / "kernels").symlink_to(folder.parent.parent / "kernels")


def test_a_command_on_a_terminal_names_it_and_nowhere_else(
    hub: HubSite, default_here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = better.best_model(model_room())
    if wanted is None:
        pytest.skip("this machine has no memory for a better model")
    asked = ["run", "--prompt", "Hi", "--max-tokens", "2"]
    with OnTerminal(*asked) as terminal:
        shown = terminal.read_until("nothing that it says")
    [line] = [line for line in shown.splitlines() if line.startswith("better: ")]
    assert f"coterie run {wanted.name}" in line and "Apache-2.0" in line
    assert len(hub.ranges()) == 1, "one byte was asked for"
    hub.asked.clear()
    assert main(asked) == 0
    assert hub.asked == [] and "better" not in capsys.readouterr().err


@pytest.mark.full
def test_a_server_on_a_terminal_names_it(hub: HubSite, default_here: None) -> None:
    wanted = better.best_model(model_room())
    if wanted is None:
        pytest.skip("this machine has no memory for a better model")
    with OnTerminal("serve", "--port", "0", "--threads", "1") as terminal:
        shown = terminal.read_until("try it:")
        shown = terminal.read_until(f"coterie serve {wanted.name}")
    assert shown.count("better: ") == 1 and f"better: {wanted.name}" in shown


def test_nothing_is_said_where_the_hub_cannot_be_reached(
    hub: HubSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    better.tell_better(room(8), "serve", said.append)
    assert said == ["better: qwen3:4b, 2.5 GB, Apache-2.0: coterie serve qwen3:4b"]
    for variable, value in (("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")):
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            better.tell_better(room(8), "serve", said.append)
    hub.repos.clear()
    better.tell_better(room(8), "serve", said.append)
    assert len(said) == 1


def test_yes_takes_it(hub: HubSite, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = better.best_model(model_room())
    if wanted is None:
        pytest.skip("this machine has no memory for a better model")
    # what the stand-in has is no model, and this is said of the one that was fetched
    assert main(["run", "--yes", "--prompt", "Hi"]) == 1
    said = capsys.readouterr().err
    assert f"taking {wanted.name}" in said and wanted.file in said


def test_yes_without_room_is_the_default(
    private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert better.taken_for(room(0.1)) is None
    assert "no better model fits (0.1 GB of RAM free)" in capsys.readouterr().err


def test_yes_chooses_the_model_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for chosen in (["smollm2"], ["--config", "coterie.toml"]):
        assert main(["run", "--yes", *chosen, "--prompt", "Hi"]) == 2
        assert "leave out MODEL and --config" in capsys.readouterr().err


def test_the_first_process_of_a_server_imports_no_torch_for_it(private_home: Path) -> None:
    code = (
        "import sys; from coterie.cli import better; from coterie.weights.room import model_room;"
        "better.best_model(model_room('cpu')); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
    assert not re.search("Traceback", done.stderr)
