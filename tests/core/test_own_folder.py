"""core/own_folder.py: what killed processes left is removed, and nothing of living ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.core import own_folder
from coterie.core.own_folder import make_own_folder, remove_left_folders, remove_own_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc")
CODE = """
import sys
from pathlib import Path
from coterie.core.own_folder import make_own_folder
print(make_own_folder(Path(sys.argv[1]), "x-"), flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_living_process_stays_in_whatever_container_it_runs(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert other.stdin is not None and other.stdout is not None
    folder = Path(other.stdout.readline().strip())
    # a process id that means nobody here, as that of another container
    foreign = folder.with_name(f"x-{2**22 + 1}-abc")
    folder.rename(foreign)
    try:
        remove_left_folders(tmp_path, "x-")
        assert foreign.exists()
    finally:
        other.kill()
        other.communicate()
    (tmp_path / "mine").mkdir()
    remove_left_folders(tmp_path, "x-")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_place_with_many_entries_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(own_folder, "remove_left_folders", lambda *place: read.append(place))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        remove_own_folder(make_own_folder(tmp_path, "x-"))
    assert len(read) == 1 and not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
