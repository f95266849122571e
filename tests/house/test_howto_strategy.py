"""docs/howto/add-a-strategy.md, done literally in a copy of the tree: a wrong page fails.

The page's files are written, its lines are put where it says, its commands are run; then the new
strategy must give the tokens of the model that keeps every expert in memory.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/add-a-strategy.md").read_text(encoding="utf-8")
# every expert in a slot, then few slots and nothing in RAM
PROGRAM = """
import json, sys
from coterie import LLM

answers = []
for strategy, capacity in (("persistent", 24), ("least_used", 2), ("least_used", 7)):
    moe = {"strategy": strategy, "cache_capacity": capacity, "host_budget": "0", "warmup": "none"}
    with LLM(sys.argv[1], dtype="fp32", threads=1, kv_bytes=2_000_000, moe=moe) as llm:
        done = llm.generate([5, 6, 7], temperature=0.0, max_tokens=24, ignore_eos=True)[0]
        report = llm.moe_report()
    evictions = report["tiers"]["device"]["evictions"]
    answers.append(
        {"strategy": report["strategy"], "tokens": done.token_ids, "evictions": evictions}
    )
print(json.dumps(answers))
"""


def blocks(language: str) -> list[tuple[str, str]]:
    """What is in each block of code, and the paragraph before it."""
    found = re.findall(rf"([^\n]+)\n\n```{language}\n(.*?)```", PAGE, re.S)
    return [(code, before) for before, code in found]


def put(path: Path, lines: str, behind: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(behind) == 1, f"{path.name} has no single place behind {behind!r}"
    path.write_text(text.replace(behind, behind + lines), encoding="utf-8")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of one who has followed the page."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("coterie", "tests", "docs"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "pyproject.toml", tree)
    (module, where), (imported, table), (row, last) = blocks("python")
    (name,) = re.findall(r"^`(coterie/[\w/]+\.py)`", where)
    assert not (tree / name).exists()
    (tree / name).write_text(module, encoding="utf-8")
    assert table == "`coterie/moe/dispatch/table.py`, with the other imports:"
    assert last == "and as the last row of `STRATEGIES`:"
    file = tree / "coterie/moe/dispatch/table.py"
    put(file, imported, behind="from coterie.moe.dispatch.layer_grouped import LayerGrouped\n")
    put(file, row, behind='    "adaptive": Adaptive,\n')
    ((heading, place),) = blocks("markdown")
    assert place == "`docs/dispatch.md`, before `### Heatmaps`:"
    page = tree / "docs/dispatch.md"
    text = page.read_text(encoding="utf-8")
    assert text.count("\n### Heatmaps\n") == 1
    page.write_text(text.replace("\n### Heatmaps\n", f"\n{heading}\n### Heatmaps\n"))
    return tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of its own: heatmaps are written into it."""
    folder = tmp_path_factory.mktemp("model") / "moe"
    return str(shutil.copytree(tiny_checkpoint("qwen3_moe"), folder))


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(tree))
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True
    )


@pytest.mark.full
@pytest.mark.timeout(1200)  # one of them runs the tests of every strategy
def test_its_commands_succeed(followed: Path, tmp_path: Path) -> None:
    lines = [line for code, _ in blocks("console") for line in code.splitlines()]
    assert len(lines) == 4 and all(line.startswith("$ .venv/bin/") for line in lines)
    assert "MODEL is your own, or `/tmp/tiny-moe`" in PAGE
    model = str(tmp_path / "tiny-moe")
    for line in lines:
        program, *arguments = shlex.split(line.removeprefix("$ .venv/bin/"))
        given = [each.replace("/tmp/tiny-moe", model) for each in arguments]
        given = [model if each == "MODEL" else each for each in given]
        # pytest is to tell which tests passed
        told = ["-rA"] if program == "pytest" else []
        done = run(followed, *(() if program == "python" else ("-m", program)), *given, *told)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        if program == "python":
            assert Path(model, "config.json").exists()
        elif program == "pytest":
            assert re.search(r"^\d+ passed", done.stdout.splitlines()[-1])
            check_each_file_runs(done.stdout, given)
        else:
            assert "least_used" in done.stdout + done.stderr


def check_each_file_runs(printed: str, arguments: list[str]) -> None:
    """No file of the page's command is there in vain: each has tests of the new strategy."""
    files = [each for each in arguments if each.endswith(".py")]
    assert len(files) == 3
    assert all(re.search(rf"^PASSED {re.escape(file)}::", printed, re.M) for file in files), printed


def test_its_tokens_are_those_of_the_resident_model(followed: Path, model: str) -> None:
    done = run(followed, "-c", PROGRAM, model)
    assert done.returncode == 0, done.stderr[-3000:]
    resident, *others = json.loads(done.stdout)
    assert resident["strategy"] == "persistent" and len(resident["tokens"]) == 24
    for answer in others:
        # it decided, and experts left for others
        assert answer["strategy"] == "least_used" and answer["evictions"] > 0
        assert answer["tokens"] == resident["tokens"]
    assert len(others) == 2


def test_the_new_file_is_clean(followed: Path) -> None:
    written = ("coterie/moe/dispatch/least_used.py", "coterie/moe/dispatch/table.py")
    for tool in (("ruff", "check"), ("ruff", "format", "--check")):
        done = run(followed, "-m", *tool, *written)
        assert done.returncode == 0, done.stdout
