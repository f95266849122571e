"""The examples of docs/sdk.md, run as they are written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.serving.sdk_clients import PYTHON, ROOT, examples, node, run


def test_python_examples(environment: dict[str, str], tmp_path: Path) -> None:
    environment["PYTHONPATH"] = str(PYTHON)
    # one process for all: each only asks
    script = tmp_path / "examples.py"
    script.write_text("\n".join(examples("python")))
    printed = run([sys.executable, script], environment)
    assert re.search(r"^succeeded ", printed, re.MULTILINE), printed


@pytest.mark.full
def test_typescript_examples(environment: dict[str, str], package: Path) -> None:
    first, second = (
        run([node(), package / f"built/examples/docs_{number}.js"], environment)
        for number in range(2)
    )
    assert '"given_name"' in first
    assert re.search(r"^succeeded ", second, re.MULTILINE), second
    assert re.search(r"temperature temperature: must be .* req_", second), second


def test_the_docs_have_examples_to_run() -> None:
    assert (len(examples("python")), len(examples("typescript"))) == (4, 2)
    assert (ROOT / "docs/sdk.md").exists()
