"""The seed's own SDK examples, in both languages, against the real server."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.helpers.serving.sdk_clients import HERE, PYTHON, node, run

EXAMPLES = HERE / "examples"


# the examples give no seed, and a model of random weights may end at once
ATTEMPTS = 6


def check_printed(command: list[str | Path], environment: dict[str, str], facts: str) -> None:
    """Text, then the facts of the answer, then the text that was streamed."""
    for _ in range(ATTEMPTS):
        printed = run(command, environment)
        found = re.search(facts, printed, re.MULTILINE)
        assert found, printed
        if found.start() > 0 and found.end() < len(printed):
            return
    raise AssertionError(f"no text, or nothing was streamed: {printed}")


def test_python_example(environment: dict[str, str]) -> None:
    environment["PYTHONPATH"] = str(PYTHON)
    facts = r"^Used experts: \[\]\nLatency: \d+(\.\d+)?ms\n"
    check_printed([sys.executable, EXAMPLES / "seed_example.py"], environment, facts)


def test_typescript_example(environment: dict[str, str], package: Path) -> None:
    program = package / "built/examples/seed_example.js"
    check_printed([node(), program], environment, r"^Experts: \n")


def test_only_the_import_line_differs_from_the_seed() -> None:
    for name, word in (
        ("seed_example.py", "coterie_client"),
        ("seed_example.ts", "@coterie/client"),
    ):
        lines = (EXAMPLES / name).read_text().splitlines()
        assert [word in line for line in lines].count(True) == 1, name
        assert word in lines[0], name
