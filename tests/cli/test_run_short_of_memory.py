"""`coterie run` where the system refuses memory: the command ends, with its answer or with why."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models.tiny import tiny_checkpoint

# as `coterie`, and says at its end how much address space it had
COMMAND = """
import re, sys
from pathlib import Path
from coterie.cli.main import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    print(re.search("VmPeak.*", Path("/proc/self/status").read_text())[0], file=sys.stderr)
"""
ASKED = ["--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--context", "2048"]
MB = 1 << 20


@pytest.fixture(scope="module")
def moe() -> Path:
    """Its experts are far larger than what else is allocated after the start."""
    return tiny_checkpoint("qwen3_moe", moe_intermediate_size=3584, max_position_embeddings=4096)


def run(moe: Path, most_bytes: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "run", str(moe), "--prompt", "one two three " * 150,
         "--strategy", "persistent", "--device-budget", "100%", "--threads", "1", *ASKED],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most_bytes, hard)),
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(moe: Path) -> tuple[str, int]:
    """What it says where there is room, and the bytes that it needs."""
    ended = run(moe)
    assert ended.returncode == 0, ended.stderr
    peak = re.search(r"VmPeak:\s+(\d+) kB", ended.stderr)
    assert peak
    return ended.stdout, int(peak[1]) << 10


@pytest.mark.parametrize(
    "missing_mb",
    [
        3,
        12,
        30,
        *(pytest.param(mb, marks=pytest.mark.full) for mb in (1, 2, 6, 9, 15, 18, 21, 24, 45)),
    ],
)
def test_it_ends(moe: Path, whole: tuple[str, int], missing_mb: int) -> None:
    text, needed = whole
    ended = run(moe, needed - missing_mb * MB)
    said = ended.stderr.partition("VmPeak")[0].strip().splitlines()
    if ended.returncode == 0:
        assert ended.stdout == text
    else:
        assert ended.returncode in (1, 2) and said[-1].startswith("coterie: "), ended.stderr
        assert "Traceback" not in ended.stderr
