"""What a newcomer meets first is true: the tour's program runs, links lead somewhere, and a wheel
carries the kernel sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from coterie.core.config import load

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_two_commands_are_shown() -> None:
    assert "make run" in README and "make test" in README


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    followed = 0
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            target, _, anchor = link.partition("#")
            if "://" in link:
                continue
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} points to {target}"
            if anchor and path.suffix == ".md":
                assert anchor in anchors(path), f"{page.name} points to {link}"
            followed += 1
    assert len(pages) > 30 and followed > 80


@cache
def anchors(page: Path) -> set[str]:
    """Those of the page's headings, as forges and mkdocs name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


# written by whoever follows a page
FILES_TO_WRITE = {
    "coterie/adapters/kinds/outer.py",
    "coterie/moe/dispatch/least_used.py",
    "tests/adapters/test_outer.py",
}


def test_how_to_pages_name_files_that_exist() -> None:
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "howto").glob("*.md")]
    followed = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"`((?:coterie|tests|scripts|examples)/[\w/]+\.\w+)`", text))
        for name in named - FILES_TO_WRITE:
            assert (ROOT / name).exists(), f"{page.name} names {name}"
            followed += 1
    assert followed > 20


def test_the_specialists_of_the_page_are_a_config(tmp_path: Path) -> None:
    page = (ROOT / "docs/howto/add-a-specialist.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    (tmp_path / "coterie.toml").write_text(block)
    found = load(tmp_path / "coterie.toml", {})
    assert [entry.name for entry in found.specialists] == ["chat", "batch", "coder"]


def test_the_embedded_example_runs(default_model_path: Path) -> None:
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", tour, re.S)
    (program,) = [text for text in programs if "from coterie import LLM" in text]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_import_is_light() -> None:
    program = "import sys, coterie; assert 'torch' not in sys.modules; print(coterie.__all__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "['LLM', '__version__']", done.stderr


@pytest.mark.full
def test_a_wheel_carries_the_kernel_sources(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=240)
    (wheel,) = tmp_path.glob("coterie-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {Path(name).name for name in archive.namelist() if "/csrc/" in name}
    assert packed == {path.name for path in (ROOT / "coterie/kernels/cpu/csrc").iterdir()}
