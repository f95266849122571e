"""The programs of examples/clients do what they say, against the server of two_specialists.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.weights.home import models_dir
from tests.helpers.serving.server_process import Served, own_home

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "clients"
LONGEST_EXAMPLE = 40


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = own_home(tmp_path_factory.mktemp("examples") / "home")
    # what is fetched stays with the shared home; jobs and records go to this one
    (home / "models").symlink_to(models_dir())
    served = Served(*("--config", str(EXAMPLES / "two_specialists.toml")), COTERIE_HOME=str(home))
    yield served
    served.stop()


def run(name: str, **environment: str) -> dict[str, str]:
    """What an example prints, by the word in front of each line's colon."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^(\w+): (.*)$", done.stdout, re.M))


@pytest.mark.full
def test_openai(server: Served) -> None:
    printed = run("openai_chat.py", COTERIE_BASE_URL=server.url)
    assert printed["models"] == "chat, batch, auto"
    assert "Paris" in printed["answer"] and printed["stream"] == printed["answer"]
    name, age = printed["json"].split()
    assert name in ("Ada", "Alan") and int(age) <= 99


@pytest.mark.full
def test_anthropic(server: Served) -> None:
    printed = run("anthropic_messages.py", COTERIE_BASE_URL=server.url)
    assert int(printed["prompt"].split()[0]) > 5
    assert "Paris" in printed["answer"] and "Paris" in printed["stream"]


@pytest.mark.full
def test_native(server: Served) -> None:
    printed = run("native_infer.py", COTERIE_BASE_URL=server.url)
    assert printed["answer"].endswith("by chat")
    assert "with confidence" in printed["why"] and printed["took"].endswith(" ms")
    status, _, text = printed["job"].partition(" ")
    assert status == "succeeded" and text


@pytest.mark.full
def test_two_specialists(server: Served) -> None:
    printed = run("two_specialists.py", COTERIE_BASE_URL=server.url)
    assert "Paris" in printed["chat"] and printed["batch"] == printed["chat"]


@pytest.mark.full
def test_embedded(default_model_path: Path) -> None:
    printed = run("embedded_llm.py")
    assert "Paris" in printed["chat"] and printed["stream"] == printed["chat"]


def test_each_is_short_and_in_the_table() -> None:
    table = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".toml"):
            assert f"clients/{path.name}" in table
            assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_EXAMPLE
