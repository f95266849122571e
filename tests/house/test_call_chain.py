"""Two roads through the code are as short as docs/architecture.md says: scripts/call_chain.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.models.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
HEADINGS = {"chat": "### Where the code of that road is", "moe": "### One missed expert"}


@pytest.mark.full
@pytest.mark.parametrize(("road", "architecture"), [("chat", "llama"), ("moe", "qwen3_moe")])
def test_a_road_is_as_short_as_the_page_says(road: str, architecture: str) -> None:
    row = re.search(rf"^\| `{road}` \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert row is not None
    script = ROOT / "scripts/call_chain.py"
    command = [sys.executable, str(script), road, str(tiny_checkpoint(architecture))]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    found = re.match(r"\w+: (\d+) frames in (\d+) files, (\d+) files called\n", done.stdout)
    assert found is not None, done.stdout
    for measured, written in zip(found.groups(), row.groups(), strict=True):
        assert 0 < int(measured) <= int(written), done.stdout
    # every frame is in the drawing, in this order
    frames = re.findall(r"^    (\S+\.py):(\S+)$", done.stdout, re.MULTILINE)
    drawing = PAGE.partition(HEADINGS[road])[2].partition("\n#")[0]
    drawn = re.findall(r"^ *(\S+\.py) +`?([\w.]+)", drawing, re.MULTILINE)
    assert [pair for pair in drawn if pair in frames] == frames
