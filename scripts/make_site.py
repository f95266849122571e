"""`make docs-site`: the Markdown pages of this repository as a site in build/site.

    python scripts/make_site.py

Pages and the files that they link to are copied as they lie here, so that their links work on the
site as they do in the repository; then mkdocs builds it, and fails on a link or anchor that leads
nowhere, and on a page that the navigation (mkdocs.yml) does not have.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / ".cache" / "site"
# folders with pages
FOLDERS = ("docs", "examples", "routing_set", "sdk/python", "sdk/typescript")
_LINK = re.compile(r"\]\(([^)#\s]+)")


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*.md") if "node_modules" not in p.parts]
    return sorted(found)


def linked(page: Path) -> list[Path]:
    """Files of this repository that the page links to."""
    targets = _LINK.findall(page.read_text(encoding="utf-8"))
    paths = [(page.parent / target).resolve() for target in targets if "://" not in target]
    return [path for path in paths if path.is_file() and path.is_relative_to(ROOT)]


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    every = pages()
    for path in {*every, *(target for page in every for target in linked(page))}:
        copy = PAGES / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    # not with --quiet: mkdocs would not count what it does not print
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT, check=False
    )
    if done.returncode == 0:
        print("build/site/index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
