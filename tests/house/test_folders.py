"""A run of the tests leaves nothing in the temporary directory, and fails where something of ours
would have been left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.folders import ROOT, RUN

LEAKING = """
import subprocess, sys, tempfile
from tests.helpers.folders import temporary_folder

def test_it(tmp_path):
    temporary_folder()
    (tmp_path / "file").write_text("x")
    for code in {codes!r}:
        subprocess.run([sys.executable, "-c", code], check=True)
"""
# by a command that the test starts, as a server or a sandbox would
LEAK = "import tempfile; tempfile.mkdtemp(prefix='coterie-left-')"


@pytest.mark.parametrize("codes", [[], [LEAK]])
def test_a_leak_fails_the_run_and_is_removed(codes: list[str], tmp_path: Path) -> None:
    file, temporary = tmp_path / "test_leaking.py", tmp_path / "temporary"
    temporary.mkdir()
    file.write_text(LEAKING.format(codes=codes))
    environment = {name: value for name, value in os.environ.items() if name != RUN}
    environment |= {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(file)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == len(codes), done.stdout + done.stderr
    assert ("left in the temporary folder" in done.stderr) == bool(codes)
    assert not codes or "coterie-left-" in done.stderr
    assert not list(temporary.iterdir())
