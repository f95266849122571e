"""The seed's own SDK examples, in both languages, against the real server."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.helpers.serving.sdk_clients import HERE, PYTHON, node, run

EXAMPLES = HERE / "examples"


def test_python_example(environment: dict[str, str]) -> None:
    environment["PYTHONPATH"] = str(PYTHON)
    printed = run([sys.executable, EXAMPLES / "seed_example.py"], environment)
    said = re.search(r"^Used experts: \[\]\nLatency: \d+(\.\d+)?ms\n", printed, re.MULTILINE)
    assert said, printed
    assert said.start() > 0, "no text was printed before the experts"
    assert len(printed) > said.end(), "nothing was streamed"


def test_typescript_example(environment: dict[str, str], package: Path) -> None:
    printed = run([node(), package / "built/examples/seed_example.js"], environment)
    said = re.search(r"^Experts: \n", printed, re.MULTILINE)
    assert said, printed
    assert said.start() > 0, "no text was printed before the experts"
    assert len(printed) > said.end(), "nothing was streamed"


def test_only_the_import_line_differs_from_the_seed() -> None:
    for name, word in (
        ("seed_example.py", "coterie_client"),
        ("seed_example.ts", "@coterie/client"),
    ):
        lines = (EXAMPLES / name).read_text().splitlines()
        assert [word in line for line in lines].count(True) == 1, name
        assert word in lines[0], name
