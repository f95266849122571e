"""docs/howto/add-an-adapter-kind.md, done literally in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "add-an-adapter-kind.md"


def blocks(language: str) -> list[tuple[str, str]]:
    """The paragraph before each code block, and the code."""
    found = re.findall(
        rf"^([^\n]+(?:\n[^\n]+)*)\n\n```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    assert len(found) == PAGE.read_text().count(f"```{language}")
    return found


def insert_row(path: Path, table: str, row: str) -> None:
    """At the end of a literal table."""
    text, rows = re.subn(
        rf"^({table}: .*?)^}}", lambda m: m[1] + row + "}", path.read_text(), flags=re.M | re.S
    )
    assert rows == 1
    path.write_text(text)


def import_beside(path: Path, package: str, module: str) -> None:
    """One more name in the line that imports modules of a package, in order."""
    text = path.read_text()
    line = re.search(rf"^from {package} import (.+)$", text, re.M)
    assert line is not None
    names = ", ".join(sorted([*line[1].split(", "), module]))
    path.write_text(text.replace(line[0], f"from {package} import {names}"))


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_page_adds_a_kind(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("coterie", "tests"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "pyproject.toml", tree)

    written, changed = [], []
    for before, code in blocks("python"):
        place = tree / re.findall(r"`([\w/]+\.py)`", before)[0]
        table = re.search(r"a row in `(\w+)`:$", before)
        if table is None:
            assert not place.exists()
            place.write_text(code)
            written.append(str(place.relative_to(tree)))
            continue
        insert_row(place, table[1], code)
        if "import the module beside the others" in before:
            import_beside(place, "coterie.adapters.kinds", "outer")
        changed.append(str(place.relative_to(tree)))
    assert written == ["coterie/adapters/kinds/outer.py", "tests/adapters/test_outer.py"]
    assert changed == ["coterie/packages/adapter_kinds.py", "coterie/adapters/kinds/table.py"]

    for check in (["check"], ["format", "--check"]):
        run([sys.executable, "-m", "ruff", *check, "--no-cache", *written, *changed], tree)
    ((_, command),) = blocks("console")
    program, *arguments = command.removeprefix("$ ").split()
    assert program == ".venv/bin/pytest"
    said = run([sys.executable, "-m", "pytest", "-rA", *arguments], tree)
    assert "2 passed" in said, said


def run(command: list[str], tree: Path) -> str:
    done = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, timeout=800,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
