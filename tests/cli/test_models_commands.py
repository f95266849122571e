"""`coterie pull`, `list`, `show`, `rm` and `ps` on a hub and a server that are real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.cli import terminal
from coterie.cli.main import main
from coterie.weights.files import file_lock
from coterie.weights.home import models_dir
from tests.helpers.hub_site import HubRepo, HubSite, reachable_hub
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served

Capture = pytest.CaptureFixture[str]

MODEL = bytes(range(256)) * 4096  # 1 MiB
ROOT = Path(__file__).resolve().parents[2]
SPEC = "hf:Qwen/Qwen3-4B-GGUF:Q4_K_M"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, private_home: Path) -> Iterator[HubSite]:
    with reachable_hub(monkeypatch, private_home) as site:
        files = {f"Qwen3-4B-{label}.gguf": MODEL for label in ("Q4_K_M", "Q8_0")}
        site.repos["Qwen/Qwen3-4B-GGUF"] = HubRepo(files)
        yield site


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(str(tiny_checkpoint("llama")), "--name", "tiny")
    yield served
    served.stop()


def run(capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: str) -> str:
    """One line, and no traceback."""
    capsys.readouterr()
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status in (1, 2)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("coterie")
    return line


def test_a_model_is_fetched_listed_shown_and_removed(
    hub: HubSite, private_home: Path, capsys: Capture
) -> None:
    assert "no models here yet" in run(capsys, "list")
    path = Path(run(capsys, "pull", "qwen3:4b").strip())
    assert path.read_bytes() == MODEL

    [found] = json.loads(run(capsys, "list", "--json"))
    assert found["name"] == "qwen3:4b" and found["source"] == SPEC
    assert found["path"] == str(path) and found["bytes"] >= len(MODEL)
    shown = run(capsys, "list")
    assert "qwen3:4b" in shown and SPEC in shown and found["fetched"][:10] in shown
    names = {item["name"]: item for item in json.loads(run(capsys, "list", "--names", "--json"))}
    assert names["qwen3:4b"]["here"] and not names["qwen3:8b"]["here"]
    assert not names["gpt-oss:20b"]["can_open"] and names["gpt-oss:20b"]["needs"]

    said = run(capsys, "rm", "qwen3:4b")
    assert SPEC in said and "1.0 MB freed" in said
    assert json.loads(run(capsys, "list", "--json")) == [] and not path.exists()
    assert not [item for item in private_home.rglob("*") if item.suffix in (".gguf", ".removed")]
    assert "no such model on this machine" in refused(capsys, "rm", "qwen3:4b")


def test_the_lists_fit_a_terminal(
    hub: HubSite, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run(capsys, "pull", "qwen3:4b")
    for arguments in (["list"], ["list", "--names"], ["show", "gpt-oss"]):
        assert max(map(len, run(capsys, *arguments).splitlines())) <= 80


def test_show_tells_what_the_table_knows(private_home: Path, capsys: Capture) -> None:
    """Without the network, and without the file."""
    shown = run(capsys, "show", "qwen3:4b")
    for words in ("Apache-2.0", "2.5 GB", "Qwen3-4B-Q4_K_M.gguf", "coterie pull qwen3:4b"):
        assert words in shown
    assert run(capsys, "show", SPEC) == shown
    report = json.loads(run(capsys, "show", "gpt-oss", "--json"))
    assert report["named"]["can_open"] is False and "MXFP4" in report["named"]["needs"]
    assert "cannot be opened" in run(capsys, "show", "gpt-oss")
    assert "coterie pull hf:org/other" in refused(capsys, "show", "hf:org/other")
    assert list(private_home.iterdir()) == []


def test_show_of_a_file_is_what_inspect_shows(capsys: Capture) -> None:
    tiny = str(tiny_checkpoint("llama"))
    assert run(capsys, "show", tiny) == run(capsys, "inspect", tiny)
    shown, inspected = (
        json.loads(run(capsys, command, tiny, "--json")) for command in ("show", "inspect")
    )
    assert shown == inspected


def test_only_what_was_fetched_is_removed(hub: HubSite, tmp_path: Path, capsys: Capture) -> None:
    for spec in (SPEC, "hf:Qwen/Qwen3-4B-GGUF:Q8_0"):
        run(capsys, "pull", spec)
    line = refused(capsys, "rm", "hf:Qwen/Qwen3-4B-GGUF")
    assert "2 models are meant" in line and SPEC in line
    own = tmp_path / "own.gguf"
    own.write_bytes(MODEL)
    for path in (own, models_dir(), models_dir() / ".." / own.name, Path("/")):
        refused(capsys, "rm", str(path))
    assert "outside the models folder" in refused(capsys, "rm", str(own))
    assert own.exists() and len(json.loads(run(capsys, "list", "--json"))) == 2
    # a path that list shows is as good as a name
    path = json.loads(run(capsys, "list", "--json"))[0]["path"]
    run(capsys, "rm", path)
    assert not Path(path).parent.exists()
    run(capsys, "rm", "hf:Qwen/Qwen3-4B-GGUF")
    assert json.loads(run(capsys, "list", "--json")) == []


def test_what_arrived_of_a_broken_download_is_removed(
    hub: HubSite, private_home: Path, capsys: Capture
) -> None:
    hub.cuts = [400_000] * 5
    assert main(["pull", "qwen3:4b"]) == 1
    assert "Try again; what has arrived is kept" in capsys.readouterr().err
    [part] = private_home.rglob("*.part")
    lock = part.parent.parent / "hf--Qwen--Qwen3-4B-GGUF.lock"
    with file_lock(lock):
        assert "being fetched now" in refused(capsys, "rm", "qwen3:4b")
    assert part.exists()
    assert "(unfinished): 400.0 KB freed" in run(capsys, "rm", "qwen3:4b")
    assert not part.parent.exists()


def test_ps_shows_what_a_server_has_loaded(server: Served, capsys: Capture) -> None:
    [model] = json.loads(run(capsys, "ps", "--url", server.url, "--json"))
    shown = run(capsys, "ps", "--url", server.url)
    assert model["name"] == "tiny:latest" and model["size"] > 0
    assert re.search(r"^tiny .* RAM ", shown, re.MULTILINE)
    line = refused(capsys, "ps", "--url", "http://127.0.0.1:9")
    assert "no answer from http://127.0.0.1:9" in line and "coterie serve" in line


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["serv"], "serve"),
        (["pul", "qwen3"], "pull"),
        (["expert", "instal"], "install"),
        (["serve", "--prot", "80"], "--port"),
        (["serve", "--prot=80"], "--port"),
        # told before the flag that is missing
        (["run", "--promt", "a"], "--prompt"),
        (["serve", "--dtype", "fp23"], "fp32"),
        (["pull", "smolm2"], "smollm2"),
        (["show", "qwen3:4"], "qwen3:4b"),
    ],
)
def test_did_you_mean(arguments: list[str], meant: str, capsys: Capture) -> None:
    assert re.search(rf"[Dd]id you mean {re.escape(meant)}\b", refused(capsys, *arguments))


def test_nothing_is_meant_by_what_is_unlike_everything(capsys: Capture) -> None:
    assert "did you mean" not in refused(capsys, "serve", "--xyzzy")
    assert "did you mean" not in refused(capsys, "xyzzy")


def test_progress_without_a_terminal_is_lines(capsys: Capture) -> None:
    """Of a download that goes on at 40 MB: the speed is of what arrives now."""
    line = terminal._LineProgress("fetching x")
    line.begun = (0.0, 40_000_000)
    line.shown_at = -10.0
    monotonic = line._rate(10.0, 60_000_000, 100_000_000)
    assert monotonic == ", 2.0 MB/s, 20 s left"
    assert line._rate(10.0, 100_000_000, 100_000_000) == ", 6.0 MB/s"
    line(50_000_000, 100_000_000)
    assert "fetching x:  50% of 100 MB" in capsys.readouterr().err
    assert [terminal.duration(value) for value in (8, 125, 4800)] == [
        "8 s",
        "2 min 5 s",
        "1 h 20 min",
    ]


def test_progress_on_a_terminal_is_a_bar(hub: HubSite) -> None:
    """One line of 80 columns with bytes, speed and time left, while half has arrived."""
    hub.halfway = threading.Event()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", "pull", SPEC],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"},
    )
    os.close(theirs)
    shown = ""
    with process:
        while not re.search(r"0\.5/1\.0 MB \S+ [kM]B/s -?[\d:-]+", _plain(shown)):
            shown += os.read(ours, 65536).decode(errors="replace")
        hub.halfway.set()
        assert process.wait(timeout=120) == 0
    os.close(ours)
    lines = re.split(r"[\r\n]+", _plain(shown))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("fetching") for line in lines)


def _plain(text: str) -> str:
    """Without what steers the terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
